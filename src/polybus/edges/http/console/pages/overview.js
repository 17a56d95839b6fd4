// The bus at a glance: traffic over time, what waits, what is wrong.
import { html, useEffect, useMemo, useState } from "../vendor/preact.js";
import { get, path } from "../api.js";
import { seriesColour, TimeChart } from "../charts.js";
import { Badge, Card, Empty, Failure, Loaded, Name, Page, Table, Tile, Time, TopicLink, Waiting } from "../components.js";
import * as format from "../format.js";
import { isOutgrown, loadHistory, RANGES, withSample } from "../history.js";
import { useLoad } from "../hooks.js";
import { figures } from "../live.js";
import { change, href, route } from "../router.js";

const EVENTS_SHOWN = 8;
const DISK_FREE_LOW = 0.1;
const LEAST_S = 60;
const LAGS_SHOWN = 6;

/** The last messages of a topic, newest first; none if it is not there. */
export async function newest(topic, limit, stop) {
  const { start, stop: end } = await get(path`/v1/topics/${topic}`, {}, { signal: stop });
  if (start === end) return [];
  const read = await get(path`/v1/topics/${topic}/messages`, { offset: Math.max(start, end - limit), limit }, { signal: stop });
  return read.messages.reverse();
}

export default function Overview() {
  const info = useLoad((stop) => get("/v1/info", {}, { signal: stop }), [], { every_s: 30 });
  const { range = "1h" } = route.value.params;
  const { seconds } = RANGES[range] ?? RANGES["1h"];
  const past = useLoad((stop) => loadHistory(seconds, stop), [seconds]);
  const [history, setHistory] = useState(null);
  useEffect(() => past.data && setHistory(past.data), [past.data]);
  const sample = figures.value;
  useEffect(() => {
    if (!sample || history?.range_s !== seconds) return;
    if (isOutgrown(history) && !past.loading) past.reload();
    setHistory(withSample(history, sample));
  }, [sample]);
  const lead = info.data && html`Version ${info.data.version}, up ${format.span(info.data["uptime-s"])}, durability <code>${info.data.durability}</code>`;
  return html`<${Page} title="Overview" lead=${lead} actions=${html`<${Switch} label="Charts of the" param="range" choices=${Object.entries(RANGES).map(([id, { text }]) => [id, text])} /><${Switch} label="Traffic in" param="unit" choices=${UNITS} />`}>
    ${info.data && !info.data.healthy && html`<${Failure} error=${{ code: info.data.problem, message: info.data["problem-text"] || "the bus cannot store messages" }} />`}
    <${Notices} sample=${sample} known=${info.data?.problem} />
    <${Figures} sample=${sample} info=${info.data} />
    ${past.error && past.error.status !== 403 && html`<${Failure} error=${past.error} retry=${past.reload} />`}
    ${past.loading && !history && html`<${Waiting} text="Loading the charts" />`}
    ${history && html`<${Traffic} history=${history} />`}
    <${Alerts} />
    <div class="columns"><${Busiest} sample=${sample} /><${Events} /></div>
  <//>`;
}

const UNITS = [["messages", "Messages"], ["bytes", "Bytes"]];

/** One of some choices, which is in the address unless it is the first. */
function Switch({ label, param, choices }) {
  const [[first]] = choices;
  const chosen = route.value.params[param] ?? first;
  return html`<div class="segmented" role="group" aria-label=${label}>
    ${choices.map(([id, text]) => html`<button key=${id} type="button" aria-pressed=${chosen === id} onClick=${() => change({ [param]: id === first ? "" : id })}>${text}</button>`)}
  </div>`;
}

/** What the bus itself says is wrong, except what is shown already. */
function Notices({ sample, known }) {
  const alerts = (sample?.alerts ?? []).filter((one) => one.code !== known);
  return alerts.map((one) => html`<p key=${one.code} class="notice" role="alert"><strong>${one.code}</strong> ${format.safe(one.text)}</p>`);
}

// Where a problem is looked into, by the beginning of its code.
const PLACES = { log: ["topics"], consumer: ["consumers"], config: ["settings", { show: "accounts" }] };

/** Whether all is well, or the first thing that is not; `info` is older than the sample. */
function Health({ info, alerts }) {
  const [first, ...others] = alerts.length || !info || info.healthy ? alerts : [{ code: info.problem, text: info["problem-text"] }];
  const to = href(...(PLACES[first?.code.split(/[.-]/)[0]] ?? ["settings"]));
  if (!first) return html`<${Tile} label="Health" value=${info ? "healthy" : "–"} note=${info ? "nothing is wrong" : ""} to=${to} />`;
  return html`<${Tile} label="Health" value=${format.plural(1 + others.length, "problem")} note=${`${first.code}: ${format.safe(first.text)}`} to=${to} tone="bad" />`;
}

