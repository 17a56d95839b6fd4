// One topic: what it holds, who reads it, and its settings.
import { Fragment, html, useRef, useState } from "../vendor/preact.js";
import { get, patch, path, remove } from "../api.js";
import { Card, chosenTab, Confirm, Empty, Failure, Loaded, Name, Page, say, Table, Tabs, Tile, Time } from "../components.js";
import * as format from "../format.js";
import { useAction, useLoad } from "../hooks.js";
import { figures } from "../live.js";
import { go, href, route } from "../router.js";
import { Browse } from "../topic/browse.js";
import { Publish } from "../topic/publish.js";
import { Tail } from "../topic/tail.js";
import { retentionOf, RetentionFields } from "./topics.js";

const TABS = [["browse", "Browse"], ["live", "Live"], ["publish", "Publish"], ["about", "Consumers and settings"]];

export default function Topic() {
  const { name = "" } = route.value.params;
  const topic = useLoad((stop) => get(path`/v1/topics/${name}`, {}, { signal: stop }), [name], { every_s: 10 });
  const shown = chosenTab("tab", TABS);
  const title = { text: format.safe(name), shown: html`<${Name}>${name}<//>` };
  if (!name) return html`<${Page} title="Topic"><${Empty} title="No topic is chosen"><a href=${href("topics")}>Choose one of all topics</a><//><//>`;
  return html`<${Page} title=${title} lead=${html`<a href=${href("topics")}>Topics</a>`}>
    ${topic.error?.code === "topic.unknown" && !topic.data ? html`<${Unknown} name=${name} />` : html`<${Loaded} of=${topic}>${(data) => html`<${Fragment}>
      <${Figures} topic=${data} />
      <${Tabs} param="tab" tabs=${TABS} label="Parts of the topic" />
      ${shown === "browse" && html`<${Browse} key=${name} topic=${data} />`}
      ${shown === "live" && html`<${Tail} key=${name} topic=${data} />`}
      ${shown === "publish" && html`<${Publish} key=${name} topic=${data} />`}
      ${shown === "about" && html`<${About} key=${name} topic=${data} reload=${topic.reload} />`}
    <//>`}<//>`}
  <//>`;
}

const Unknown = ({ name }) => html`<${Empty} title=${html`There is no topic <${Name}>${name}<//>`}>
  It may have been deleted. <a href=${href("topics", { q: name })}>Search all topics</a> or <a href=${href("topics", { create: true, new: name })}>create it</a>.<//>`;

function Figures({ topic }) {
  const live = figures.value?.topics?.[topic.name];
  const into = figures.value ? live?.[0] ?? 0 : topic["in-per-s"];
  const out = figures.value ? live?.[1] ?? 0 : topic["out-per-s"];
  const here = (tab) => href("topic", { name: topic.name, tab });
  const age = topic.retention?.["retention-age-s"];
  const stop = Math.max(topic.stop, live?.[2] ?? 0);
  return html`<div class="tiles">
    <${Tile} label="Messages" value=${format.short(stop - topic.start)} note=${`offsets ${format.count(topic.start)} to ${format.count(stop)}`} to=${here()} />
    <${Tile} label="In" value=${format.perSecond(into)} note=${topic["published-on"].map(format.protocol).join(", ") || "nobody yet"} to=${here("live")} />
    <${Tile} label="Out" value=${format.perSecond(out)} note=${format.plural(topic.subscribers, "subscriber")} to=${here("about")} />
    <${Tile} label="Lag" value=${format.messages(topic.lag)} note=${topic.consumers?.length ? format.plural(topic.consumers.length, "group") : "no groups"} to=${here("about")} />
    <${Tile} label="Size" value=${format.bytes(topic["stored-bytes"])} note=${`${format.bytes(topic["history-bytes"])} of history`} to=${here("about")} />
    <${Tile} label="Kept" value=${age ? format.span(age) : "forever"} note=${topic["first-time"] ? `since ${format.time(topic["first-time"], { milliseconds: false })}` : "holds nothing"} to=${here("about")} />
  </div>`;
}

function About({ topic, reload }) {
  const [deleting, setDeleting] = useState(false);
  const form = useRef(null);
  const save = useAction(async () => {
    await patch(path`/v1/topics/${topic.name}`, retentionOf(form.current));
    say("Saved the retention");
    reload();
  });
  const columns = [
    { id: "group", label: "Group", wide: true, cell: (one) => html`<a href=${href("consumers", { q: one.group })}><${Name}>${one.group}<//></a>` },
    { id: "offset", label: "Position", end: true, cell: (one) => format.count(one.offset) },
    { id: "lag", label: "Lag", end: true, cell: (one) => format.plural(one.lag, "message") },
  ];
  return html`<div class="columns">
    <${Card} title="Groups that read it" flush actions=${html`<a href=${href("consumers", { q: topic.name })}>All who read it</a>`}>
      ${topic.consumers?.length ? html`<${Table} label="Groups" columns=${columns} rows=${topic.consumers} keyOf=${(one) => one.group} />` : html`<${Empty} title="No group reads this topic">Spark flows, and programs that report their position, are shown here.<//>`}
    <//>
    <${Card} title="Settings">
      <dl class="facts"><dt>Epoch</dt><dd class="mono">${topic.epoch}</dd><dt>First message</dt><dd><${Time} at=${topic["first-time"]} date="always" /></dd><dt>Last message</dt><dd><${Time} at=${topic["last-time"]} date="always" /></dd></dl>
      <form ref=${form} class="stack" onSubmit=${(event) => (event.preventDefault(), save.run())}>
        <${RetentionFields} settings=${topic.settings} />
        <${Failure} error=${save.error} />
        <div class="actions"><button class="primary" disabled=${save.running}>Save the retention</button><button type="button" class="danger" onClick=${() => setDeleting(true)}>Delete the topic</button></div>
      </form>
    <//>
    ${deleting && html`<${Confirm} title="Delete the topic" word=${topic.name} does="Delete" close=${() => setDeleting(false)}
      text=${`Its ${format.plural(topic.stop - topic.start, "message")} are deleted for all. This cannot be undone.`}
      act=${async () => { await remove(path`/v1/topics/${topic.name}`); say(`Deleted ${format.safe(topic.name)}`); go("topics"); }} />`}
  </div>`;
}
