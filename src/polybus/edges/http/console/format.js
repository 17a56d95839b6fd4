// How numbers, sizes, times and untrusted text are written.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });

/** A count with thousands separators: 1,234,567. */
export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

const exact = new Intl.NumberFormat(undefined, { maximumFractionDigits: 3, maximumSignificantDigits: 3, roundingPriority: "morePrecision" });

/** Any number: small ones keep three digits, large ones three decimals. */
export const number = (value) => (value === null || value === undefined ? "–" : exact.format(value));

/** A large count in few characters: 1.2 M. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${fine.format(value / 1e9)} G`;
  if (size >= 1e6) return `${fine.format(value / 1e6)} M`;
  if (size >= 1e4) return `${fine.format(value / 1e3)} k`;
  return size < 100 && !Number.isInteger(value) ? fine.format(value) : whole.format(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let step = 0;
  let rest = value;
  while (Math.abs(rest) >= 1024 && step < SIZES.length - 1) {
    rest /= 1024;
    step += 1;
  }
  return `${step && rest < 100 ? fine.format(rest) : whole.format(rest)} ${SIZES[step]}`;
}

export const perSecond = (value) => (value === null || value === undefined ? "–" : `${short(value)}/s`);
export const bytesPerSecond = (value) => (value === null || value === undefined ? "–" : `${bytes(value)}/s`);

/** A time span in its two largest units: 3 h 12 min. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return seconds === 0 ? "0 s" : `${fine.format(seconds * 1e6)} µs`;
  if (seconds < 1) return `${fine.format(seconds * 1e3)} ms`;
  if (seconds < 60) return `${fine.format(seconds)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  const [unit, size] = units[first];
  const most = Math.floor(seconds / size);
  const next = units[first + 1];
  const rest = next ? Math.floor((seconds % size) / next[1]) : 0;
  return rest ? `${most} ${unit} ${rest} ${next[0]}` : `${most} ${unit}`;
}

/** A number of messages in few characters, with its unit. */
export const messages = (value) => (value === null || value === undefined ? "–" : `${short(value)} ${value === 1 ? "message" : "messages"}`);

export const plural = (value, word, many = `${word}s`) => `${count(value)} ${value === 1 ? word : many}`;

const two = (value) => String(value).padStart(2, "0");

/** Local time; the date too unless it is today. */
export function time(at, { date = "auto", milliseconds = true } = {}) {
  const when = at instanceof Date ? at : new Date(at);
  if (Number.isNaN(when.getTime())) return "–";
  const clock = `${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
  const text = milliseconds ? `${clock}.${String(when.getMilliseconds()).padStart(3, "0")}` : clock;
  const day = `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())}`;
  const isToday = new Date().toDateString() === when.toDateString();
  return date === "always" || (date === "auto" && !isToday) ? `${day} ${text}` : text;
}

export function utc(at) {
  const when = at instanceof Date ? at : new Date(at);
  return Number.isNaN(when.getTime()) ? "" : `${when.toISOString().replace("T", " ").replace("Z", "")} UTC`;
}

export const PROTOCOLS = {
  "boson-frames": "Boson frames",
  "boson-properties": "Boson properties",
  goms: "goMS",
  queue: "queue",
  msgstream: "msgstream",
  http: "HTTP",
  spark: "Spark",
  internal: "the bus",
};

export const protocol = (name) => PROTOCOLS[name] ?? name;

// Characters that are invisible, or that change the order in which others are shown.
const STRANGE = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const STRANGE_BUT_BREAKS = new RegExp(STRANGE.source.replace("\\u0000-\\u001f", "\\u0000-\\u0008\\u000b-\\u001f"), "g");

function visible(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** Text of strangers on one line: nothing in it is invisible or turns the text around. */
export const safe = (text) => String(text ?? "").replace(STRANGE, visible);

/** The same, with its lines and tabs. */
export const safeLines = (text) => String(text ?? "").replace(STRANGE_BUT_BREAKS, visible);

/** A query for the rows of a topic or table. */
export const selectFrom = (name) => `SELECT *\nFROM "${name.replaceAll('"', '""')}"\nLIMIT 100`;

/** What a message holds, on one line. */
export function preview(message, characters_max = 300) {
  const text = textOf(message);
  return safe(text.length > characters_max ? `${text.slice(0, characters_max)}…` : text);
}

export function textOf(message) {
  if (message.text !== undefined) return message.text;
  if (message.base64 !== undefined) return `base64 ${message.base64}`;
  if (message.reference !== undefined) return `blob ${message.reference.id}, ${bytes(message.reference.size)}`;
  return message.value === undefined ? "" : JSON.stringify(message.value);
}

export function fromBase64(text) {
  const raw = atob(text);
  return Uint8Array.from(raw, (character) => character.charCodeAt(0));
}

export function bytesOf(message) {
  if (message.base64 !== undefined) return fromBase64(message.base64);
  return new TextEncoder().encode(message.text ?? (message.value === undefined ? "" : JSON.stringify(message.value)));
}

/** Lines of a hex view: offset, sixteen bytes, their characters. */
export function hexLines(data, bytes_max = 4096) {
  const lines = [];
  for (let at = 0; at < Math.min(data.length, bytes_max); at += 16) {
    const row = [...data.slice(at, at + 16)];
    const hex = row.map((one) => one.toString(16).padStart(2, "0")).join(" ");
    const characters = row.map((one) => (one >= 0x20 && one < 0x7f ? String.fromCharCode(one) : "·")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${hex.padEnd(47)}  ${characters}`);
  }
  if (data.length > bytes_max) lines.push(`… ${bytes(data.length - bytes_max)} more`);
  return lines;
}