function Figures({ sample, info }) {
  const of = sample?.series ?? {};
  const free = of["disk-free-bytes"];
  const lags = Object.entries(sample?.groups ?? {}).sort((one, other) => other[1] - one[1]);
  // Traffic that nobody sent yet has no series; who does not see the bus has none at all.
  const traffic = (name) => of[name] ?? (of.connections === undefined ? undefined : 0);
  const total = of["disk-total-bytes"];
  const low = free < DISK_FREE_LOW * total;
  const behind_s = Math.max(0, ...Object.values(sample?.["group-lag-s"] ?? {}));
  const worst = lags[0] && lags[0][1] > 0 ? `${behind_s ? `${format.span(behind_s)}, ` : ""}${format.safe(lags[0][0])}` : "nobody is behind";
  return html`<div class="tiles">
    <${Health} info=${info} alerts=${sample?.alerts ?? []} />
    <${Tile} label="In" value=${format.perSecond(traffic("in.messages"))} note=${format.bytesPerSecond(traffic("in.bytes"))} to=${href("topics", { sort: "-in" })} />
    <${Tile} label="Out" value=${format.perSecond(traffic("out.messages"))} note=${format.bytesPerSecond(traffic("out.bytes"))} to=${href("graph")} />
    <${Tile} label="Lag" value=${format.messages(of.lag)} note=${worst} to=${href("consumers")} tone=${of.lag > 10_000 ? "warn" : undefined} />
    <${Tile} label="Connections" value=${format.count(of.connections)} note=${format.plural(of.websockets ?? 0, "WebSocket")} to=${href("consumers", { show: "connections" })} />
    <${Tile} label="Sessions" value=${format.count(of.sessions)} note=${`${format.short(of["session-packs"])} packs wait`} to=${href("consumers", { show: "sessions" })} />
    <${Tile} label="Outboxes" value=${format.bytes(of["outbox-bytes"])} note="waits for slow peers" to=${href("consumers", { show: "connections", sort: "-waiting" })} tone=${of["outbox-bytes"] > 8 << 20 ? "warn" : undefined} />
    <${Tile} label="fsync" value=${of["fsync-ms"] ? format.span(of["fsync-ms"] / 1000) : "–"} note=${`${format.bytes(of["pending-bytes"])} to write`} to=${href("settings")} />
    <${Tile} label="Disk free" value=${format.bytes(free)} note=${total ? `of ${format.bytes(total)}` : "where the log is"} to=${href("topics", { sort: "-disk" })} tone=${low ? "bad" : undefined} />
    <${Tile} label="Memory" value=${format.bytes(of["memory-bytes"])} note=${of.cpu === undefined ? "" : `${format.short(of.cpu * 100)} % of a core`} to=${href("settings")} />
    <${Tile} label="Errors" value=${format.perSecond(of.errors)} note=${`${format.perSecond(of.drops)} dropped`} to=${href("dead-letters")} tone=${of.errors > 0 ? "warn" : undefined} />
  </div>`;
}

function byProtocol(history, prefix) {
  const names = Object.keys(history.series).filter((name) => name.startsWith(`${prefix}.`)).sort();
  const spoken = names.filter((name) => history.series[name].some((value) => value > 0));
  return spoken.map((name, index) => {
    const protocol = name.slice(prefix.length + 1);
    return { label: format.protocol(protocol), colour: seriesColour(protocol, index), values: history.series[name] };
  });
}

function Traffic({ history }) {
  const unit = route.value.params.unit ?? "messages";
  const write = unit === "bytes" ? format.bytesPerSecond : format.perSecond;
  const charts = useMemo(() => ({ in: byProtocol(history, `in.${unit}`), out: byProtocol(history, `out.${unit}`), lag: lagging(history.groups), behind: lagging(history["group-lag-s"]) }), [history, unit]);
  const { name } = Object.values(RANGES).find((one) => one.seconds === history.range_s);
  const chart = (title, series, shown, quiet, times = history.times) => html`<${Card} title=${title} note=${name}>
    ${series.length ? html`<${TimeChart} title=${title} times=${times} series=${series} write=${shown} least_s=${LEAST_S} />` : html`<${Empty} title=${`${quiet} in the ${name}`}>It shows here as soon as there is some.<//>`}
  <//>`;
  const slow = history["slow-times"];
  return html`<div class="columns">
    ${chart("In, by protocol", charts.in, write, "No traffic")}
    ${chart("Out, by protocol", charts.out, write, "Nothing was delivered")}
    ${charts.lag.length > 0 && chart("Lag in messages, by group", charts.lag, format.short, "", slow)}
    ${charts.lag.length > 0 && chart("Lag in time, by group", charts.behind, format.span, "Nobody was behind", slow)}
    ${chart("Time of an fsync", fsyncs(history), (value) => format.span(value === null || value === undefined ? value : value / 1000), "Nothing was stored")}
    ${chart("Connections and sessions", gauges(history), format.count, "No connections")}
  </div>`;
}

