// Everybody who reads, in one list and by kind: groups and Spark flows, sessions, connections.
import { Fragment, html, useMemo, useState } from "../vendor/preact.js";
import { get, path, post, remove } from "../api.js";
import { Badge, Card, chosenTab, Confirm, Empty, Failure, Loaded, Name, Page, Protocol, say, Search, Table, Tabs, TopicLink } from "../components.js";
import * as format from "../format.js";
import { useAction, useLive, useLoad } from "../hooks.js";
import { route } from "../router.js";

const ERROR_MAX = 300;

export default function Consumers() {
  const groups = useLoad((stop) => get("/v1/consumers", {}, { signal: stop }), [], { every_s: 2 });
  const sessions = useLoad((stop) => get("/v1/sessions", {}, { signal: stop }), [], { every_s: 3 });
  const connections = useLoad((stop) => get("/v1/connections", {}, { signal: stop }));
  const [live, setLive] = useState(null);
  useLive("connections", {}, setLive);
  const now = live ? { data: live, error: null, reload: connections.reload } : connections;
  const everything = [groups, sessions, now];
  const all = everything.every((one) => one.data) ? [...groups.data.consumers.map(groupRow), ...sessions.data.sessions.map(sessionRow), ...now.data.connections.map(connectionRow)].sort((one, other) => reads(other) - reads(one)) : null;
  const whole = { data: all, error: everything.find((one) => one.error)?.error ?? null, loading: everything.some((one) => one.loading), reload: () => everything.forEach((one) => one.reload()) };
  const tabs = [
    ["all", "All", all && groups.data.consumers.length + sessions.data.total + now.data.total],
    ["groups", "Groups and Spark flows", groups.data?.consumers.length],
    ["sessions", "Sessions", sessions.data?.total],
    ["connections", "Connections and subscriptions", now.data?.total],
  ];
  const shown = chosenTab("show", tabs);
  return html`<${Page} title="Consumers" lead="Who reads, how far they are, and what waits for them." actions=${html`<${Search} label="Search consumers" placeholder="A group, topic or address" />`}>
    <${Tabs} param="show" tabs=${tabs} label="Kinds of consumers" />
    <${Card} flush label="Consumers">
      ${shown === "all" && html`<${Loaded} of=${whole}>${(rows) => html`<${Everybody} rows=${rows} reload=${whole.reload} />`}<//>`}
      ${shown === "groups" && html`<${Loaded} of=${groups}>${(data) => html`<${Groups} rows=${data.consumers} reload=${groups.reload} />`}<//>`}
      ${shown === "sessions" && html`<${Loaded} of=${sessions}>${(data) => html`<${Sessions} rows=${data.sessions} reload=${sessions.reload} />`}<//>`}
      ${shown === "connections" && html`<${Loaded} of=${now}>${(data) => html`<${Connections} rows=${data.connections} reload=${connections.reload} />`}<//>`}
    <//>
  <//>`;
}

function useFound(rows) {
  const word = (route.value.params.q ?? "").toLowerCase();
  return useMemo(() => (word ? rows.filter((one) => JSON.stringify(one).toLowerCase().includes(word)) : rows), [rows, word]);
}

const topicList = (topics) => html`<span>${topics.slice(0, 3).map((name, index) => html`${index ? ", " : ""}<${TopicLink} key=${name} topic=${name} />`)}${topics.length > 3 ? html` <span class="dim" title=${topics.map(format.safe).join(", ")}>and ${topics.length - 3} more</span>` : ""}</span>`;

/** How each kind is ended: what is asked first, the address, and what is said then. */
const ENDINGS = {
  group: (one) => ({ act: "Forget", title: "Forget the group", does: "Forget", at: path`/v1/consumers/${one.group}`, done: "Forgot the group",
    text: `Its position is forgotten, and nothing is kept for it any more: ${format.safe(one.group)}.` }),
  session: (one) => ({ act: "End", title: "End the session", does: "End it", at: path`/v1/session/${one.id}`, done: "Ended the session",
    text: `${format.plural(one["packs-waiting"], "unconfirmed pack")}: lost for its client.` }),
  connection: (one) => ({ act: "End", title: "End the connection", does: "End it", at: path`/v1/connections/${one.id}`, done: "Ended the connection",
    text: `The connection of ${format.safe(one.peer)} is closed. Its program may connect again.` }),
};

/** The dialog that ends one, with what failed, and the buttons of a row. */
function useActions(reload) {
  const [ending, setEnding] = useState(null);
  const redeliver = useAction(async (one) => {
    await post(path`/v1/session/${one.id}/redeliver`);
    say("Everything unconfirmed comes again when the client connects");
    reload();
  });
  const buttons = (kind, one) => html`<span class="bar">
    ${kind === "session" && html`<button type="button" class="quiet" disabled=${redeliver.running} onClick=${() => redeliver.run(one)}>Redeliver</button>`}
    <button type="button" class="quiet" onClick=${() => setEnding(ENDINGS[kind](one))}>${ENDINGS[kind](one).act}</button></span>`;
  const dialog = html`<${Fragment}><${Failure} error=${redeliver.error} />
    ${ending && html`<${Confirm} title=${ending.title} does=${ending.does} text=${ending.text} close=${() => setEnding(null)}
      act=${async () => { await remove(ending.at); say(ending.done); reload(); }} />`}<//>`;
  return [dialog, buttons];
}

