// All topics: rates, sizes, lag, favourites; create one.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { get, post } from "../api.js";
import { Badge, Card, Dialog, Empty, Failure, Field, Loaded, Name, Page, Protocol, say, Search, Table, Time, TopicLink } from "../components.js";
import * as format from "../format.js";
import { useAction, useLoad } from "../hooks.js";
import { figures } from "../live.js";
import { change, go, route } from "../router.js";
import { favourites, toggleFavourite } from "../store.js";

const MANY = 1000;

export default function Topics() {
  const { params } = route.value;
  const [every_s, setEvery] = useState(15);
  const topics = useLoad((stop) => get("/v1/topics", { system: params.system ? true : "" }, { signal: stop }), [params.system], { every_s });
  // Rates are live anyway; a long list is loaded again seldom.
  useEffect(() => setEvery(topics.data?.topics.length > MANY ? 300 : 15), [topics.data]);
  const creating = params.create === "1";
  return html`<${Page} title="Topics" lead=${topics.data && format.plural(topics.data.topics.length, "topic")}
      actions=${html`<button type="button" class="primary" onClick=${() => change({ create: true })}>Create a topic</button>`}>
    <div class="bar">
      <${Search} label="Search topics" />
      <label class="check"><input type="checkbox" checked=${Boolean(params.starred)} onChange=${(event) => change({ starred: event.target.checked })} /> Favourites only</label>
      <label class="check"><input type="checkbox" checked=${Boolean(params.system)} onChange=${(event) => change({ system: event.target.checked })} /> System topics</label>
    </div>
    <${Card} flush label="Topics"><${Loaded} of=${topics} empty=${(data) => !data.topics.length && html`<${NoTopics} />`}>${(data) => html`<${List} topics=${data.topics} />`}<//><//>
    ${creating && html`<${Create} done=${topics.reload} />`}
  <//>`;
}

const NoTopics = () => html`<${Empty} title="This bus has no topics yet">Create one here, or in a terminal: <code>polybus topics create news</code><//>`;

/** Live rates over those that were loaded. */
function withRates(topic, live) {
  if (!live) return topic;
  const now = live[topic.name];
  return { ...topic, "in-per-s": now?.[0] ?? 0, "out-per-s": now?.[1] ?? 0, stop: Math.max(topic.stop, now?.[2] ?? 0) };
}

function List({ topics }) {
  const { q = "", starred } = route.value.params;
  const stars = favourites.value;
  const live = figures.value?.topics;
  const found = useMemo(() => {
    const words = q.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = new Set(stars);
    const matching = topics.filter((one) => (!starred || chosen.has(one.name)) && words.every((word) => one.name.toLowerCase().includes(word)));
    return [...matching.filter((one) => chosen.has(one.name)), ...matching.filter((one) => !chosen.has(one.name))];
  }, [topics, q, starred, stars]);
  const rows = useMemo(() => found.map((one) => withRates(one, live)), [found, live]);
  if (!rows.length) return html`<${Empty} title="No topic matches">Search for less, or clear the filters.<//>`;
  return html`<${Table} label="Topics" columns=${COLUMNS} rows=${rows} keyOf=${(one) => one.name} open=${(one) => go("topic", { name: one.name })} />`;
}

function Star({ topic }) {
  const pressed = favourites.value.includes(topic);
  return html`<button type="button" class="star" aria-pressed=${pressed} aria-label=${`Favourite ${format.safe(topic)}`} onClick=${() => toggleFavourite(topic)}>${pressed ? "★" : "☆"}</button>`;
}

/** How much a topic keeps: no limit is 0 or nothing. */
function keptText({ "retention-age-s": age_s, "retention-bytes": size }) {
  const limits = [age_s ? format.span(age_s) : "", size ? format.bytes(size) : ""].filter(Boolean);
  return limits.length ? limits.join(", ") : html`<span class="dim">all</span>`;
}

