// What could not be decoded, processed or delivered, and sending it again.
import { html, useState } from "../vendor/preact.js";
import { get, path, post, remove, save } from "../api.js";
import { Badge, Card, Dialog, Empty, Failure, Field, Loaded, Name, Page, Protocol, say, Search, Table, Time, TopicLink } from "../components.js";
import * as format from "../format.js";
import { placeOf, useAction, useInView, useLive, useLoad, useRowKeys } from "../hooks.js";
import { change, href, route } from "../router.js";
import { keyText } from "../topic/rows.js";

export default function DeadLetters() {
  const { topic, reason, q, from, missed, redrive } = route.value.params;
  const letters = useLoad((stop) => get("/v1/dead-letters", { topic, reason, text: q, from, limit: 100 }, { signal: stop }), [topic, reason, q, from], { every_s: 10 });
  const replays = useLoad((stop) => get("/v1/replays", {}, { signal: stop }), [], { every_s: 10 });
  const [chosen, setChosen] = useState(new Set());
  const [redriving, setRedriving] = useState(null);
  const done = (started) => {
    setRedriving(null);
    change({ redrive: started.id });
    setChosen(new Set());
    replays.reload();
  };
  const total = letters.data?.total ?? 0;
  return html`<${Page} title="Dead letters" lead="Messages that could not be decoded, processed or delivered. They are kept as they came, and can be sent again."
      actions=${html`<button type="button" disabled=${!chosen.size} onClick=${() => setRedriving({ letters: [...chosen] })}>Redrive ${chosen.size ? `${format.count(chosen.size)} ` : ""}chosen</button>
        <button type="button" class="primary" disabled=${!total} onClick=${() => setRedriving({ topic, reason, text: q })}>Redrive all${total ? ` ${format.count(total)}` : ""}${q || topic || reason ? " that match" : ""}</button>`}>
    ${redrive && html`<${Progress} key=${redrive} id=${redrive} done=${() => (letters.reload(), replays.reload())} />`}
    <div class="bar"><${Search} label="Search dead letters" placeholder="Text in the message; or who did not get it" clears=${{ from: "", missed: "" }} />
      ${(topic || reason) && html`<button type="button" onClick=${() => change({ topic: "", reason: "", from: "", missed: "" })}>All topics and reasons</button>`}</div>
    <${Loaded} of=${letters} empty=${(data) => !data.letters.length && !topic && !reason && !q && html`<${Empty} title="No dead letters">What a slow subscriber or a full session missed is listed here, too. What cannot be decoded or processed comes from the pipeline, which runs with: <code>polybus up</code><//>`}>
      ${(data) => html`<div class="stack"><${Reasons} by=${data.by} /><${List} data=${data} chosen=${chosen} choose=${setChosen} redrive=${(one) => setRedriving({ letters: [one.id] })} /></div>`}
    <//>
    <${Undelivered} topic=${topic} reason=${reason} text=${q} missed=${missed} redrive=${setRedriving} />
    <${Replays} of=${replays} />
    ${redriving && html`<${Redrive} what=${redriving} close=${() => setRedriving(null)} done=${done} />`}
  <//>`;
}

function Reasons({ by }) {
  if (!by?.length) return null;
  const columns = [
    { id: "topic", label: "Topic", cell: (one) => html`<a href=${href("dead-letters", { topic: one.topic, reason: one.reason })}><${Name}>${one.topic}<//></a>` },
    { id: "reason", label: "Reason", wide: true, cell: (one) => format.safe(one.reason) },
    { id: "count", label: "Messages", end: true, value: (one) => one.count, cell: (one) => format.count(one.count) },
  ];
  return html`<${Card} title="By topic and reason" flush><${Table} label="By topic and reason" columns=${columns} rows=${by} keyOf=${(one) => `${one.topic} ${one.reason}`} sortParam="by" /><//>`;
}

