// Publish a message from a form: a new one, or one that was sent before, edited.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { ask, get, path } from "../api.js";
import { Card, Empty, Failure, Field, Loaded, MessageLink, Name, say } from "../components.js";
import * as format from "../format.js";
import { useAction, useLoad } from "../hooks.js";
import { route } from "../router.js";
import { Large } from "./large.js";

const NDJSON = "application/x-ndjson";
const NEW = { value: "", kind: "text", key: "", headers: "", kept: { headers: {} } };
// With a byte order mark, if it has one: what is sent again is what was stored.
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function Publish({ topic }) {
  const { resend } = route.value.params;
  const before = useLoad((stop) => (resend === undefined ? NEW : read(topic.name, resend, stop)), [topic.name, resend]);
  return html`<${Card} title=${resend === undefined ? "Publish a message" : `Resend message ${resend}`} note="stored when the bus answers">
    <${Loaded} of=${before}>${(data) => html`<${Again} key=${`${topic.name} ${resend}`} topic=${topic} before=${data} />`}<//>
  <//>`;
}

function Again({ topic, before }) {
  if (before.masked) return html`<${Empty} title="This message cannot be sent again">Settings hide a part of it from you, and what you see is not what was stored. An administrator can resend it.<//>`;
  if (before.reference) return html`<${Large} topic=${topic} message=${before} />`;
  return html`<${Form} topic=${topic} before=${before} />`;
}

/** What was stored, as the form has it: its own bytes, and not what JavaScript makes of them. */
async function read(topic, offset, stop) {
  const where = path`/v1/topics/${topic}/messages/${offset}`;
  const { message } = await get(where, {}, { signal: stop });
  if (message.masked || message.reference) return message;
  const stored = await ask("GET", where, { accept: "application/octet-stream", signal: stop });
  return { ...aboutOf(message), ...valueOf(message, new Uint8Array(await stored.arrayBuffer())) };
}

function valueOf(message, bytes) {
  try {
    return { kind: message.value === undefined ? "text" : "json", value: strict.decode(bytes) };
  } catch {
    return { kind: "base64", value: message.base64 };
  }
}

/** The key and the headers; `kept` are those that the form cannot show without a change. */
function aboutOf({ key, headers }) {
  const lines = [];
  const kept = { headers: {} };
  for (const [name, value] of Object.entries(headers)) {
    if (isLine(name, value)) lines.push(`${name}: ${value}`);
    else kept.headers[name] = value;
  }
  const isShown = typeof key === "string" && key !== "";
  if (!isShown && key !== null) kept.key = key;
  return { key: isShown ? key : "", headers: lines.join("\n"), kept };
}

const isBare = (text) => typeof text === "string" && text === text.trim() && !/[\r\n]/.test(text);
const isLine = (name, value) => name !== "" && !name.includes(":") && isBare(name) && isBare(value);

function headersOf(text) {
  const pairs = text.split(/\r?\n/).filter((one) => one.trim()).map((one) => {
    const [name, ...rest] = one.split(":");
    if (!rest.length) throw new Error(`the header "${name.trim()}" has no colon; write name: value`);
    return [name.trim(), rest.join(":").trim()];
  });
  return Object.fromEntries(pairs);
}

/** A line for the bus. JSON goes as the text that was typed: its numbers keep their digits. */
function lineOf({ value, kind, key, headers, kept }) {
  if (kind === "json") JSON.parse(value);
  const line = kind === "base64" ? { base64: value.trim() } : { text: value };
  if (key) line.key = key;
  else if (kept.key !== undefined) line.key = kept.key;
  const named = { ...kept.headers, ...headersOf(headers) };
  if (Object.keys(named).length) line.headers = named;
  return line;
}

async function send(topic, fields) {
  const where = path`/v1/topics/${topic}/messages`;
  const line = lineOf(fields);
  // A text that may be too long for a line.
  const isAlone = line.text !== undefined && line.key === undefined && !line.headers;
  const answer = isAlone
    ? await ask("POST", where, { body: line.text, type: "text/plain" })
    : await ask("POST", where, { body: `${JSON.stringify(line)}\n`, type: NDJSON });
  return (await answer.json()).offsets[0];
}

function Form({ topic, before }) {
  const [fields, setFields] = useState(before);
  const [sent, setSent] = useState(null);
  const first = useRef(null);
  useEffect(() => first.current?.focus(), []);
  const set = (name) => (event) => setFields({ ...fields, [name]: event.target.value });
  const publish = useAction(async () => {
    const offset = await send(topic.name, fields);
    setSent(offset);
    say(`Published at offset ${format.count(offset)}`);
  });
  const submit = (event) => {
    event.preventDefault();
    publish.run();
  };
  const keyed = (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && submit(event);
  return html`<form class="stack" onSubmit=${submit} onKeyDown=${keyed}>
    <${Field} label="Value as"><select value=${fields.kind} onChange=${set("kind")}><option value="text">Text</option><option value="json">JSON</option><option value="base64">Base64</option></select><//>
    <${Field} label="Value" hint="Ctrl Enter publishes"><textarea ref=${first} value=${fields.value} onInput=${set("value")} spellcheck="false"></textarea><//>
    <div class="columns">
      <${Field} label="Key" hint=${fields.kept.key === undefined ? "Optional" : "Empty: its own key, which is not text"}><input value=${fields.key} onInput=${set("key")} autocomplete="off" /><//>
      <${Field} label="Headers" hint="Optional; one a line, as name: value"><textarea class="short" value=${fields.headers} onInput=${set("headers")} spellcheck="false"></textarea><//>
    </div>
    <${Kept} fields=${fields} change=${setFields} />
    <${Failure} error=${publish.error} />
    <div class="actions"><button class="primary" disabled=${publish.running}>Publish</button>
      ${sent !== null && html`<${MessageLink} topic=${topic.name} offset=${sent}>Show message ${format.count(sent)}<//>`}</div>
  </form>`;
}

/** Headers that are bytes, or have lines: they are sent as they are, or not at all. */
function Kept({ fields, change }) {
  const names = Object.keys(fields.kept.headers);
  if (!names.length) return null;
  const without = () => change({ ...fields, kept: { ...fields.kept, headers: {} } });
  return html`<p class="hint">Sent as they are, because they do not fit into a line: ${names.map((name, index) => html`${index ? ", " : ""}<${Name} key=${name}>${name}<//>`)}.
    <button type="button" class="quiet" onClick=${without}>Leave them out</button></p>`;
}
