// Browse a topic: by offset, by time on the histogram, and by filters. All of it is in the address.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { download, get, path } from "../api.js";
import { Badge, Card, Dialog, Empty, Failure, Field, Protocol, say, Table, Time, Waiting } from "../components.js";
import * as format from "../format.js";
import { useAction, useLoad, useRowKeys } from "../hooks.js";
import { change, route } from "../router.js";
import { forgetFilter, savedFilters, saveFilter } from "../store.js";
import { Histogram } from "./histogram.js";
import { Message } from "./message.js";
import { FILTERS, filtersOf, keyText, listed, offsetsBetween, readRange, search } from "./rows.js";

// How long a search may take, in seconds.
const LIMITS = [["10", "10 s"], ["60", "1 min"], ["600", "10 min"], ["none", "no limit"]];
const ROWS = ["100", "1000", "10000", "100000"];

const isTime = (text) => !Number.isNaN(Date.parse(text));

export function Browse({ topic }) {
  const { params } = route.value;
  const histogram = useLoad((stop) => get(path`/v1/topics/${topic.name}/histogram`, { from: params.zoom && params.since, to: params.zoom && params.until, bins: 120 }, { signal: stop }), [topic.name, topic.epoch, params.zoom, params.zoom && params.since, params.zoom && params.until]);
  const rows = useRows(topic);
  const opened = params.message === undefined ? null : Number(params.message);
  const { shown } = rows;
  useRowKeys(shown?.length ?? 0, opened === null || !shown ? null : placeOf(shown, opened), (index) => change({ message: String(shown.at(index).offset) }), () => change({ message: "" }));
  return html`<div class="stack">
    <${Card} label="Time and filters">
      ${histogram.data && histogram.data.counts.length > 0 && html`<${Histogram} data=${histogram.data} picked=${!params.zoom && isTime(params.since) && isTime(params.until) ? [params.since, params.until] : null}
        pick=${(range) => change({ since: range?.[0], until: range?.[1], zoom: "", before: "", message: "" })} />`}
      ${histogram.loading && !histogram.data && html`<div class="counting"><${Waiting} text="Counting the messages over time" /></div>`}
      ${histogram.error && !histogram.data && html`<p class="notice">The messages over time cannot be shown: ${format.safe(histogram.error.message)}</p>`}
      ${(params.since || params.until) && html`<div class="bar"><span>From ${params.since ? html`<${Time} at=${params.since} />` : "the first message"} to ${params.until ? html`<${Time} at=${params.until} />` : "the newest"}</span>
        ${params.since && params.until && !params.zoom && html`<button type="button" onClick=${() => change({ zoom: true })}>Zoom in</button>`}
        <button type="button" onClick=${() => change({ since: "", until: "", zoom: "", before: "" })}>All times</button></div>`}
      <${Filters} key=${FILTERS.map((name) => params[name] ?? "").join("\n")} />
    <//>
    <div class=${opened === null ? "split" : "split opened"}>
      <${Card} flush label="Messages">
        <${Bar} topic=${topic} rows=${rows} />
        <${Rows} topic=${topic} rows=${rows} opened=${opened} />
      <//>
      ${opened !== null && html`<${Message} topic=${topic} offset=${opened} />`}
    </div>
  </div>`;
}