/** One row of the list of all: `lag` in messages, packs or bytes, as `waits` writes it. */
const groupRow = (one) => ({ kind: "group", of: one, id: `group ${one.group}`, name: one.group, label: one.kind ? format.safe(one.kind) : "group", topics: one.topics.map((each) => each.topic),
  lag: one.lag, waits: format.plural(one.lag, "message"), behind_s: one["lag-s"], state: html`<${GroupState} group=${one} />` });
const sessionRow = (one) => ({ kind: "session", of: one, id: `session ${one.id}`, name: one.id.slice(0, 10), label: "session", topics: one.topics,
  lag: one["packs-waiting"], waits: format.plural(one["packs-waiting"], "pack"), behind_s: null, state: html`<${SessionState} session=${one} />` });
const connectionRow = (one) => ({ kind: "connection", of: one, id: `connection ${one.id}`, name: one.peer, label: one.protocol || "not known yet", topics: one.topics,
  lag: one["waiting-bytes"], waits: format.bytes(one["waiting-bytes"]), behind_s: null, state: one.subscriptions ? html`<${Badge} tone="good">subscribes<//>` : html`<${Badge}>open<//>` });

/** Who reads nothing comes last. */
const reads = (one) => Number(one.kind !== "connection" || one.topics.length > 0);

function Everybody({ rows, reload }) {
  const word = (route.value.params.q ?? "").toLowerCase();
  const found = word ? rows.filter((one) => JSON.stringify(one.of).toLowerCase().includes(word)) : rows;
  const [dialog, buttons] = useActions(reload);
  const columns = [
    { id: "name", label: "Consumer", value: (one) => one.name, cell: (one) => html`<${Name}>${one.name}<//>` },
    { id: "kind", label: "Kind", value: (one) => `${one.kind} ${one.label}`, cell: (one) => (one.kind === "connection" ? html`<${Protocol} name=${one.label} />` : html`<${Badge}>${one.label}<//>`) },
    { id: "state", label: "State", cell: (one) => one.state },
    { id: "topics", label: "Reads", wide: true, minor: true, cell: (one) => (one.topics.length ? topicList(one.topics) : html`<span class="dim">nothing</span>`) },
    { id: "waits", label: "Waits", end: true, value: (one) => one.lag, cell: (one) => one.waits },
    { id: "behind", label: "Behind", end: true, minor: true, value: (one) => one.behind_s, cell: (one) => (one.behind_s === null ? "–" : format.span(one.behind_s)) },
    { id: "act", label: "", cell: (one) => buttons(one.kind, one.of) },
  ];
  return html`<div>
    ${dialog}
    ${found.length ? html`<${Table} label="All consumers" columns=${columns} rows=${found} keyOf=${(one) => one.id} sortParam="all" />` : html`<${Empty} title=${rows.length ? "Nobody matches" : "Nobody reads this bus yet"}>Subscribe on any protocol: <code>polybus tail TOPIC</code><//>`}
  </div>`;
}

function Groups({ rows, reload }) {
  const found = useFound(rows);
  const [dialog, buttons] = useActions(reload);
  const errors = found.filter((one) => one["last-error"]);
  const columns = [
    { id: "group", label: "Group", value: (one) => one.group, cell: (one) => html`<${Name}>${one.group}<//> ${one.kind && html`<${Badge}>${format.safe(one.kind)}<//>`}` },
    { id: "state", label: "State", cell: (one) => html`<${GroupState} group=${one} />` },
    { id: "topics", label: "Reads", wide: true, minor: true, cell: (one) => topicList(one.topics.map((each) => each.topic)) },
    { id: "position", label: "Position", end: true, minor: true, cell: (one) => (one.topics.length === 1 ? format.count(one.topics[0].offset) : html`<span title=${one.topics.map((each) => `${format.safe(each.topic)} ${each.offset}`).join("\n")}>${format.plural(one.topics.length, "topic")}</span>`) },
    { id: "lag", label: "Lag", end: true, value: (one) => one.lag, cell: (one) => format.plural(one.lag, "message") },
    { id: "seconds", label: "Behind", end: true, value: (one) => one["lag-s"], cell: (one) => format.span(one["lag-s"]) },
    { id: "rows", label: "Rows", end: true, value: (one) => one["rows-per-s"], cell: (one) => format.perSecond(one["rows-per-s"]) },
    { id: "batch", label: "Batch", end: true, minor: true, value: (one) => one["batch-ms"], cell: (one) => (one["batch-ms"] ? format.span(one["batch-ms"] / 1000) : "–") },
    { id: "seen", label: "Reported", end: true, minor: true, value: (one) => one["seen-s-ago"], cell: (one) => `${format.span(one["seen-s-ago"])} ago` },
    { id: "act", label: "", cell: (one) => buttons("group", one) },
  ];
  return html`<div>
    ${dialog}
    ${found.length ? html`<${Table} label="Groups" columns=${columns} rows=${found} keyOf=${(one) => one.group} />` : html`<${Empty} title=${rows.length ? "No group matches" : "No group reads this bus yet"}>Spark flows and programs that report their position show here. Start a pipeline: <code>polybus up</code><//>`}
    ${errors.length > 0 && html`<div class="padded"><h3>Last errors</h3><dl class="facts">${errors.map((one) => html`<dt key=${one.group}><${Name}>${one.group}<//></dt><dd class=${one.failed ? "bad" : "dim"}>${format.safe(one["last-error"]).slice(0, ERROR_MAX)}</dd>`)}</dl></div>`}
  </div>`;
}

function GroupState({ group }) {
  if (group.failed) return html`<${Badge} tone="bad">failed<//>`;
  if (group["data-loss"]) return html`<${Badge} tone="warn">misses messages<//>`;
  return group["seen-s-ago"] > 60 ? html`<${Badge}>silent<//>` : html`<${Badge} tone="good">reads<//>`;
}