function List({ data, chosen, choose, redrive }) {
  const { open, from } = route.value.params;
  const toggle = (one) => {
    const next = new Set(chosen);
    if (!next.delete(one.id)) next.add(one.id);
    choose(next);
  };
  const waiting = data.letters.filter((one) => !one.replayed);
  const all = waiting.length > 0 && waiting.every((one) => chosen.has(one.id));
  const columns = [
    { id: "pick", label: "", hidden: "choose", cell: (one) => html`<input type="checkbox" aria-label=${`Choose ${one.id}`} disabled=${Boolean(one.replayed)} checked=${chosen.has(one.id)} onChange=${() => toggle(one)} />` },
    { id: "time", label: "Time", cell: (one) => html`<${Time} at=${one.timestamp} milliseconds=${false} />` },
    { id: "topic", label: "Topic", cell: (one) => html`<${TopicLink} topic=${one.topic} params=${{ message: one.offset, epoch: one.epoch, before: one.offset + 1 }} />` },
    { id: "reason", label: "Reason", cell: (one) => html`<${Badge} tone="warn">${format.safe(one.reason).slice(0, 60)}<//>` },
    { id: "value", label: "Value", wide: true, cell: (one) => format.preview(one, 160) },
    { id: "protocol", label: "From", minor: true, cell: (one) => html`<${Protocol} name=${one.protocol} />` },
    { id: "act", label: "", cell: (one) => (one.replayed ? html`<span class="dim" title=${format.utc(one.replayed)}>sent again</span>` : html`<button type="button" class="quiet" onClick=${() => redrive(one)}>Redrive</button>`) },
  ];
  const at = placeOf(data.letters, (one) => one.id === open);
  const opened = data.letters[at];
  const show = (one) => change({ open: one.id });
  useRowKeys(data.letters.length, at, (index) => show(data.letters[index]), () => change({ open: "" }));
  return html`<div class=${opened ? "split opened" : "split"}>
    <${Card} title="Messages" note=${`${format.count(data.total)} wait`} flush actions=${html`<label class="check"><input type="checkbox" checked=${all} onChange=${() => choose(all ? new Set() : new Set(waiting.map((one) => one.id)))} /> Choose all shown</label>`}>
      ${data.letters.length ? html`<${Table} className="messages" label="Dead letters" columns=${columns} rows=${data.letters} keyOf=${(one) => one.id} opened=${open} open=${show} />` : html`<${Empty} title="Nothing matches">Search for less, or choose another topic or reason.<//>`}
      ${(from || data.next !== null) && html`<div class="padded actions">${from && html`<button type="button" onClick=${() => change({ from: "" })}>Newest</button>`}
        ${data.next !== null && html`<button type="button" onClick=${() => change({ from: String(data.next) })}>Older</button>`}</div>`}
    <//>
    ${opened && html`<${Letter} letter=${opened} />`}
  </div>`;
}

function Letter({ letter }) {
  const saving = useAction(async () => {
    const { letters: [whole] } = await get("/v1/dead-letters", { id: letter.id, whole: true, limit: 1 });
    save(new Blob([format.bytesOf(whole)]), letter.id.replace(/[^\w.-]/g, "_"));
  });
  const headers = Object.entries(letter.headers);
  const box = useInView(letter.id);
  return html`<aside class="card message" ref=${box} aria-label="Dead letter">
    <header class="card-head"><h2>Dead letter</h2><div class="actions"><button type="button" disabled=${saving.running} onClick=${saving.run}>Save</button><button type="button" class="quiet" aria-label="Close" onClick=${() => change({ open: "" })}>✕</button></div></header>
    <p class="notice">${format.safe(letter.reason)}</p>
    <dl class="facts"><dt>Topic</dt><dd><${TopicLink} topic=${letter.topic} params=${{ message: letter.offset, epoch: letter.epoch, before: letter.offset + 1 }} /></dd><dt>Position</dt><dd class="mono">${letter.epoch}:${letter.offset}</dd>
      <dt>Time</dt><dd><${Time} at=${letter.timestamp} date="always" /></dd><dt>Sent by</dt><dd><${Protocol} name=${letter.protocol} /> <span class="dim">${format.safe(letter.sender)}</span></dd><dt>Size</dt><dd>${format.bytes(letter.size)}${letter.cut ? ", only the beginning: the log has all of it" : ""}</dd>
      ${letter.key !== null && html`<dt>Key</dt><dd class="mono">${format.safe(keyText(letter.key))}</dd>`}</dl>
    <${Failure} error=${saving.error} />
    ${headers.length > 0 && html`<h3>Headers</h3><dl class="facts">${headers.map(([name, value]) => html`<dt key=${name}>${format.safe(name)}</dt><dd class="mono">${format.safe(keyText(value))}</dd>`)}</dl>`}
    <h3>Text</h3><pre class="content" tabindex="0">${format.safeLines(new TextDecoder().decode(format.bytesOf(letter)))}</pre>
    <h3>Bytes</h3><pre class="content hex" tabindex="0">${format.hexLines(format.bytesOf(letter)).join("\n")}</pre>
  </aside>`;
}

// The most that are shown, and that one redrive takes by name.
const RANGES_MAX = 100;
const REPLAY_UNDELIVERED = "/v1/undelivered/replay";

const NOT_DELIVERED = {
  "outbox.full": "it read too slowly and was disconnected",
  "outbox.dropped": "it read too slowly",
  "session-full": "the session was full",
  "session-expired": "the session expired before its client confirmed",
  "session-token-ended": "the session ended with the token that made it",
};

/** What is in the log, but one who subscribed did not get. */
function Undelivered({ topic, reason, text, missed, redrive }) {
  const of = useLoad((stop) => get("/v1/undelivered", { topic, reason, text, from: missed, limit: RANGES_MAX }, { signal: stop }), [topic, reason, text, missed], { every_s: 10 });
  const [chosen, setChosen] = useState(new Set());
  const rows = of.data?.undelivered ?? [];
  if (!rows.length && !(missed && of.data)) return html`<${Failure} error=${of.error} retry=${of.reload} />`;
  const picked = rows.filter((one) => chosen.has(rangeKey(one)));
  const toggle = (one) => {
    const next = new Set(chosen);
    if (!next.delete(rangeKey(one))) next.add(rangeKey(one));
    setChosen(next);
  };
  const columns = [
    { id: "pick", label: "", hidden: "choose", cell: (one) => html`<input type="checkbox" aria-label=${`Choose ${format.safe(one.topic)} ${one.first} to ${one.stop - 1}`} checked=${chosen.has(rangeKey(one))} onChange=${() => toggle(one)} />` },
    { id: "time", label: "Time", cell: (one) => html`<${Time} at=${one.time} milliseconds=${false} />` },
    { id: "topic", label: "Topic", cell: (one) => html`<${TopicLink} topic=${one.topic} params=${{ before: one.stop, message: one.first, epoch: one.epoch }} />` },
    { id: "offsets", label: "Offsets", cell: (one) => html`<span class="mono">${one.first} – ${one.stop - 1}</span>` },
    { id: "count", label: "Messages", end: true, value: (one) => one.stop - one.first, cell: (one) => format.count(one.stop - one.first) },
    { id: "reason", label: "Reason", cell: (one) => html`<${Badge} tone="warn">${NOT_DELIVERED[one.reason] ?? format.safe(one.reason)}<//>` },
    { id: "to", label: "To", wide: true, minor: true, cell: (one) => html`<${Protocol} name=${one.protocol} /> <span class="dim">${format.safe(one.to).slice(0, 21)}</span>` },
    { id: "act", label: "", cell: (one) => html`<button type="button" class="quiet" onClick=${() => redrive({ to: REPLAY_UNDELIVERED, ranges: [rangeOf(one)] })}>Redrive</button>` },
  ];
  const actions = html`<button type="button" disabled=${!picked.length} onClick=${() => redrive({ to: REPLAY_UNDELIVERED, ranges: picked.map(rangeOf) })}>Redrive ${picked.length ? `${format.count(picked.length)} ` : ""}chosen</button>
    <button type="button" onClick=${() => redrive({ to: REPLAY_UNDELIVERED, topic, reason, text })}>Redrive all${missed || of.data.next !== null ? "" : ` ${format.count(rows.length)}`}${topic || reason || text ? " that match" : ""}</button>`;
  return html`<${Card} title="Not delivered" note="in the log, but one who subscribed did not get it" actions=${actions} flush><${Table} label="Not delivered" columns=${columns} rows=${rows} keyOf=${rangeKey} sortParam="undelivered" />
    ${(missed || of.data.next !== null) && html`<div class="padded actions">${missed && html`<button type="button" onClick=${() => change({ missed: "" })}>Newest</button>`}
      ${of.data.next !== null && html`<button type="button" onClick=${() => change({ missed: String(of.data.next) })}>Older</button>`}</div>`}<//>`;
}

