// One message: as JSON, text, hex, headers, and as its exact bytes on each protocol.
import { html, useMemo } from "../vendor/preact.js";
import { ask, download, get, path, save } from "../api.js";
import { Badge, Card, Copy, Empty, Failure, Loaded, Name, Protocol, Time, Waiting } from "../components.js";
import * as format from "../format.js";
import { useAction, useInView, useLoad } from "../hooks.js";
import { change, href, route } from "../router.js";
import { keyText } from "./rows.js";

const COLOURED_MAX = 200_000;
const WIRE_BYTES_MAX = 2048;
const PARTS = 6;
const VIEWS = { json: "JSON", text: "Text", hex: "Hex", headers: "Headers", wire: "On the wire" };
const strict = new TextDecoder("utf-8", { fatal: true });
const lenient = new TextDecoder();

export function Message({ topic, offset }) {
  const { epoch, view } = route.value.params;
  const message = useLoad((stop) => get(path`/v1/topics/${topic.name}/messages/${offset}`, { epoch }, { signal: stop }), [topic.name, offset, epoch]);
  const raw = useLoad(async (stop) => new Uint8Array(await (await ask("GET", path`/v1/topics/${topic.name}/messages/${offset}`, { query: { epoch }, accept: "application/octet-stream", signal: stop })).arrayBuffer()), [topic.name, offset, epoch]);
  const found = message.data?.message;
  const link = new URL(href("topic", { name: topic.name, message: offset, epoch: topic.epoch, before: offset + 1 }), location.origin).href;
  const box = useInView(offset);
  return html`<aside class="card message" ref=${box} aria-label=${`Message ${offset}`}>
    <header class="card-head"><h2>Message ${format.count(offset)}</h2>${found?.masked && html`<${Badge} tone="warn">masked<//>`}${found?.cut && html`<${Badge}>shown in part<//>`}
      <div class="actions"><${Copy} text=${link} label="Copy link" />
        ${found?.masked ? html`<button type="button" disabled title="a part of it is hidden from you: what you would send is not what was stored">Resend</button>` : html`<a class="button" href=${href("topic", { name: topic.name, tab: "publish", resend: offset })}>Resend</a>`}
        <button type="button" onClick=${() => save(new Blob([raw.data]), `${topic.name.replace(/[^\w.-]/g, "_")}-${offset}`)} disabled=${!raw.data}>Save</button>
        <button type="button" class="quiet" aria-label="Close the message" onClick=${() => change({ message: "", view: "", epoch: "" })}>✕</button></div></header>
    <${Loaded} of=${message}>${() => html`<div class="stack">
      <${Facts} message=${found} topic=${topic} />
      <nav class="tabs" aria-label="Show the message as">${Object.entries(VIEWS).map(([id, text]) => html`<a key=${id} href=${href("topic", { ...route.value.params, view: id })} aria-current=${(view ?? best(found)) === id ? "page" : undefined}>${text}</a>`)}</nav>
      <${Content} view=${view ?? best(found)} message=${found} raw=${raw} topic=${topic} />
    </div>`}<//>
  </aside>`;
}

const best = (message) => (message.reference ? "text" : message.value !== undefined ? "json" : message.base64 !== undefined ? "hex" : "text");

function Facts({ message, topic }) {
  return html`<dl class="facts">
    <dt>Time</dt><dd><${Time} at=${message.timestamp} date="always" /></dd>
    <dt>Sent by</dt><dd><${Protocol} name=${message.protocol} /> ${message.sender && html`<span class="dim">from ${format.safe(message.sender)}</span>`}</dd>
    <dt>Size</dt><dd>${format.bytes(message.size)} <span class="dim">(${format.plural(message.size, "byte")})</span></dd>
    <dt>Position</dt><dd class="mono">${topic.epoch}:${message.offset}</dd>
    ${message.key !== null && html`<dt>Key</dt><dd class="mono">${format.safe(keyText(message.key))}</dd>`}
  </dl>`;
}

function Content({ view, message, raw, topic }) {
  if (view === "wire") return html`<${Wire} topic=${topic} offset=${message.offset} />`;
  if (message.reference && view !== "headers") return html`<${Large} reference=${message.reference} />`;
  if (view === "headers") return html`<${Headers} headers=${message.headers} />`;
  if (raw.error) return html`<${Failure} error=${raw.error} retry=${raw.reload} />`;
  if (!raw.data) return html`<${Waiting} />`;
  if (view === "hex") return html`<pre class="content hex" tabindex="0">${format.hexLines(raw.data).join("\n")}</pre>`;
  if (view === "json") return html`<${Json} data=${raw.data} />`;
  return html`<pre class="content" tabindex="0">${format.safeLines(lenient.decode(raw.data))}</pre>`;
}

/** A payload that is stored apart: it is not shown, but can be saved. */
function Large({ reference }) {
  const saving = useAction(() => download(path`/v1/blobs/${reference.id}`, {}, reference.id));
  return html`<${Empty} title=${`A large payload: ${format.bytes(reference.size)}`}>
    <p>${format.safe(reference.type ?? "")} <code>${format.safe(reference.sha256 ?? "")}</code></p>
    <${Failure} error=${saving.error} /><button type="button" disabled=${saving.running} onClick=${saving.run}>Download it</button><//>`;
}