/** What the address asks for. */
function useRows(topic) {
  const { params } = route.value;
  const { since, until } = params;
  const filters = filtersOf(params);
  const isSearch = Object.keys(filters).length > 0;
  const limit = Number(ROWS.includes(params.rows) ? params.rows : ROWS[0]);
  const time_s = params.within === "none" ? Infinity : Number(LIMITS.some(([id]) => id === params.within) ? params.within : 60);
  // It may be changed while a search runs.
  const longest_s = useRef(time_s);
  longest_s.current = time_s;
  const [state, setState] = useState({ shown: null, error: null, running: false });
  const running = useRef(null);
  // New messages do not move what is read; "Newest" and the address do.
  const [stop_at, setStopAt] = useState(topic.stop);
  const asked = [topic.name, topic.epoch, since, until, stop_at];
  const range = useLoad(async (stop) => ({ of: String(asked), ends: await offsetsBetween(topic.name, since, until, stop) }), asked);
  const waits = Boolean(since || until) && range.data?.of !== String(asked);
  const [low, end] = [waits ? 0 : range.data?.ends[0] ?? topic.start, waits ? 0 : range.data?.ends[1] ?? stop_at];
  const high = Math.min(end, params.before === undefined ? end : Number(params.before));
  const key = JSON.stringify([topic.name, topic.epoch, filters, low, high, limit, waits]);
  const load = async (from = high, before = []) => {
    running.current?.abort();
    const stop = (running.current = new AbortController());
    setState((old) => ({ ...old, shown: before.length ? old.shown : null, error: null, running: true }));
    const show = (next) => stop.signal.aborted || setState((old) => ({ ...old, ...next }));
    try {
      if (isSearch) {
        const progress = ({ found, scanned, took_s, end: at }) => show({ shown: listed(found), found, scanned, took_s, at });
        show({ shown: listed(before), found: before, scanned: 0, took_s: 0 });
        const next = await search(topic.name, filters, { low, high: from, limit, before, longest_s: () => longest_s.current }, progress, stop.signal);
        show({ running: false, next });
      } else {
        const shown = await readRange(topic.name, Math.max(low, high - limit), high, stop.signal);
        show({ shown, running: false, found: null, next: null });
      }
    } catch (error) {
      if (error.name !== "AbortError") show({ error, running: false });
    }
  };
  useEffect(() => {
    if (!waits) load();
    return () => running.current?.abort();
  }, [key]);
  return {
    ...state, low, high, limit, time_s, isSearch,
    error: state.error ?? (waits ? range.error : null),
    isNewest: params.before === undefined,
    newer: topic.stop - stop_at,
    stop: () => (running.current?.abort(), setState((old) => ({ ...old, running: false, next: old.at ?? null }))),
    more: () => load(state.next, state.found ?? []),
    newest: () => (setStopAt(topic.stop), change({ before: "", message: "" }), topic.stop === stop_at && load()),
    retry: () => (waits ? range.reload() : load()),
  };
}

/** Where an offset is in rows of falling offsets; decoding all of them would take too long. */
function placeOf(shown, offset) {
  let [low, high] = [0, shown.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (shown.at(middle).offset > offset) low = middle + 1;
    else high = middle;
  }
  return low;
}

function Filters() {
  const { params } = route.value;
  const form = useRef(null);
  const given = filtersOf(params);
  const [more, setMore] = useState(FILTERS.slice(1).some((name) => params[name]));
  const values = () => Object.fromEntries(FILTERS.map((name) => [name, form.current.elements[name]?.value.trim() ?? ""]));
  const submit = (event) => {
    event.preventDefault();
    change({ ...values(), before: "", message: "" });
  };
  const [naming, setNaming] = useState(false);
  const saved = savedFilters.value.find((one) => isSame(one.filters, given));
  const input = (name, label, hint, placeholder) => html`<${Field} label=${label} hint=${hint}><input name=${name} defaultValue=${params[name] ?? ""} placeholder=${placeholder} autocomplete="off" spellcheck="false" /><//>`;
  return html`<form ref=${form} class="stack" onSubmit=${submit} role="search">
    <div class="bar">
      <input class="search grow" name="text" type="search" data-search aria-label="Text in the message, its key or a header" placeholder="Search messages" defaultValue=${params.text ?? ""} autocomplete="off" spellcheck="false" />
      <button class="primary">Search</button>
      <button type="button" aria-expanded=${more} onClick=${() => setMore(!more)}>More filters</button>
      ${Object.keys(given).length > 0 && html`<button type="button" onClick=${() => setNaming(true)}>${saved ? "Rename this filter" : "Save this filter"}</button>${saved && html`<button type="button" onClick=${() => forgetFilter(saved.name)}>Forget this filter</button>`}<button type="button" class="quiet" onClick=${() => change(Object.fromEntries(FILTERS.map((name) => [name, ""])))}>Clear</button>`}
      ${savedFilters.value.length > 0 && html`<${Saved} current=${saved} />`}
    </div>
    ${more && html`<div class="columns">
      ${input("header", "Header", "A name, or name:value", "source:demo")}
      ${input("path", "JSON path", "Exists, or is what the next field says", "$.customer.id")}
      ${input("equals", "… equals", "Compared as text", "c-042")}
      ${input("sql", "SQL condition", "Columns offset, timestamp, key, value, headers, protocol, sender; text(value), json(value)", "length(value) > 1000")}
    </div>`}
    ${naming && html`<${NameFilter} filters=${given} before=${saved} close=${() => setNaming(false)} />`}
  </form>`;
}

