// Graphs as SVG, each with its edges as a table too. Either dagre places the nodes, or each kind has a column.
import { Fragment, html, useEffect, useMemo, useState } from "./vendor/preact.js";
import { Empty, Failure, TableBelow, Waiting } from "./components.js";
import * as format from "./format.js";

const NODE = { width: 190, height: 46 };
const LABEL_MAX = 24;
const MOVING_EDGES_MAX = 400;
const GAP = { x: 120, y: 16, edge: 24 };

/**
 * `nodes`: {id, label, kind, note, colour, to}; `edges`: {from, to, rate, estimated}.
 * The places change only with the nodes and edges, not with the rates. `columns`: kinds, from left to right.
 */
export function Graph({ nodes, edges, label, columns }) {
  const [dagre, setDagre] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (!columns) import("./vendor/dagre.js").then((module) => setDagre(() => module), () => setError({ message: "the drawing could not be loaded; load the page again" }));
  }, []);
  const shape = JSON.stringify([nodes.map((one) => one.id), edges.map((one) => [one.from, one.to])]);
  const placed = useMemo(() => (columns ? inColumns(nodes, edges, columns) : dagre && place(dagre, nodes, edges)), [dagre, shape]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!placed) return html`<${Waiting} text="Drawing" />`;
  if (!nodes.length) return html`<${Empty} title="Nothing flows yet">Publish or subscribe on any protocol, and it is drawn here.<//>`;
  return html`<${Fragment}>
    <div class="graph" tabindex="0" role="region" aria-label=${label}>
      <svg style=${{ maxWidth: `${placed.width}px`, minWidth: `${Math.min(placed.width, 760)}px` }} viewBox=${`0 0 ${placed.width} ${placed.height}`} role="group" aria-label=${`${label}: ${nodes.length} nodes and ${edges.length} connections; they are in the table below`}>
        ${edges.map((edge) => html`<${Edge} key=${`${edge.from} ${edge.to}`} edge=${edge} from=${placed.nodes.get(edge.from)} to=${placed.nodes.get(edge.to)} still=${edges.length > MOVING_EDGES_MAX} />`)}
        ${nodes.map((node) => html`<${Node} key=${node.id} node=${node} at=${placed.nodes.get(node.id)} />`)}
      </svg>
    </div>
    <${EdgeTable} nodes=${nodes} edges=${edges} label=${label} />
  <//>`;
}

function place({ Graph: Layout, layout }, nodes, edges) {
  const graph = new Layout();
  graph.setGraph({ rankdir: "LR", nodesep: 18, ranksep: 110, marginx: 24, marginy: 24 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { id } of nodes) graph.setNode(id, { ...NODE });
  for (const { from, to } of edges) if (graph.hasNode(from) && graph.hasNode(to)) graph.setEdge(from, to, {});
  layout(graph);
  const { width, height } = graph.graph();
  return { width, height, nodes: new Map(graph.nodes().map((id) => [id, graph.node(id)])) };
}

/** A column per kind; in each, nodes are near those that they are connected to. */
function inColumns(nodes, edges, columns) {
  const rows = columns.map((kinds) => nodes.filter((one) => kinds.includes(one.kind)));
  const neighbours = new Map(nodes.map((one) => [one.id, []]));
  for (const { from, to } of edges) {
    neighbours.get(from)?.push(to);
    neighbours.get(to)?.push(from);
  }
  const place_of = new Map();
  const number = (row) => row.forEach((one, index) => place_of.set(one.id, (index + 0.5) / row.length));
  const mean = ({ id }) => {
    const known = neighbours.get(id).filter((other) => place_of.has(other));
    return known.length ? known.reduce((sum, other) => sum + place_of.get(other), 0) / known.length : 1;
  };
  for (let pass = 0; pass < 4; pass += 1) {
    for (const row of pass % 2 ? [...rows].reverse() : rows) {
      const means = new Map(row.map((one) => [one.id, mean(one)]));
      if (pass) row.sort((one, other) => means.get(one.id) - means.get(other.id));
      number(row);
    }
  }
  const used = rows.filter((row) => row.length);
  const height = Math.max(...used.map((row) => row.length), 1) * (NODE.height + GAP.y) - GAP.y + 2 * GAP.edge;
  const found = new Map();
  used.forEach((row, column) => {
    const top = (height - row.length * (NODE.height + GAP.y) + GAP.y) / 2 + NODE.height / 2;
    row.forEach((one, index) => found.set(one.id, { ...NODE, x: GAP.edge + NODE.width / 2 + column * (NODE.width + GAP.x), y: top + index * (NODE.height + GAP.y) }));
  });
  return { width: used.length * (NODE.width + GAP.x) - GAP.x + 2 * GAP.edge, height, nodes: found };
}

const rateText = ({ rate, estimated }) => `${estimated && rate > 0 ? "≈ " : ""}${format.perSecond(rate)}`;

const cut = (text) => (text.length > LABEL_MAX ? `${text.slice(0, LABEL_MAX - 1)}…` : text);

function Node({ node, at }) {
  if (!at) return null;
  const text = format.safe(node.label);
  const body = html`<g class="node" transform=${`translate(${at.x - at.width / 2},${at.y - at.height / 2})`}>
    <title>${text}${node.note ? `, ${node.note}` : ""}</title>
    <rect width=${at.width} height=${at.height} rx="9" />
    <rect class="stripe" width="4" height=${at.height - 16} x="8" y="8" rx="2" style=${{ fill: node.colour }} />
    <text x="21" y="20">${cut(text)}</text>
    <text class="kind" x="21" y="35">${cut(format.safe(node.note ?? node.kind))}</text>
  </g>`;
  return node.to ? html`<a href=${node.to}>${body}</a>` : body;
}

function Edge({ edge, from, to, still }) {
  if (!from || !to) return null;
  const isBack = to.x <= from.x;
  const first = { x: from.x + from.width / 2, y: from.y };
  const last = { x: to.x + (isBack ? to.width / 2 : -to.width / 2), y: to.y };
  const bend = isBack ? 60 : (last.x - first.x) / 2;
  const line = `M${first.x},${first.y} C${first.x + bend},${first.y} ${last.x + (isBack ? bend : -bend)},${last.y} ${last.x},${last.y}`;
  const flows = edge.rate > 0;
  // Not in the middle, where edges cross, nor at an end, where they come together.
  const near = 0.42;
  const middle = { x: first.x + (last.x - first.x) * near, y: first.y + (last.y - first.y) * near * near * (3 - 2 * near) };
  return html`<g><path class=${`edge${flows && !still ? " flowing" : ""}`} d=${line} stroke-width=${flows ? Math.min(5, 1.2 + Math.log10(1 + edge.rate) * 0.8) : 1.2} />
    ${flows && html`<text class="rate" x=${middle.x} y=${middle.y - 5} text-anchor="middle">${rateText(edge)}</text>`}</g>`;
}

function EdgeTable({ nodes, edges, label }) {
  const names = new Map(nodes.map((one) => [one.id, `${format.safe(one.label)} (${one.note ?? one.kind})`]));
  return html`<${TableBelow} label=${label}>${() => html`<table>
    <thead><tr><th scope="col">From</th><th scope="col">To</th><th scope="col" class="end">Messages</th></tr></thead>
    <tbody>${edges.map((one) => html`<tr key=${`${one.from} ${one.to}`}><td>${names.get(one.from)}</td><td>${names.get(one.to)}</td><td class="end">${rateText(one)}</td></tr>`)}</tbody>
  </table>`}<//>`;
}
