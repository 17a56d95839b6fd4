// SQL on topics and tables: an editor that completes names, results as a table and a chart.
import { Fragment, html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { download, get, newId, path, post, remove } from "../api.js";
import { TimeChart, seriesColour } from "../charts.js";
import { Badge, Card, Empty, Failure, Loaded, Name, Page, say, Table, Waiting } from "../components.js";
import { editor } from "../editor.js";
import * as format from "../format.js";
import { useAction, useLoad } from "../hooks.js";
import { change, route } from "../router.js";
import { forgetQuery, noteQuery, queryHistory, savedQueries, saveQuery } from "../store.js";

const ARROW = "application/vnd.apache.arrow.stream";
const ROWS_MAX = 10_000;
const DOWNLOAD_ROWS_MAX = 100_000;
const CELL_MAX = 300;
const DOWNLOADS = { csv: "text/csv", jsonl: "application/x-ndjson", parquet: "application/vnd.apache.parquet", arrow: ARROW };

export default function Sql() {
  const names = useLoad((stop) => get("/v1/sql/names", {}, { signal: stop }));
  const text = useRef(route.peek().params.query ?? "");
  const set = useRef((query) => (text.current = query));
  const run = useQuery(text);
  const choose = (query) => set.current(query);
  return html`<${Page} title="SQL" lead="Topics and tables, asked with DuckDB in a process of its own: a heavy query never slows the bus.">
    <div class="sql">
      <div class="stack">
        <${Card} label="Query"><${Editor} text=${text} set=${set} names=${names.data} run=${run.start} /><${Bar} run=${run} text=${text} choose=${choose} /><//>
        <${Results} run=${run} />
      </div>
      <${Names} of=${names} choose=${choose} />
    </div>
  <//>`;
}

/** The query that runs, its result or error. After a run the address has `run`: whoever opens it sees the same rows. */
function useQuery(text) {
  const [shown, setShown] = useState(null);
  const id = useRef("");
  const asking = useAction(async (query) => {
    id.current = newId();
    setShown(null);
    try {
      setShown({ query, result: await post("/v1/sql", { query, id: id.current, "rows-max": ROWS_MAX }) });
    } finally {
      id.current = "";
    }
  });
  const stopping = useAction(() => id.current && remove(path`/v1/sql/${id.current}`));
  const start = () => {
    const query = text.current.trim();
    if (!query || id.current) return;
    change({ query, run: true });
    noteQuery(query);
    stopping.clear();
    asking.run(query);
  };
  useEffect(() => {
    // A query only reads, with the rights of who opens the address, within the limits of the bus.
    if (route.peek().params.run && text.current.trim()) asking.run(text.current.trim());
    // A query that nobody waits for any more is stopped.
    return () => void stopping.run();
  }, []);
  return { ...shown, running: asking.running, error: asking.error, start, stop: stopping.run, stopError: stopping.error };
}

function Editor({ text, set, names, run }) {
  const box = useRef(null);
  const view = useRef(null);
  // The editor is made once, and later than the first rendering: it reads what the newest rendering was given.
  const latest = useRef({});
  latest.current = { run, names };
  const [error, setError] = useState(null);
  useEffect(() => {
    let ended = false;
    editor(box.current, { text: () => text.current, change: (value) => (text.current = value), run: () => latest.current.run() }).then((made) => {
      if (ended) return made.destroy();
      view.current = made;
      set.current = made.set;
      if (latest.current.names) made.complete(latest.current.names);
      made.focus();
      return undefined;
    }, () => setError({ message: "the editor could not be loaded; load the page again" }));
    return () => {
      ended = true;
      view.current?.destroy();
    };
  }, []);
  useEffect(() => names && view.current?.complete(names), [names]);
  return html`<${Fragment}><div class="editor" ref=${box}></div><${Failure} error=${error} /><//>`;
}

function Bar({ run, text, choose }) {
  const keep = () => {
    saveQuery({ name: text.current.trim().slice(0, 80), query: text.current });
    say("Saved the query");
  };
  const again = (event) => {
    const [kind, index] = event.target.value.split(" ");
    if (kind === "saved") choose(savedQueries.value[index].query);
    if (kind === "past") choose(queryHistory.value[index]);
    if (kind === "forget") forgetQuery(text.current.trim().slice(0, 80));
    event.target.value = "";
  };
  const line = (query) => format.safe(query.replace(/\s+/g, " ")).slice(0, 80);
  return html`<div class="bar">
    ${run.running ? html`<button type="button" class="danger" onClick=${run.stop}>Stop</button>` : html`<button type="button" class="primary" onClick=${run.start}>Run</button>`}
    <span class="hint">Ctrl Enter</span>
    <span class="end bar"><button type="button" onClick=${keep}>Save the query</button>
      <select aria-label="Saved queries and history" value="" onChange=${again}><option value="">Saved and history</option>
        ${savedQueries.value.length > 0 && html`<optgroup label="Saved">${savedQueries.value.map((one, index) => html`<option key=${index} value=${`saved ${index}`}>${line(one.name)}</option>`)}<option value="forget">Forget the one in the editor</option></optgroup>`}
        ${queryHistory.value.length > 0 && html`<optgroup label="History">${queryHistory.value.map((one, index) => html`<option key=${index} value=${`past ${index}`}>${line(one)}</option>`)}</optgroup>`}
      </select></span>
  </div>`;
}

function Results({ run }) {
  if (run.running) return html`<${Card} label="Results"><${Waiting} text="The query runs" /><${Failure} error=${run.stopError} /><//>`;
  if (run.error) return html`<${Failure} error=${run.error} />`;
  const { query, run: ran } = route.value.params;
  if (!run.result && query && !ran) return html`<${Empty} title="This query has not run yet">It came with the link. Read it, then press <b>Run</b>.<//>`;
  if (!run.result) return html`<${Empty} title="Ask something">Every topic and table is a table of the same name: <code>SELECT * FROM news LIMIT 100</code><//>`;
  return html`<${Shown} result=${run.result} query=${run.query} />`;
}

function Shown({ result, query }) {
  const rows = useMemo(() => result.rows.map((cells, index) => ({ cells, index })), [result]);
  const chart = useMemo(() => chartOf(result), [result]);
  const as = route.value.params.as === "chart" && chart ? "chart" : "table";
  const columns = result.columns.map((one, index) => ({
    id: String(index), label: format.safe(one.name), value: (row) => row.cells[index], end: isNumber(one.type),
    cell: (row) => html`<span class="mono" title=${one.type}>${shown(row.cells[index])}</span>`,
  }));
  return html`<${Card} flush title="Results" note=${`${format.plural(result["row-count"], "row")} in ${format.span(result["elapsed-s"])}`}
      actions=${html`${result.truncated && html`<${Badge} tone="warn">cut at ${format.count(result.rows.length)}<//>`}
        ${chart && html`<div class="segmented" role="group" aria-label="Show as">${["table", "chart"].map((one) => html`<button key=${one} type="button" aria-pressed=${as === one} onClick=${() => change({ as: one === "table" ? "" : one })}>${one === "table" ? "Table" : "Chart"}</button>`)}</div>`}<${Download} query=${query} />`}>
    ${as === "chart" ? html`<div class="padded"><${Drawn} chart=${chart} /></div>`
      : rows.length ? html`<${Table} label="Results" columns=${columns} rows=${rows} keyOf=${(row) => row.index} sortParam="rows" />` : html`<${Empty} title="No rows">The query is fine, but nothing matches.<//>`}
  <//>`;
}

const isNumber = (type) => /^(u?(tiny|small|big|huge)?int(eger|\d+)?|(decimal|numeric)(128|256)?(\(.*\))?|double|(half)?float\d*|real)$/i.test(type);
const isTime = (type) => /timestamp|date/i.test(type);

function shown(value) {
  if (value === null || value === undefined) return html`<span class="dim">null</span>`;
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return format.safe(text.length > CELL_MAX ? `${text.slice(0, CELL_MAX)}…` : text);
}

/** A time and numbers are lines; a name and numbers are bars; anything else is not a chart. */
function chartOf({ columns, rows }) {
  if (rows.length < 2) return null;
  const numbers = columns.map((one, index) => ({ ...one, index })).filter((one) => isNumber(one.type));
  const time = columns.findIndex((one) => isTime(one.type));
  if (time >= 0 && numbers.length) {
    const sorted = [...rows].sort((one, other) => (one[time] < other[time] ? -1 : 1));
    const times = sorted.map((row) => Date.parse(/[Z+]/.test(row[time]) ? row[time] : `${row[time]}Z`) / 1000);
    return { kind: "lines", times, series: numbers.slice(0, 6).map((one, at) => ({ label: one.name, colour: seriesColour("", at), values: sorted.map((row) => (row[one.index] === null ? null : Number(row[one.index]))) })) };
  }
  const name = columns.findIndex((one) => !isNumber(one.type));
  if (!numbers.length || rows.length > 50) return null;
  const number = numbers.find((one) => one.index !== name);
  return { kind: "bars", label: number.name, bars: rows.map((row, index) => ({ label: name < 0 ? String(index + 1) : String(row[name]), value: row[number.index] === null ? null : Number(row[number.index]) })) };
}

function Drawn({ chart }) {
  if (chart.kind === "lines") return html`<${TimeChart} title="Results" times=${chart.times} series=${chart.series} write=${format.number} latest=${false} least=${0} />`;
  const values = chart.bars.map((one) => one.value ?? 0);
  const low = Math.min(0, ...values);
  const length = Math.max(0, ...values) - low || 1;
  const place = (value) => ({ marginLeft: `${((Math.min(0, value) - low) / length) * 100}%`, width: `${(Math.abs(value) / length) * 100}%` });
  return html`<table class="bars"><caption class="hidden">${format.safe(chart.label)}</caption><tbody>${chart.bars.map((one, index) => html`<tr key=${index}><th scope="row">${format.safe(one.label).slice(0, 60)}</th><td class="wide"><div class="bar-fill" data-below=${one.value < 0 || undefined} style=${place(one.value ?? 0)}></div></td><td class="end">${format.number(one.value)}</td></tr>`)}</tbody></table>`;
}

function Download({ query }) {
  const fetching = useAction(async (kind) => {
    const isCut = await download("/v1/sql", { method: "POST", body: JSON.stringify({ query, id: newId(), "rows-max": DOWNLOAD_ROWS_MAX }), type: "application/json", accept: DOWNLOADS[kind] }, `query.${kind}`);
    if (isCut) say(`The file ends at the limit of ${format.count(DOWNLOAD_ROWS_MAX)} rows or 1 GiB: the query has more`, "bad");
  });
  const choose = (event) => {
    const kind = event.target.value;
    event.target.value = "";
    if (kind) fetching.run(kind);
  };
  return html`<span class="stack"><select aria-label="Download the results" value="" disabled=${fetching.running} onChange=${choose}><option value="">Download</option>${Object.keys(DOWNLOADS).map((one) => html`<option key=${one} value=${one}>${{ csv: "CSV", jsonl: "JSON lines", parquet: "Parquet", arrow: "Arrow" }[one]}</option>`)}</select><${Failure} error=${fetching.error} /></span>`;
}

function Names({ of, choose }) {
  const entry = (one) => html`<details key=${one.name}><summary><${Name}>${one.name}<//></summary>
    <button type="button" class="quiet" onClick=${() => choose(format.selectFrom(one.name))}>Select from it</button>
    <ul>${one.columns.map((column) => html`<li key=${column.name ?? column}><span>${format.safe(column.name ?? column)}</span><span class="dim">${format.safe(column.type ?? "")}</span></li>`)}</ul></details>`;
  return html`<${Card} title="Topics and tables"><${Loaded} of=${of}>${(data) => html`<div class="tree">
    ${data.tables.length > 0 && html`<h3>Tables</h3>`}${data.tables.slice(0, 100).map(entry)}
    <h3>Topics</h3>${data.topics.slice(0, 100).map(entry)}${data.topics.length > 100 && html`<p class="hint">and ${data.truncated ? "more" : `${format.count(data.topics.length - 100)} more`}; the editor completes ${data.truncated ? `the first ${format.count(data.topics.length)}` : "them all"}</p>`}
  </div>`}<//><//>`;
}
