// The pipeline: its flows and tables as a graph, the running batches, what failed, its log.
import { Fragment, html, useMemo, useState } from "../vendor/preact.js";
import { get, post } from "../api.js";
import { Badge, Card, Confirm, Empty, Loaded, Name, Page, say, Table, Time } from "../components.js";
import { Graph } from "../drawing.js";
import * as format from "../format.js";
import { useLive, useLoad } from "../hooks.js";
import { href } from "../router.js";
import { edgeOf, nodeOf } from "./graph.js";

const TONES = { running: "good", failed: "bad", stopped: "plain", done: "good", never: "plain", retrying: "warn", starting: "warn", unknown: "bad" };

export default function Pipelines() {
  const first = useLoad((stop) => get("/v1/pipelines", {}, { signal: stop }));
  const tables = useLoad((stop) => get("/v1/tables", {}, { signal: stop }), [], { every_s: 15 });
  const [live, setLive] = useState(null);
  useLive("pipeline", {}, setLive);
  const state = live ? { data: live, error: null } : first;
  const refreshing = useRefresh(state.data, () => (first.reload(), tables.reload()));
  return html`<${Page} title="Pipelines" lead=${state.data && html`<${Lead} pipeline=${state.data} />`} actions=${state.data && html`<${Actions} pipeline=${state.data} reload=${first.reload} />`}>
    <${Loaded} of=${state} empty=${(data) => data.state === "never" && html`<${Never} tables=${tables} can=${data.actions.includes("start")} />`}>${(data) => html`<${Running} pipeline=${data} tables=${tables} refresh=${refreshing.ask} />`}<//>
    ${refreshing.shown}
  <//>`;
}

const Lead = ({ pipeline }) => pipeline.state !== "never" && html`<${Badge} tone=${TONES[pipeline.state]}>${pipeline.state}<//>
  ${pipeline.master && html` <code>${format.safe(pipeline.master)}</code>`}${pipeline["uptime-s"] > 0 && pipeline.state === "running" ? ` up ${format.span(pipeline["uptime-s"])}` : ""}`;

function Never({ tables, can }) {
  return html`<${Fragment}><${Empty} title="No pipeline has run on this data">It turns topics into tables and alerts, and needs Java 17. ${can ? "Start it here, or with the bus:" : "Start the bus with it:"} <code>polybus up</code><//><${Tables} of=${tables} /><//>`;
}

function Actions({ pipeline, reload }) {
  const [asked, setAsked] = useState("");
  const stop = pipeline.state === "starting" ? "Spark's start is cancelled." : "All flows end after their running batch.";
  const texts = { stop: `${stop} The bus continues.`, start: "The driver starts Spark; this takes some seconds." };
  const allowed = pipeline.actions.filter((one) => texts[one]);
  return html`<${Fragment}>
    ${allowed.map((one) => html`<button key=${one} type="button" onClick=${() => setAsked(one)}>${one === "stop" ? "Stop" : "Start"}</button>`)}
    ${asked && html`<${Confirm} title=${asked === "stop" ? "Stop the pipeline" : "Start the pipeline"} text=${texts[asked]} does=${asked === "stop" ? "Stop" : "Start"} close=${() => setAsked("")}
      act=${async () => { await post(`/v1/pipelines/${asked}`); say(`Asked the pipeline to ${asked}`); reload(); }} />`}
  <//>`;
}

/** Fill a table of one's own again: `ask` opens the window; nothing if it cannot be done now. */
function useRefresh(pipeline, done) {
  const [table, setTable] = useState("");
  const [reset, setReset] = useState(false);
  const text = html`The flows into <${Name}>${table}<//> run once, over what is new.
    <label class="check"><input type="checkbox" checked=${reset} onChange=${(event) => setReset(event.target.checked)} /> Drop its rows first, and fill it from the start</label>`;
  return {
    ask: pipeline?.actions.includes("refresh") ? setTable : null,
    shown: table && html`<${Confirm} title="Refresh the table" text=${text} does="Refresh" close=${() => setTable("")}
      act=${async () => { await post("/v1/pipelines/refresh", { table, reset }); say("The driver starts, for one pass into the table"); done(); }} />`,
  };
}