const isSame = (one, other) => FILTERS.every((name) => one[name] === other[name]);

/** A filter has one name: the new one replaces the one before. */
function NameFilter({ filters, before, close }) {
  const name = useRef(null);
  const described = FILTERS.filter((one) => filters[one]).map((one) => `${one} ${filters[one]}`).join(", ");
  const save = () => {
    if (before) forgetFilter(before.name);
    saveFilter({ name: name.current.value.trim() || described, filters });
    say("Saved the filter");
    close();
  };
  const keyed = (event) => event.key === "Enter" && (event.preventDefault(), save());
  return html`<${Dialog} title="Save the filter" close=${close}><div class="stack">
    <${Field} label="Name" hint="It is kept in this browser"><input ref=${name} defaultValue=${before?.name ?? described} onKeyDown=${keyed} autocomplete="off" autofocus /><//>
    <div class="actions"><button type="button" onClick=${close}>Cancel</button><button type="button" class="primary" onClick=${save}>Save</button></div>
  </div><//>`;
}

function Saved({ current }) {
  const choose = (event) => {
    const chosen = savedFilters.value.find((one) => one.name === event.target.value);
    if (event.target.value === "forget") savedFilters.value.forEach((one) => forgetFilter(one.name));
    else if (chosen) change({ ...Object.fromEntries(FILTERS.map((name) => [name, ""])), ...chosen.filters, before: "" });
  };
  return html`<select aria-label="Saved filters" value=${current?.name ?? ""} onChange=${choose}><option value="">Saved filters</option>
    ${savedFilters.value.map((one) => html`<option key=${one.name} value=${one.name}>${format.safe(one.name)}</option>`)}<option value="forget">Forget them all</option></select>`;
}

function Bar({ topic, rows }) {
  const { params } = route.value;
  const jump = (event) => {
    event.preventDefault();
    const offset = Number(new FormData(event.target).get("offset"));
    change({ before: String(offset + 1), message: String(offset) });
  };
  return html`<div class="card-head bar padded">
    <form class="bar" onSubmit=${jump}><label class="check">Offset <input class="offset" name="offset" type="number" min=${topic.start} max=${topic.stop} defaultValue=${params.before ? Number(params.before) - 1 : ""} required /></label><button>Go</button></form>
    <label class="check">Rows <select value=${String(rows.limit)} onChange=${(event) => change({ rows: event.target.value === "100" ? "" : event.target.value })}>${ROWS.map((one) => html`<option key=${one} value=${one}>${format.count(Number(one))}</option>`)}</select></label>
    ${rows.isSearch && html`<label class="check">Search at most <select value=${rows.time_s === Infinity ? "none" : String(rows.time_s)} onChange=${(event) => change({ within: event.target.value === "60" ? "" : event.target.value })}>${LIMITS.map(([id, text]) => html`<option key=${id} value=${id}>${text}</option>`)}</select></label>`}
    ${!rows.isSearch && html`<div class="bar">
      <button type="button" onClick=${rows.newest}>Newest</button>${rows.newer > 0 && html`<${Badge} tone="accent">${format.count(rows.newer)} new<//>`}
      <button type="button" disabled=${rows.isNewest} onClick=${() => change({ before: String(rows.high + rows.limit), message: "" })}>Newer</button>
      <button type="button" disabled=${rows.high - rows.limit <= rows.low} onClick=${() => change({ before: String(rows.high - rows.limit), message: "" })}>Older</button>
    </div>`}
    <span class="end"><${Export} topic=${topic} rows=${rows} /></span>
  </div>`;
}

