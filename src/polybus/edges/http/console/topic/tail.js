// Follow a topic live, with pause. Above the bus's rate of rows it is a sample, and says so.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { Badge, Card, Empty, Failure, Protocol, Table, Time } from "../components.js";
import * as format from "../format.js";
import { placeOf, useLive, useRowKeys } from "../hooks.js";
import { onKey } from "../keys.js";
import { change, go, route } from "../router.js";
import { Message } from "./message.js";

const ROWS_MAX = 1000;

export function Tail({ topic }) {
  const { params } = route.value;
  const [state, setState] = useState({ rows: [], seen: 0, skipped: 0, rate: 0, held: 0 });
  const paused = useRef(false);
  const [isPaused, setPaused] = useState(false);
  const error = useLive("tail", { topic: topic.name, ...(params.text ? { text: params.text } : {}) }, ({ messages, skipped, rate }) => {
    setState((before) => ({
      rows: paused.current ? before.rows : [...messages.toReversed(), ...before.rows].slice(0, ROWS_MAX),
      held: paused.current ? before.held + messages.length + skipped : 0,
      seen: before.seen + messages.length + skipped,
      skipped: before.skipped + skipped,
      rate,
    }));
  }, [topic.name, params.text]);
  const pause = () => {
    paused.current = !paused.current;
    setPaused(paused.current);
  };
  useEffect(() => onKey("p", pause), []);
  const opened = params.message === undefined ? null : Number(params.message);
  const show = (one) => change({ message: String(one.offset) });
  useRowKeys(state.rows.length, placeOf(state.rows, (one) => one.offset === opened), (index) => show(state.rows[index]), () => change({ message: "" }));
  return html`<div class=${opened === null ? "split" : "split opened"}>
    <${Card} flush label="Live messages">
      <div class="card-head bar padded">
        <button type="button" class="primary" aria-pressed=${isPaused} onClick=${pause}>${isPaused ? "Resume" : "Pause"}</button>
        <button type="button" onClick=${() => setState({ rows: [], seen: 0, skipped: 0, rate: state.rate, held: 0 })}>Clear</button>
        <input class="search" type="search" data-search aria-label="Only messages with this text" placeholder="Only with this text" defaultValue=${params.text ?? ""} onChange=${(event) => change({ text: event.target.value })} />
        <span class="end bar" role="status"><span>${format.perSecond(state.rate)}</span><span class="dim">${format.plural(state.seen, "message")} seen</span>
          ${state.skipped > 0 && html`<${Badge} tone="warn">${format.count(state.skipped)} skipped<//>`}${state.held > 0 && html`<${Badge} tone="accent">${format.count(state.held)} since the pause<//>`}</span>
      </div>
      ${params.text && state.skipped > 0 && html`<p class="notice">More comes than is shown. The text is looked for in what is shown alone: messages that were skipped may have it. Browse the topic to search in all.</p>`}
      <${Failure} error=${error} />
      ${state.rows.length ? html`<${Table} className="messages" label="Live messages" columns=${COLUMNS} rows=${state.rows} keyOf=${(one) => one.offset} opened=${opened} open=${show} />`
        : html`<${Empty} title="Waiting for messages">They show here as they are published, on any protocol. <button type="button" class="quiet" onClick=${() => go("topic", { name: topic.name, tab: "publish" })}>Publish one</button><//>`}
    <//>
    ${opened !== null && html`<${Message} topic=${topic} offset=${opened} />`}
  </div>`;
}

const COLUMNS = [
  { id: "offset", label: "Offset", end: true, cell: (one) => html`<span class="mono">${one.offset}</span>` },
  { id: "time", label: "Time", cell: (one) => html`<${Time} at=${one.timestamp} />` },
  { id: "protocol", label: "From", minor: true, cell: (one) => html`<${Protocol} name=${one.protocol} />` },
  { id: "value", label: "Value", wide: true, cell: (one) => format.preview(one, 240) },
  { id: "size", label: "Size", end: true, minor: true, cell: (one) => format.bytes(one.size) },
];