const COLUMNS = [
  { id: "star", label: "", hidden: "favourite", cell: (one) => html`<${Star} topic=${one.name} />` },
  { id: "name", label: "Topic", wide: true, value: (one) => one.name, cell: (one) => html`<${TopicLink} topic=${one.name} /> ${one.damaged && html`<${Badge} tone="bad">damaged<//>`}` },
  { id: "in", label: "In", end: true, value: (one) => one["in-per-s"], cell: (one) => format.perSecond(one["in-per-s"]) },
  { id: "out", label: "Out", end: true, minor: true, value: (one) => one["out-per-s"], cell: (one) => format.perSecond(one["out-per-s"]) },
  { id: "held", label: "Messages", end: true, value: (one) => one.stop - one.start, cell: (one) => html`<span title=${`offsets ${format.count(one.start)} to ${format.count(one.stop)}`}>${format.short(one.stop - one.start)}</span>` },
  { id: "disk", label: "Size", end: true, minor: true, value: (one) => one["stored-bytes"], cell: (one) => html`<span title=${`on disk: ${format.bytes(one["history-bytes"])} of history, and newer messages in the journal, estimated`}>${format.bytes(one["stored-bytes"])}</span>` },
  { id: "size", label: "Bytes in", end: true, minor: true, spare: true, value: (one) => one["bytes-in"], cell: (one) => format.bytes(one["bytes-in"]) },
  { id: "kept", label: "Kept", minor: true, value: (one) => one.retention["retention-age-s"] || Infinity, cell: (one) => keptText(one.retention) },
  { id: "lag", label: "Lag", end: true, minor: true, value: (one) => one.lag, cell: (one) => (one.lag === null ? html`<span class="dim">–</span>` : format.messages(one.lag)) },
  { id: "subscribers", label: "Subscribers", end: true, minor: true, value: (one) => one.subscribers, cell: (one) => format.count(one.subscribers) },
  { id: "protocols", label: "Published on", minor: true, spare: true, cell: (one) => html`<span class="line">${one["published-on"].slice(0, 1).map((name) => html`<${Protocol} key=${name} name=${name} />`)}${one["published-on"].length > 1 ? html`<span class="dim" title=${one["published-on"].map(format.protocol).join(", ")}>+${one["published-on"].length - 1}</span>` : ""}</span>` },
  { id: "last", label: "Last", end: true, minor: true, value: (one) => one["last-time"] ?? "", cell: (one) => (one["last-time"] || one.stop === one.start ? html`<${Time} at=${one["last-time"]} milliseconds=${false} />` : html`<span class="dim" title="before the bus started">earlier</span>`) },
];

/** The fields of a topic's retention; empty is the bus's own. */
export function RetentionFields({ settings = {} }) {
  return html`<div class="columns">
    <${Field} label="Keep for, in hours" hint="Empty: as the bus is set"><input name="hours" type="number" min="0.01" step="any" defaultValue=${settings["retention-age-s"] ? settings["retention-age-s"] / 3600 : ""} /><//>
    <${Field} label="Keep at most, in MiB" hint="Empty: as the bus is set"><input name="size" type="number" min="0.001" step="any" defaultValue=${settings["retention-bytes"] ? settings["retention-bytes"] / (1 << 20) : ""} /><//>
  </div>`;
}

export function retentionOf(form) {
  const { hours, size } = Object.fromEntries(new FormData(form));
  return { "retention-age-s": hours ? Number(hours) * 3600 : null, "retention-bytes": size ? Math.round(Number(size) * (1 << 20)) : null };
}

function Create({ done }) {
  const form = useRef(null);
  const [name, setName] = useState(route.value.params.new ?? "");
  const close = () => change({ create: "", new: "" });
  const create = useAction(async () => {
    const made = await post("/v1/topics", { name, ...retentionOf(form.current) });
    say(`Created ${format.safe(made.name)}`);
    done();
    go("topic", { name: made.name });
  });
  return html`<${Dialog} title="Create a topic" close=${close}>
    <form ref=${form} class="stack" onSubmit=${(event) => (event.preventDefault(), create.run())}>
      <${Field} label="Name" hint=${html`Letters, digits and <code>. _ -</code>; in small letters on every protocol`}><input required maxlength="255" value=${name} onInput=${(event) => setName(event.target.value)} autocomplete="off" autofocus /><//>
      <${RetentionFields} />
      <${Failure} error=${create.error} />
      <div class="actions"><button type="button" onClick=${close}>Cancel</button><button class="primary" disabled=${create.running}>Create</button></div>
    </form>
  <//>`;
}