function Export({ topic, rows }) {
  const count = rows.shown?.length ?? 0;
  const run = useAction(async (kind) => {
    // All that match from the last row on are shown, and nothing before it.
    const query = { format: kind, ...filtersOf(route.peek().params), "from-offset": rows.shown.at(count - 1).offset, stop: rows.high, limit: count };
    const isCut = await download(path`/v1/topics/${topic.name}/export`, { query }, `${topic.name.replace(/[^\w.-]/g, "_")}.${kind}`);
    if (isCut) say("The file ends at a limit of the bus, queries.rows-max or 1 GiB: it lacks messages that are shown", "bad");
    else say(`Exported as ${kind}`);
  });
  const choose = (event) => {
    const kind = event.target.value;
    event.target.value = "";
    if (kind) run.run(kind);
  };
  return html`<span class="stack"><select aria-label="Export what is shown" disabled=${run.running || !count} onChange=${choose}>
    <option value="">${run.running ? "Exporting" : "Export"}</option><option value="csv">CSV</option><option value="jsonl">JSON lines</option><option value="parquet">Parquet</option>
  </select><${Failure} error=${run.error} /></span>`;
}

function Rows({ topic, rows, opened }) {
  const indexes = useMemo(() => Array.from({ length: rows.shown?.length ?? 0 }, (_, index) => index), [rows.shown]);
  const columns = useMemo(() => columnsOf(rows.shown), [rows.shown]);
  const total = Math.max(1, rows.high - rows.low);
  const progress = rows.isSearch && html`<div class="padded stack" role="status">
    ${rows.running && html`<progress max=${total} value=${rows.scanned ?? 0} aria-label="Searched"></progress>`}
    <div class="bar"><span class="dim">${rows.running ? "Searching" : rows.next ? "Stopped" : "Searched all"}: ${format.count(rows.scanned ?? 0)} of ${format.plural(total, "message")} seen, ${format.count(indexes.length)} found, ${format.span(Math.round(rows.took_s ?? 0))}${rows.time_s === Infinity ? "" : ` of at most ${format.span(rows.time_s)}`}</span>
      ${rows.running ? html`<button type="button" onClick=${rows.stop}>Stop</button>` : rows.next && html`<button type="button" onClick=${rows.more}>Search on</button>`}</div>
  </div>`;
  if (rows.error) return html`<${Failure} error=${rows.error} retry=${rows.retry} />`;
  if (!rows.shown) return html`<${Waiting} text="Reading messages" />`;
  const none = topic.stop === topic.start
    ? html`<${Empty} title="This topic holds no messages">Publish one, here or in a terminal: <code>polybus publish ${format.safe(topic.name)} TEXT</code><//>`
    : html`<${Empty} title="Nothing here">${rows.isSearch ? "No message matches. Change the filters or the time." : "There are no messages at this place. Go to the newest."}<//>`;
  return html`<div>${progress}${indexes.length ? html`<${Table} className="messages" label="Messages" columns=${columns} rows=${indexes} keyOf=${(index) => rows.shown.at(index).offset}
    opened=${opened} open=${(index) => change({ message: String(rows.shown.at(index).offset) })} />` : !rows.running && none}</div>`;
}

const columnsOf = (shown) => [
  { id: "offset", label: "Offset", end: true, cell: (index) => html`<span class="mono">${shown.at(index).offset}</span>` },
  { id: "time", label: "Time", cell: (index) => html`<${Time} at=${shown.at(index).timestamp} />` },
  { id: "protocol", label: "From", minor: true, cell: (index) => html`<span title=${format.safe(shown.at(index).sender ?? "")}><${Protocol} name=${shown.at(index).protocol} /></span>` },
  { id: "key", label: "Key", minor: true, cell: (index) => format.safe(keyText(shown.at(index).key)).slice(0, 24) },
  { id: "value", label: "Value", wide: true, cell: (index) => format.preview(shown.at(index), 240) },
  { id: "size", label: "Size", end: true, minor: true, cell: (index) => format.bytes(shown.at(index).size) },
];