/** The groups that lag most now, with their columns. */
function lagging(groups) {
  const last = (values) => values.at(-1) ?? 0;
  const most = Object.entries(groups).sort(([, one], [, other]) => last(other) - last(one)).slice(0, LAGS_SHOWN);
  return most.sort(([one], [other]) => (one < other ? -1 : 1)).map(([name, values], index) => ({ label: name, colour: seriesColour(name, index), values }));
}

function fsyncs(history) {
  const values = history.series["fsync-ms"];
  return values?.some((value) => value > 0) ? [{ label: "fsync", colour: seriesColour("", 0), values }] : [];
}

function gauges(history) {
  return [["connections", "Connections"], ["sessions", "Sessions"]]
    .filter(([name]) => history.series[name]?.some((value) => value > 0))
    .map(([name, label], index) => ({ label, colour: seriesColour("", index), values: history.series[name] }));
}

function Busiest({ sample }) {
  const topics = Object.entries(sample?.topics ?? {}).sort((one, other) => other[1][0] - one[1][0]).slice(0, EVENTS_SHOWN);
  const columns = [
    { id: "topic", label: "Topic", wide: true, cell: ([name]) => html`<${TopicLink} topic=${name} />` },
    { id: "in", label: "In", end: true, cell: ([, [into]]) => format.perSecond(into) },
    { id: "out", label: "Out", end: true, cell: ([, [, out]]) => format.perSecond(out) },
    { id: "bytes", label: "Bytes in", end: true, minor: true, cell: ([, values]) => format.bytesPerSecond(values[3]) },
  ];
  return html`<${Card} title="Busiest topics" note="this second" flush actions=${html`<a href=${href("topics")}>All topics</a>`}>
    ${topics.length ? html`<${Table} label="Busiest topics" columns=${columns} rows=${topics} keyOf=${([name]) => name} />` : html`<${Empty} title="Nobody publishes now">Publish something: <code>polybus publish TOPIC TEXT</code><//>`}
  <//>`;
}

/** What the pipeline has found unusual. */
function Alerts() {
  const alerts = useLoad((stop) => newest("$alerts", EVENTS_SHOWN, stop), [], { every_s: 10 });
  if (!alerts.data?.length) return null;
  const columns = [
    { id: "time", label: "Time", cell: (one) => html`<${Time} at=${one.timestamp} milliseconds=${false} />` },
    { id: "topic", label: "Topic", cell: (one) => (one.value?.topic ? html`<${TopicLink} topic=${one.value.topic} />` : "–") },
    { id: "text", label: "Alert", wide: true, cell: (one) => html`<${Name}>${one.value?.text ?? format.preview(one, 120)}<//>` },
  ];
  return html`<${Card} title="Alerts" note="unusual traffic, newest first" flush actions=${html`<a href=${href("topic", { name: "$alerts" })}>All alerts</a>`}>
    <${Table} className="messages" label="Alerts" columns=${columns} rows=${alerts.data} keyOf=${(one) => one.offset} sortParam="alerts" />
  <//>`;
}

/** A message of `$events` has several. */
async function lastEvents(stop) {
  const messages = await newest("$events", EVENTS_SHOWN, stop);
  const events = messages.flatMap(({ offset, value }) => (value?.events ?? []).map((one, index) => ({ ...one, id: `${offset} ${index}` })).reverse());
  return events.slice(0, EVENTS_SHOWN);
}

function Events() {
  const events = useLoad(lastEvents, [], { every_s: 5 });
  if (events.error?.status === 404 || events.error?.status === 403) return null;
  const columns = [
    { id: "time", label: "Time", cell: (one) => html`<${Time} at=${one.time} milliseconds=${false} />` },
    { id: "event", label: "Event", cell: (one) => html`<${Badge}>${format.safe(one.kind)}<//>` },
    { id: "detail", label: "Detail", wide: true, cell: ({ id, time, kind, ...detail }) => html`<${Name}>${JSON.stringify(detail).slice(0, 160)}<//>` },
  ];
  return html`<${Card} title="Events" note="newest first" flush actions=${html`<a href=${href("topic", { name: "$events" })}>All events</a>`}>
    <${Loaded} of=${events} empty=${(data) => !data.length && html`<${Empty} title="No events yet">Sessions, slow subscribers and failed consumers are noted here.<//>`}>
      ${(data) => html`<${Table} className="messages" label="Events" columns=${columns} rows=${data} keyOf=${(one) => one.id} sortParam="events" />`}
    <//>
  <//>`;
}