function Running({ pipeline, tables, refresh }) {
  const graph = useLoad((stop) => get("/v1/graph", {}, { signal: stop }), [], { every_s: 3 });
  const { nodes, edges } = useMemo(() => (graph.data ? flowsOnly(graph.data) : { nodes: [], edges: [] }), [graph.data]);
  return html`<div class="stack">
    ${pipeline.problems.map((one) => html`<p key=${one} class="notice" role="alert">${format.safe(one)}</p>`)}
    ${nodes.length > 0 && html`<${Graph} nodes=${nodes} edges=${edges} label="Flows and tables" />`}
    <${Flows} pipeline=${pipeline} />
    <div class="columns"><${Runs} runs=${pipeline.runs} /><${Tables} of=${tables} refresh=${refresh} /></div>
    ${pipeline.log.length > 0 && html`<${Card} title="Log of the driver" note="last lines"><pre class="log" tabindex="0">${pipeline.log.map(logLine)}</pre><//>`}
  </div>`;
}

const DAY_MS = 86_400_000;

/** A line begins with a time of day in UTC: the last moment that had it. It is shown as local time. */
function logLine(text) {
  const [, clock, rest] = text.match(/^(\d\d:\d\d:\d\dZ)( .*)?$/s) ?? [];
  if (!clock) return `${format.safe(text)}\n`;
  const today = Date.parse(`${new Date().toISOString().slice(0, 11)}${clock}`);
  return html`<${Time} at=${today > Date.now() + DAY_MS / 24 ? today - DAY_MS : today} date="never" milliseconds=${false} />${format.safe(rest ?? "")}${"\n"}`;
}

/** The flows, what they read and what they write, of the graph of the whole bus. */
function flowsOnly(graph) {
  const flows = new Set(graph.nodes.filter((one) => one.kind === "flow").map((one) => one.id));
  const edges = graph.edges.filter((one) => flows.has(one.from) || flows.has(one.to));
  const ids = new Set(edges.flatMap((one) => [one.from, one.to]));
  return {
    nodes: graph.nodes.filter((one) => ids.has(one.id)).map(nodeOf),
    edges: edges.map(edgeOf),
  };
}

const tableLink = (name) => href("sql", { query: format.selectFrom(name) });

function Flows({ pipeline }) {
  const columns = [
    { id: "flow", label: "Flow", value: (one) => one.flow, cell: (one) => html`<${Name}>${one.flow}<//> <span class="dim">${format.safe(one.pipeline)}</span>` },
    { id: "state", label: "State", value: (one) => one.state, cell: (one) => html`<${Badge} tone=${one.error ? "bad" : TONES[one.state] ?? "plain"}>${format.safe(one.state)}<//>` },
    { id: "rows", label: "Rows", end: true, value: (one) => one.rows, cell: (one) => html`<span title="read since the flow started, or in the view">${format.short(one.rows)}</span>` },
    { id: "ends", label: "Reads and writes", minor: true, cell: (one) => html`<span class="dim">${endsText(one)}</span>` },
    { id: "rate", label: "Rate", end: true, minor: true, value: (one) => one["rows-per-s"], cell: (one) => format.perSecond(one["rows-per-s"]) },
    { id: "lag", label: "Lag", end: true, value: (one) => one.lag, cell: (one) => format.messages(one.lag) },
    { id: "batch", label: "Batch", end: true, minor: true, value: (one) => one["batch-id"], cell: batchText },
    { id: "note", label: "Note", wide: true, cell: (one) => html`<${FlowNote} flow=${one} />` },
  ];
  return html`<${Card} title="Flows" flush>
    ${pipeline.flows.length ? html`<${Table} label="Flows" columns=${columns} rows=${pipeline.flows} keyOf=${(one) => `${one.pipeline}.${one.flow}`} />` : html`<${Empty} title="No flows yet">They show when the driver has started Spark.<//>`}
  <//>`;
}

