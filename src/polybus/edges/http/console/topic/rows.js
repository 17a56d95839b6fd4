// Where the rows of a list of messages come from: a page as JSON, many as Arrow, or a search.
import { ask, get, path } from "../api.js";
import { fromBase64 } from "../format.js";

const ARROW = "application/vnd.apache.arrow.stream";
const SEARCH_STEP_S = 1;
const JSON_ROWS_MAX = 1000;
// Of one step: the most that the bus answers.
const SEARCH_ROWS_MAX = 1000;
const PREVIEW_BYTES = 600;

export const FILTERS = ["text", "header", "path", "equals", "sql"];

export const filtersOf = (params) => Object.fromEntries(FILTERS.filter((name) => params[name]).map((name) => [name, params[name]]));

/** Messages of the offsets `low` to `high`, the newest first: {length, at(index)}. */
export async function readRange(topic, low, high, stop) {
  if (high <= low) return listed([]);
  if (high - low > JSON_ROWS_MAX) return readArrow(topic, low, high, stop);
  const found = [];
  for (let offset = low; offset < high; ) {
    // An answer may hold fewer than were asked for: its size is bounded.
    const read = await get(path`/v1/topics/${topic}/messages`, { offset, stop: high, limit: high - low }, { signal: stop });
    if (!read.messages.length) break;
    found.push(...read.messages);
    offset = read.next;
  }
  return listed(found.reverse());
}

export const listed = (messages) => ({ length: messages.length, at: (index) => messages[index] });

/** Straight from the log, keys and values cut to what a list shows: a row is decoded when it is drawn. */
async function readArrow(topic, low, high, stop) {
  const answer = await ask("GET", path`/v1/topics/${topic}/messages`, { query: { offset: low, stop: high, columns: "offset,timestamp,key,value,protocol,sender", "cut-bytes": PREVIEW_BYTES }, accept: ARROW, signal: stop });
  const [{ tableFromIPC }, content] = await Promise.all([import("../vendor/flechette.js"), answer.arrayBuffer()]);
  const table = tableFromIPC(new Uint8Array(content), { useDate: false, useBigInt: true });
  const columns = Object.fromEntries(table.schema.fields.map(({ name }) => [name, table.getChild(name)]));
  const at = (index) => rowOf(columns, table.numRows - 1 - index);
  return { length: table.numRows, at };
}

const decoder = new TextDecoder();

function rowOf(columns, index) {
  const value = columns.value.at(index) ?? new Uint8Array();
  const key = columns.key?.at(index);
  return {
    offset: Number(columns.offset.at(index)),
    timestamp: Number(columns.timestamp.at(index)) / 1000,
    key: key instanceof Uint8Array ? decoder.decode(key) : key ?? null,
    headers: {},
    protocol: columns.protocol.at(index),
    sender: columns.sender?.at(index),
    size: Number(columns.size.at(index)),
    text: decoder.decode(value),
  };
}

/**
 * Search backwards from `high`, step by step, for `longest_s()` at most. `progress` gets what was found so far.
 * Returns where to search on, or null if everything was seen.
 */
export async function search(topic, filters, { low, high, limit, longest_s, before = [] }, progress, stop) {
  const found = [...before];
  let end = high;
  let scanned = 0;
  const began_ms = performance.now();
  const took_s = () => (performance.now() - began_ms) / 1000;
  while (end !== null && end > low && found.length - before.length < limit && took_s() < longest_s()) {
    const missing = limit - (found.length - before.length);
    const query = { ...filters, "from-offset": low, stop: end, newest: true, limit: Math.min(SEARCH_ROWS_MAX, missing), "time-s": Math.max(0.05, Math.min(SEARCH_STEP_S, longest_s() - took_s())) };
    const step = await get(path`/v1/topics/${topic}/search`, query, { signal: stop });
    found.push(...step.messages.sort((one, other) => other.offset - one.offset));
    scanned += step.scanned;
    end = step.next;
    progress({ found: [...found], scanned, took_s: took_s(), end });
  }
  return end !== null && end > low ? end : null;
}

/** The offsets of a chosen time, by the time of each message: [low, high], null where it is open. */
export async function offsetsBetween(topic, since, until, stop) {
  const first = async (time) => {
    const read = await get(path`/v1/topics/${topic}/messages`, { time, limit: 1 }, { signal: stop });
    return read.messages[0]?.offset ?? read.next;
  };
  return Promise.all([since ? first(since) : null, until ? first(until) : null]);
}

export const keyText = (key) => (key === null || key === undefined ? "" : typeof key === "string" ? key : key.base64 !== undefined ? decoder.decode(fromBase64(key.base64)) : JSON.stringify(key));