const rangeOf = ({ topic, epoch, first, stop }) => ({ topic, epoch, first, stop });
const rangeKey = (one) => `${one.time} ${one.topic} ${one.first} ${one.to}`;

/** First what it would do, then do it. */
function Redrive({ what, close, done }) {
  const [rate, setRate] = useState("");
  const { to = "/v1/replays", ...body } = what;
  const plan = useLoad(() => post(to, { ...given(body), "dry-run": true }));
  const start = useAction(async () => {
    const started = await post(to, { ...given(body), "dry-run": false, ...(rate ? { rate: Number(rate) } : {}) });
    say("The redrive has started");
    done(started);
  });
  return html`<${Dialog} title="Redrive" close=${close}>
    <${Loaded} of=${plan}>${(data) => html`<form class="stack" onSubmit=${(event) => (event.preventDefault(), start.run())}>
      <p>Dry run: <strong>${format.plural(data.messages, "message")}</strong> would be published again.</p>
      <dl class="facts">${Object.entries(data.topics).map(([name, number]) => html`<dt key=${name}><${Name}>${name}<//></dt><dd>${format.plural(number, "message")}</dd>`)}</dl>
      <${Field} label="Messages a second, at most" hint="Empty: as fast as the bus takes them"><input type="number" min="0.1" step="any" value=${rate} onInput=${(event) => setRate(event.target.value)} /><//>
      <p class="hint">Who did it is written to <code>$audit</code>.</p>
      <${Failure} error=${start.error} />
      <div class="actions"><button type="button" onClick=${close}>Cancel</button><button class="primary" disabled=${start.running || !data.messages}>Redrive ${format.count(data.messages)}</button></div>
    </form>`}<//>
  <//>`;
}