/** The batch that runs, and else the last one. */
function batchText(flow) {
  const [running, last_ms] = [flow["running-batch"], flow["batch-ms"]];
  if (running !== null && running !== undefined) return html`<${Badge} tone="good">${format.count(running)} runs for ${format.span(flow["running-s"])}<//>`;
  return last_ms === null || last_ms === undefined ? "–" : `${format.count(flow["batch-id"])}, ${format.span(last_ms / 1000)}`;
}

/** Some of what a flow reads and writes, by name. */
function endsText({ inputs = [], outputs = [] }) {
  const named = (ends) => ends.slice(0, 3).map((one) => format.safe(one.slice(one.indexOf(":") + 1))).join(", ") + (ends.length > 3 ? ` and ${ends.length - 3} more` : "");
  return [named(inputs), named(outputs)].filter(Boolean).join(" → ");
}

function FlowNote({ flow }) {
  if (flow.error) return html`<span class="bad">${format.safe(flow.error).slice(0, 300)}</span>`;
  const failed = (flow.expectations ?? []).filter((one) => one.failed > 0);
  if (failed.length) return html`<span>${failed.map((one) => html`<${Badge} key=${`${one.topic} ${one.name}`} tone="warn">${format.safe(one.name)}: ${format.plural(one.failed, "row")} failed<//> `)}</span>`;
  return html`<span class="dim">${format.safe(flow.warning ?? "")}</span>`;
}

function Runs({ runs }) {
  const columns = [
    { id: "time", label: "Time", cell: (one) => html`<${Time} at=${one.time} milliseconds=${false} />` },
    { id: "flow", label: "Flow", wide: true, cell: (one) => html`<${Name}>${one.flow}<//>` },
    { id: "batch", label: "Batch", end: true, cell: (one) => format.count(one.batch) },
    { id: "rows", label: "Rows", end: true, cell: (one) => format.count(one.rows) },
    { id: "ms", label: "Took", end: true, cell: (one) => format.span(one.ms === null ? null : one.ms / 1000) },
  ];
  return html`<${Card} title="Last batches" flush>${runs.length ? html`<${Table} label="Last batches" columns=${columns} rows=${runs.slice(0, 20)} keyOf=${(one) => `${one.pipeline} ${one.flow} ${one.batch}`} sortParam="runs" />` : html`<${Empty} title="No batch has run yet">A flow runs one when its topics have new messages.<//>`}<//>`;
}

// A table of one's own has the name of its pipeline; those of the standard pipeline follow its topics.
const isOwn = (table) => table.includes(".") && !table.startsWith("silver.");

function Tables({ of, refresh }) {
  const columns = [
    { id: "name", label: "Table", wide: true, value: (one) => one.name, cell: (one) => html`<a href=${tableLink(one.name)}><${Name}>${one.name}<//></a>` },
    { id: "rows", label: "Rows", end: true, value: (one) => one.rows, cell: (one) => format.short(one.rows) },
    { id: "bytes", label: "Size", end: true, value: (one) => one.bytes, cell: (one) => format.bytes(one.bytes) },
    { id: "version", label: "Version", end: true, minor: true, value: (one) => one.version, cell: (one) => format.count(one.version) },
    ...(refresh ? [{ id: "act", label: "", cell: (one) => isOwn(one.name) && html`<button type="button" class="quiet" onClick=${() => refresh(one.name)}>Refresh</button>` }] : []),
    { id: "updated", label: "Updated", end: true, minor: true, value: (one) => one.updated, cell: (one) => html`<${Time} at=${one.updated} milliseconds=${false} />` },
  ];
  return html`<${Card} title="Tables" flush><${Loaded} of=${of} empty=${(data) => !data.tables.length && html`<${Empty} title="No tables yet">Flows make them.<//>`}>${(data) => html`<${Table} label="Tables" columns=${columns} rows=${data.tables} keyOf=${(one) => one.name} sortParam="tables" />`}<//><//>`;
}