function SessionState({ session }) {
  if (session.connected) return html`<${Badge} tone="good">connected<//>`;
  const kept = format.span(session["ttl-s"]);
  return html`<span title=${`it ends ${kept} after its client was here at last`}><${Badge}>away, kept ${kept}<//></span>`;
}

function Sessions({ rows, reload }) {
  const found = useFound(rows);
  const [dialog, buttons] = useActions(reload);
  const columns = [
    { id: "id", label: "Session", cell: (one) => html`<span class="mono">${one.id.slice(0, 10)}</span>` },
    { id: "state", label: "State", cell: (one) => html`<${SessionState} session=${one} />` },
    { id: "account", label: "Account", minor: true, value: (one) => one.account, cell: (one) => format.safe(one.account) },
    { id: "topics", label: "Follows", wide: true, minor: true, cell: (one) => topicList(one.topics) },
    { id: "packs", label: "Packs waiting", end: true, value: (one) => one["packs-waiting"], cell: (one) => format.count(one["packs-waiting"]) },
    { id: "bytes", label: "Waiting", end: true, minor: true, value: (one) => one["bytes-waiting"], cell: (one) => format.bytes(one["bytes-waiting"]) },
    { id: "confirmed", label: "Last confirmed", end: true, value: (one) => one["last-confirmed"], cell: (one) => `${format.count(one["last-confirmed"])} of ${format.count(one["last-shown"])}` },
    { id: "act", label: "", cell: (one) => buttons("session", one) },
  ];
  return html`<div>
    ${dialog}
    ${found.length ? html`<${Table} label="Sessions" columns=${columns} rows=${found} keyOf=${(one) => one.id} sortParam="by" />` : html`<${Empty} title=${rows.length ? "No session matches" : "No sessions"}>A client of msgstream opens one: <code>POST /v1/sessions</code><//>`}
  </div>`;
}

function Connections({ rows, reload }) {
  const found = useFound(rows);
  const [dialog, buttons] = useActions(reload);
  const columns = [
    { id: "peer", label: "Peer", value: (one) => one.peer, cell: (one) => html`<span class="mono">${format.safe(one.peer)}</span>` },
    { id: "protocol", label: "Protocol", value: (one) => one.protocol, cell: (one) => html`<${Protocol} name=${one.protocol || "not known yet"} /> ${one.websocket && html`<${Badge}>WebSocket<//>`} ${one.tls && html`<${Badge} tone="good">TLS<//>`}` },
    { id: "account", label: "Account", minor: true, value: (one) => one.account, cell: (one) => format.safe(one.account) },
    { id: "topics", label: "Subscriptions", wide: true, minor: true, value: (one) => one.subscriptions, cell: (one) => (one.subscriptions ? topicList(one.topics) : html`<span class="dim">none</span>`) },
    { id: "waiting", label: "Waiting", end: true, value: (one) => one["waiting-bytes"], cell: (one) => format.bytes(one["waiting-bytes"]) },
    { id: "age", label: "Open for", end: true, minor: true, value: (one) => one["age-s"], cell: (one) => format.span(Math.round(one["age-s"])) },
    { id: "act", label: "", cell: (one) => buttons("connection", one) },
  ];
  return html`<div>
    ${dialog}
    ${found.length ? html`<${Table} label="Connections" columns=${columns} rows=${found} keyOf=${(one) => one.id} />` : html`<${Empty} title=${rows.length ? "No connection matches" : "No connections"}>Connect on any protocol: <code>polybus tail TOPIC</code><//>`}
  </div>`;
}
