// Messages over time as bars; dragging over them, or two fields, choose a range of time.
import { html, useRef, useState } from "../vendor/preact.js";
import { TableBelow, Time } from "../components.js";
import * as format from "../format.js";

/** `picked` and what `pick` gets: [from, to] in ISO times, or null. */
export function Histogram({ data, picked, pick }) {
  const box = useRef(null);
  const [drag, setDrag] = useState(null);
  const { counts } = data;
  const start = Date.parse(data.from);
  const length = Date.parse(data.to) - start || 1;
  const most = Math.max(1, ...counts);
  const width = 1000 / Math.max(1, counts.length);
  const place = (event) => {
    const edges = box.current.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - edges.left) / edges.width));
  };
  const down = (event) => {
    box.current.setPointerCapture(event.pointerId);
    setDrag([place(event), place(event)]);
  };
  const move = (event) => drag && setDrag([drag[0], place(event)]);
  const up = (event) => {
    if (!drag) return;
    const [low, high] = [drag[0], place(event)].sort((one, other) => one - other);
    setDrag(null);
    pick(high - low < 0.005 ? null : [low, high].map((part) => new Date(start + part * length).toISOString()));
  };
  const range = drag ? [Math.min(...drag), Math.max(...drag)] : picked?.map((at) => (Date.parse(at) - start) / length);
  return html`<div>
    <div class="histogram" ref=${box} onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} role="img"
        aria-label=${`Messages over time, at most ${format.plural(most, "message")} in ${format.span(data["bin-s"])}; the values are in the table below`}>
      <svg viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true">
        ${counts.map((one, index) => one > 0 && html`<rect key=${index} class="bin" x=${index * width + width * 0.08} width=${width * 0.84} y=${100 - Math.max(2, (one / most) * 96)} height=${Math.max(2, (one / most) * 96)} rx="1" />`)}
        ${range && html`<rect class="picked" x=${range[0] * 1000} width=${Math.max(1, (range[1] - range[0]) * 1000)} y="0" height="100" />`}
      </svg>
    </div>
    <div class="histogram-ends"><span title=${format.utc(data.from)}>${format.time(data.from, { milliseconds: false })}</span><span>${format.span(data["bin-s"])} a bar, at most ${format.plural(most, "message")}</span><span title=${format.utc(data.to)}>${format.time(data.to, { milliseconds: false })}</span></div>
    <${TimeFields} key=${`${picked} ${data.from} ${data.to}`} from=${picked?.[0] ?? data.from} to=${picked?.[1] ?? data.to} pick=${pick} />
    <${TableBelow} label="Messages over time">${() => html`<table>
      <thead><tr><th scope="col">From</th><th scope="col" class="end">Messages</th></tr></thead>
      <tbody>${counts.map((one, index) => one > 0 && html`<tr key=${index}><th scope="row"><${Time} at=${start + (index * length) / counts.length} milliseconds=${false} /></th><td class="end">${format.count(one)}</td></tr>`)}</tbody>
    </table>`}<//>
  </div>`;
}

// As a field of the browser has it: local time, in whole seconds.
const local = (at) => format.time(at, { date: "always", milliseconds: false }).replace(" ", "T");

/** A range by the keyboard; dragging needs a pointer. */
function TimeFields({ from, to, pick }) {
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    pick(["from", "to"].map((name) => new Date(given.get(name)).toISOString()));
  };
  const field = (name, at) => html`<input name=${name} type="datetime-local" step="1" required defaultValue=${local(at)} />`;
  return html`<form class="bar histogram-times" onSubmit=${submit} aria-label="Choose a time">
    <label class="check">From ${field("from", from)}</label><label class="check">to ${field("to", Date.parse(to) + 999)}</label>
    <button>Choose this time</button><span class="hint">or drag over the bars</span>
  </form>`;
}