/** The value with its own digits: numbers are not rounded to those of JavaScript. */
function pretty(data) {
  const exact = JSON.rawJSON ? (_, value, context) => (typeof value === "number" && context?.source ? JSON.rawJSON(context.source) : value) : undefined;
  return JSON.stringify(JSON.parse(strict.decode(data), exact), null, 2);
}

export function Json({ data }) {
  const text = useMemo(() => {
    try {
      return pretty(data);
    } catch {
      return null;
    }
  }, [data]);
  if (text === null) return html`<${Empty} title="This value is not JSON">Look at it as text or hex.<//>`;
  return html`<pre class="content" tabindex="0">${text.length > COLOURED_MAX ? format.safeLines(text) : coloured(text)}</pre>`;
}

const TOKEN = /("(?:[^"\\]|\\.)*")(\s*:)?|\b(true|false|null)\b|(-?\d[\d.eE+-]*)/g;

function coloured(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(TOKEN)) {
    parts.push(text.slice(end, match.index));
    const kind = match[1] ? (match[2] ? "json-key" : "json-string") : match[3] ? "json-word" : "json-number";
    parts.push(html`<span class=${kind}>${format.safeLines(match[1] ?? match[0])}</span>`, match[2] ?? "");
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

function Headers({ headers }) {
  const entries = Object.entries(headers ?? {});
  if (!entries.length) return html`<${Empty} title="This message has no headers">Senders on HTTP, goMS and Boson properties can add some.<//>`;
  return html`<dl class="facts content">${entries.map(([name, value]) => html`<dt key=${name}><${Name}>${name}<//></dt><dd class="mono">${format.safe(keyText(value))}</dd>`)}</dl>`;
}

function Wire({ topic, offset }) {
  const forms = useLoad((stop) => get(path`/v1/topics/${topic.name}/messages/${offset}/wire`, {}, { signal: stop }), [topic.name, offset]);
  const { wire } = route.value.params;
  return html`<${Loaded} of=${forms}>${(data) => {
    const shown = data.forms.find((one) => one.protocol === wire) ?? data.forms[0];
    return html`<div class="stack">
      <div class="bar" role="group" aria-label="Protocol">${data.forms.map((one) => html`<button key=${one.protocol} type="button" aria-pressed=${one === shown} onClick=${() => change({ wire: one.protocol })}>${one.title ?? format.protocol(one.protocol)}</button>`)}</div>
      ${shown.problem ? html`<${Empty} title="Not on this protocol">${format.safe(shown.problem)}<//>` : html`<${Bytes} form=${shown} />`}
    </div>`;
  }}<//>`;
}

function Bytes({ form }) {
  const data = useMemo(() => format.fromBase64(form.base64), [form]);
  const hex = (from, length) => Array.from(data.slice(from, Math.min(from + length, WIRE_BYTES_MAX)), (one) => one.toString(16).padStart(2, "0"));
  return html`<div class="stack">
    <p class="dim">${format.plural(data.length, "byte")}${data.length > WIRE_BYTES_MAX ? `, the first ${format.count(WIRE_BYTES_MAX)} shown` : ""}</p>
    <div class="content bytes" tabindex="0">${form.fields.filter((field) => field.offset < WIRE_BYTES_MAX).map((field, index) => html`<span key=${index} data-part=${index % PARTS} title=${format.safe(`${field.name}: ${field.value}`)}>${hex(field.offset, field.length).join(" ")}</span> `)}</div>
    <div class="table-box" tabindex="0" role="region" aria-label="Fields"><table class="parts"><thead><tr><th scope="col" class="end">At</th><th scope="col" class="end">Bytes</th><th scope="col">Field</th><th scope="col">Value</th></tr></thead>
      <tbody>${form.fields.map((field, index) => html`<tr key=${index}><td class="end mono">${field.offset}</td><td class="end mono">${field.length}</td><td><i data-part=${index % PARTS} aria-hidden="true"></i>${format.safe(field.name)}</td><td class="mono">${format.safe(field.value).slice(0, 200)}</td></tr>`)}</tbody></table></div>
  </div>`;
}
