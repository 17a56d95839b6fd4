// How data flows: producers, topics, those who read them, tables. Live.
import { html, useMemo, useState } from "../vendor/preact.js";
import { get } from "../api.js";
import { Failure, Loaded, Page, Search } from "../components.js";
import { Graph } from "../drawing.js";
import * as format from "../format.js";
import { useLive, useLoad } from "../hooks.js";
import { change, href, route } from "../router.js";

const KINDS = [["producer"], ["topic"], ["subscription", "session", "flow"], ["table", "sink"]];
const COLOURS = { topic: "var(--accent)", subscription: "var(--s3)", session: "var(--s5)", flow: "var(--s4)", table: "var(--s2)" };
const BY_PROTOCOL = { "boson-frames": "--s1", "boson-properties": "--s2", goms: "--s3", queue: "--s4", msgstream: "--s5", http: "--s6" };

export default function FlowGraph() {
  const first = useLoad((stop) => get("/v1/graph", {}, { signal: stop }));
  const [live, setLive] = useState(null);
  const error = useLive("graph", {}, setLive);
  const { idle } = route.value.params;
  return html`<${Page} title="Flow graph" lead="Who publishes to which topic, and who reads it; rates of the last seconds. ≈ marks an estimate."
      actions=${html`<label class="check"><input type="checkbox" checked=${Boolean(idle)} onChange=${(event) => change({ idle: event.target.checked })} /> Idle topics too</label><${Search} label="Search the graph" placeholder="A topic, sender or group" />`}>
    <${Failure} error=${error} />
    <${Loaded} of=${live ? { data: live } : first}>${(data) => html`<${Drawn} graph=${data} />`}<//>
  <//>`;
}

function Drawn({ graph }) {
  const { q = "", idle } = route.value.params;
  const { nodes, edges } = useMemo(() => chosen(graph, q, idle), [graph, q, idle]);
  return html`<div class="stack">
    ${graph.truncated && html`<p class="notice">There is more than fits: the busiest topics, producers and sessions are drawn.</p>`}
    <${Graph} nodes=${nodes} edges=${edges} label="Flow graph" columns=${KINDS} />
  </div>`;
}

/** What matches the search, with its neighbours; without topics that nobody uses. */
function chosen(graph, q, idle) {
  const edges = graph.edges.map(edgeOf);
  const word = q.toLowerCase();
  const hits = new Set(graph.nodes.filter((one) => word && one.label.toLowerCase().includes(word)).map((one) => one.id));
  const near = new Set(hits);
  for (const { from, to } of edges) {
    if (hits.has(from)) near.add(to);
    if (hits.has(to)) near.add(from);
  }
  const used = new Set(edges.flatMap((one) => [one.from, one.to]));
  const nodes = graph.nodes.filter((one) => (word ? near.has(one.id) : idle || used.has(one.id))).map(nodeOf);
  const ids = new Set(nodes.map((one) => one.id));
  return { nodes, edges: edges.filter((one) => ids.has(one.from) && ids.has(one.to)) };
}

/** An edge as it is drawn. Who sends is sampled, and flows report one rate for all they read: these are estimates. */
export const edgeOf = (edge) => ({ from: edge.from, to: edge.to, rate: edge["messages-per-s"], estimated: edge.sampled });

/** A node as it is drawn: its note, colour and where it leads. */
export function nodeOf(node) {
  const { id, kind, label, protocol } = node;
  const colour = kind === "producer" ? `var(${BY_PROTOCOL[protocol] ?? "--edge"})` : COLOURS[kind] ?? "var(--edge)";
  const notes = {
    producer: `sends on ${format.protocol(protocol)}`,
    topic: "topic",
    subscription: format.plural(node.count ?? 1, "subscription"),
    session: node.count > 1 ? format.plural(node.count, "session") : "session",
    flow: node.lag === undefined ? "flow" : `group, lag ${format.messages(node.lag)}`,
    table: "table",
  };
  const links = {
    topic: href("topic", { name: label }),
    subscription: href("consumers", { show: "connections", q: label }),
    session: href("consumers", { show: "sessions" }),
    flow: href("consumers", { q: label }),
    table: href("sql", { query: format.selectFrom(label) }),
    producer: href("consumers", { show: "connections", q: label }),
  };
  const shown = kind === "subscription" ? format.protocol(label) : label;
  return { id, kind, label: shown, note: notes[kind] ?? kind, colour, to: links[kind] };
}