const given = (what) => Object.fromEntries(Object.entries(what).filter(([, value]) => value !== undefined && value !== ""));

function Progress({ id, done }) {
  const first = useLoad((stop) => get(path`/v1/replays/${id}`, {}, { signal: stop }), [id]);
  const [live, setLive] = useState(null);
  useLive("replay", { replay: id }, (data) => {
    setLive(data);
    if (data.state !== "running") done();
  }, [id]);
  const stop = useAction(() => remove(path`/v1/replays/${id}`));
  const replay = live ?? first.data;
  if (!replay) return html`<${Failure} error=${first.error} retry=${first.reload} />`;
  return html`<${Card} title="Redrive" note=${replay.state} actions=${replay.state === "running" ? html`<button type="button" disabled=${stop.running} onClick=${stop.run}>Stop</button>` : html`<button type="button" class="quiet" aria-label="Close the redrive" onClick=${() => change({ redrive: "" })}>✕</button>`}>
    <${Failure} error=${stop.error} />
    <progress max=${Math.max(1, replay.messages)} value=${replay.published} aria-label="Published again"></progress>
    <p role="status">${format.count(replay.published)} of ${format.plural(replay.messages, "message")} published again${replay.error ? `: ${format.safe(replay.error)}` : ""}</p>
  <//>`;
}

const TONES = { done: "good", failed: "bad", stopped: "warn", running: "accent" };

function Replays({ of }) {
  if (!of.data?.replays.length) return null;
  const columns = [
    { id: "started", label: "Started", cell: (one) => html`<${Time} at=${one.started} milliseconds=${false} />` },
    { id: "state", label: "State", cell: (one) => html`<${Badge} tone=${TONES[one.state]}>${one.state}<//>` },
    { id: "by", label: "By", cell: (one) => format.safe(one.by) },
    { id: "topics", label: "Topics", wide: true, cell: (one) => Object.keys(one.topics).map(format.safe).join(", ") },
    { id: "messages", label: "Published", end: true, cell: (one) => `${format.count(one.published)} of ${format.count(one.messages)}` },
  ];
  return html`<${Card} title="Redrives" flush><${Table} label="Redrives" columns=${columns} rows=${of.data.replays} keyOf=${(one) => one.id} opened=${route.value.params.redrive} open=${(one) => change({ redrive: one.id })} sortParam="order" /><//>`;
}
