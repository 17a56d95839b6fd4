// The effective settings, accounts and tokens, and who changed what.
import { html, useMemo, useRef, useState } from "../vendor/preact.js";
import { get, logInByToken, path, post, remove } from "../api.js";
import { Badge, Card, chosenTab, Confirm, Copy, Dialog, Empty, Failure, Field, Loaded, Name, Page, say, Search, Table, Tabs, Time } from "../components.js";
import * as format from "../format.js";
import { useAction, useLoad } from "../hooks.js";
import { href, route } from "../router.js";
import { newest } from "./overview.js";

const TABS = [["settings", "Settings"], ["accounts", "Accounts and tokens"], ["audit", "Audit"]];
const AUDIT_SHOWN = 500;
const VALUE_MAX = 2000;

export default function Settings() {
  const shown = chosenTab("show", TABS);
  const info = useLoad((stop) => get("/v1/info", {}, { signal: stop }), [], { every_s: 30 });
  const lead = info.data && html`Polybus ${info.data.version}. You are <strong>${format.safe(info.data.account)}</strong>${info.data["is-admin"] ? ", an administrator" : ""}.`;
  return html`<${Page} title="Settings and audit" lead=${lead} actions=${html`<${Search} label="Search settings" placeholder="Search here" />`}>
    <${Tabs} param="show" tabs=${TABS} label="Parts" />
    ${shown === "settings" && html`<${Effective} info=${info.data} />`}
    ${shown === "accounts" && html`<${Accounts} />`}
    ${shown === "audit" && html`<${Audit} />`}
  <//>`;
}

const isPlain = (value) => value === null || typeof value !== "object";

/** Each setting by its path, such as connectors[0].port. */
function flat(value, prefix = "") {
  if (isPlain(value)) return [[prefix, value]];
  const entries = Object.entries(value);
  if (Array.isArray(value) ? value.every(isPlain) : !entries.length) return [[prefix, JSON.stringify(value)]];
  const step = (name) => (Array.isArray(value) ? `[${name}]` : `${prefix && "."}${name}`);
  return entries.flatMap(([name, one]) => flat(one, prefix + step(name)));
}

const useWord = () => (route.value.params.q ?? "").toLowerCase();

function Effective({ info }) {
  const settings = useLoad((stop) => get("/v1/settings", {}, { signal: stop }));
  const word = useWord();
  const columns = [
    { id: "key", label: "Setting", value: ([key]) => key, cell: ([key]) => html`<code>${format.safe(key)}</code>` },
    { id: "value", label: "Value", wide: true, cell: ([, value]) => html`<span class="mono">${format.safe(String(value)).slice(0, VALUE_MAX)}</span>` },
  ];
  return html`<div class="stack">
    ${info && html`<${About} info=${info} />`}
    <${Card} title="Effective settings" note="as the bus runs now" flush><${Loaded} of=${settings}>${(data) => {
      const rows = flat(data.settings).filter((one) => !word || JSON.stringify(one).toLowerCase().includes(word));
      return rows.length ? html`<${Table} whole className="settings" label="Settings" columns=${columns} rows=${rows} keyOf=${([key]) => key} />` : html`<${Empty} title="No setting matches">Search for less.<//>`;
    }}<//><//>
  </div>`;
}

function About({ info }) {
  const features = Object.entries(info.features).map(([name, on]) => html`<${Badge} key=${name} tone=${on ? "good" : "plain"}>${name}${on ? "" : " off"}<//> `);
  return html`<${Card} title="This bus"><dl class="facts">
    <dt>Started</dt><dd><${Time} at=${info.started} date="always" milliseconds=${false} /> <span class="dim">${format.span(info["uptime-s"])} ago</span></dd>
    <dt>Protocols</dt><dd>${info.protocols.map(format.protocol).join(", ")}</dd><dt>Features</dt><dd>${features}</dd>
    <dt>Your rights</dt><dd>${info.rights.join(", ")}</dd>
    <dt>Masked</dt><dd>${info.masks.length ? info.masks.map((one) => `${format.safe(one.topics)}: ${one.fields.map(format.safe).join(", ")}`).join("; ") : "nothing"}</dd>
  </dl><//>`;
}

function Accounts() {
  const accounts = useLoad((stop) => get("/v1/accounts", {}, { signal: stop }));
  const [asked, setAsked] = useState(null);
  const close = () => setAsked(null);
  if (accounts.error?.status === 403) return html`<${NotAllowed} />`;
  const columns = [
    { id: "name", label: "Account", wide: true, value: (one) => one.name, cell: (one) => html`<${Name}>${one.name}<//>` },
    { id: "grants", label: "Shares", end: true, minor: true, cell: (one) => format.count(one.grants?.length ?? 0) },
    { id: "tokens", label: "Tokens", end: true, cell: (one) => format.count(one.tokens?.length ?? 0) },
    { id: "act", label: "", cell: (one) => html`<span class="bar"><button type="button" class="quiet" onClick=${() => setAsked({ kind: "token", account: one })}>New token</button><button type="button" class="quiet" onClick=${() => setAsked({ kind: "share", account: one })}>Share</button><button type="button" class="quiet" onClick=${() => setAsked({ kind: "delete", account: one })}>Delete</button></span>` },
  ];
  return html`<div class="stack">
    <${Card} title="Accounts" flush actions=${html`<button type="button" class="primary" onClick=${() => setAsked({ kind: "create" })}>Create an account</button>`}>
      <${Loaded} of=${accounts} empty=${(data) => !data.accounts.length && html`<${Empty} title="No accounts">Without accounts everybody on this machine is the default account.<//>`}>${(data) => html`<${Table} label="Accounts" columns=${columns} rows=${data.accounts} keyOf=${(one) => one.name} />`}<//>
    <//>
    <${Loaded} of=${accounts}>${(data) => html`<div class="stack"><${Tokens} accounts=${data.accounts} reload=${accounts.reload} /><${Grants} accounts=${data.accounts} reload=${accounts.reload} /></div>`}<//>
    ${asked?.kind === "share" && html`<${Share} account=${asked.account.name} close=${close} done=${accounts.reload} />`}
    ${asked?.kind === "create" && html`<${CreateAccount} close=${close} done=${accounts.reload} />`}
    ${asked?.kind === "token" && html`<${CreateToken} account=${asked.account.name} close=${close} done=${accounts.reload} />`}
    ${asked?.kind === "delete" && html`<${Confirm} title="Delete the account" word=${asked.account.name} does="Delete" close=${close} text="Its tokens end and its connections are closed."
      act=${async () => { await remove(path`/v1/accounts/${asked.account.name}`); say("Deleted the account"); accounts.reload(); }} />`}
  </div>`;
}

/** Without accounts nobody is asked to log in, but an administrator may. */
function NotAllowed() {
  const form = useRef(null);
  const login = useAction(async () => {
    await logInByToken(new FormData(form.current).get("token"));
    location.reload();
  });
  return html`<${Empty} title="Only administrators see the accounts">
    <p>The token of the administrator is in the file <code>admin.token</code> of the data folder. In a terminal: <code>polybus accounts list</code></p>
    <form ref=${form} class="stack" onSubmit=${(event) => (event.preventDefault(), login.run())}>
      <${Field} label="Token"><input name="token" type="password" required autocomplete="off" /><//>
      <${Failure} error=${login.error} />
      <div class="actions"><button class="primary" disabled=${login.running}>Log in</button></div>
    </form><//>`;
}

function Tokens({ accounts, reload }) {
  const [ending, setEnding] = useState(null);
  const rows = useMemo(() => accounts.flatMap((one) => (one.tokens ?? []).map((token) => ({ ...token, account: one.name }))), [accounts]);
  const columns = [
    { id: "id", label: "Token", cell: (one) => html`<code>${format.safe(one.id)}</code>` },
    { id: "account", label: "Account", cell: (one) => html`<${Name}>${one.account}<//>` },
    { id: "rights", label: "May", wide: true, cell: (one) => `${one.rights?.length ? one.rights.join(", ") : "everything"} on ${one.topics?.length ? one.topics.map(format.safe).join(", ") : "all topics"}` },
    { id: "expires", label: "Ends", end: true, cell: (one) => (one.expires ? html`<${Time} at=${one.expires * 1000} date="always" milliseconds=${false} />` : "never") },
    { id: "act", label: "", cell: (one) => html`<button type="button" class="quiet" onClick=${() => setEnding(one)}>Revoke</button>` },
  ];
  if (!rows.length) return null;
  return html`<${Card} title="Tokens" flush><${Table} label="Tokens" columns=${columns} rows=${rows} keyOf=${(one) => `${one.account} ${one.id}`} />
    ${ending && html`<${Confirm} title="Revoke the token" does="Revoke" close=${() => setEnding(null)}
      text=${html`Programs that use <code>${format.safe(ending.id)}</code> of <${Name}>${ending.account}<//> cannot log in any more, and their connections are closed.`}
      act=${async () => { await remove(path`/v1/accounts/${ending.account}/tokens/${ending.id}`); say("Revoked the token"); reload(); }} />`}<//>`;
}

const RIGHTS = ["publish", "subscribe", "administer"];

function RightsFields({ chosen = RIGHTS }) {
  return html`<fieldset class="bar"><legend>May</legend>${RIGHTS.map((one) => html`<label class="check" key=${one}><input type="checkbox" name="rights" value=${one} defaultChecked=${chosen.includes(one)} /> ${one}</label>`)}</fieldset>`;
}

const patterns = (text) => text.split(/[\s,]+/).filter(Boolean);

/** What accounts share with others. */
function Grants({ accounts, reload }) {
  const [ending, setEnding] = useState(null);
  const rows = useMemo(() => accounts.flatMap((one) => (one.grants ?? []).map((grant) => ({ ...grant, account: one.name }))), [accounts]);
  const columns = [
    { id: "account", label: "Account", cell: (one) => html`<${Name}>${one.account}<//>` },
    { id: "topics", label: "Shares", cell: (one) => html`<code>${format.safe(one.topics)}</code>` },
    { id: "to", label: "With", cell: (one) => html`<${Name}>${one.to}<//>` },
    { id: "rights", label: "Which may", wide: true, cell: (one) => one.rights.join(", ") },
    { id: "act", label: "", cell: (one) => html`<button type="button" class="quiet" onClick=${() => setEnding(one)}>End</button>` },
  ];
  if (!rows.length) return null;
  return html`<${Card} title="Shared topics" flush><${Table} label="Shared topics" columns=${columns} rows=${rows} keyOf=${(one) => `${one.account} ${one.to} ${one.topics}`} sortParam="shared" />
    ${ending && html`<${Confirm} title="End the sharing" does="End it" close=${() => setEnding(null)}
      text=${html`<${Name}>${ending.to}<//> loses its rights to <code>${format.safe(ending.topics)}</code> of <${Name}>${ending.account}<//>.`}
      act=${async () => { await remove(path`/v1/accounts/${ending.account}/grants`, { body: JSON.stringify({ to: ending.to, topics: ending.topics }), type: "application/json" }); say("It is not shared any more"); reload(); }} />`}<//>`;
}

function Share({ account, close, done }) {
  const form = useRef(null);
  const share = useAction(async () => {
    const data = new FormData(form.current);
    await post(path`/v1/accounts/${account}/grants`, { to: data.get("to"), topics: data.get("topics"), rights: data.getAll("rights") });
    say("Shared the topics");
    done();
    close();
  });
  return html`<${Dialog} title=${`Share topics of ${format.safe(account)}`} close=${close}><form ref=${form} class="stack" onSubmit=${(event) => (event.preventDefault(), share.run())}>
    <${Field} label="Topics" hint=${html`A name, or a pattern: <code>orders.*</code>`}><input name="topics" required autocomplete="off" autofocus /><//>
    <${Field} label="With the account"><input name="to" required autocomplete="off" /><//>
    <${RightsFields} chosen=${["subscribe"]} />
    <${Failure} error=${share.error} /><div class="actions"><button type="button" onClick=${close}>Cancel</button><button class="primary" disabled=${share.running}>Share</button></div>
  </form><//>`;
}

function CreateAccount({ close, done }) {
  const form = useRef(null);
  const create = useAction(async () => {
    const { name, password } = Object.fromEntries(new FormData(form.current));
    await post("/v1/accounts", { name, password: password || null });
    say("Created the account");
    done();
    close();
  });
  return html`<${Dialog} title="Create an account" close=${close}><form ref=${form} class="stack" onSubmit=${(event) => (event.preventDefault(), create.run())}>
    <${Field} label="Name"><input name="name" required autocomplete="off" autofocus /><//>
    <${Field} label="Password" hint="Empty: it logs in by tokens only"><input name="password" type="password" autocomplete="new-password" /><//>
    <${Failure} error=${create.error} /><div class="actions"><button type="button" onClick=${close}>Cancel</button><button class="primary" disabled=${create.running}>Create</button></div>
  </form><//>`;
}

function CreateToken({ account, close, done }) {
  const form = useRef(null);
  const [made, setMade] = useState("");
  const create = useAction(async () => {
    const data = new FormData(form.current);
    const days = data.get("days");
    const rights = data.getAll("rights");
    const expires = days ? Date.now() / 1000 + Number(days) * 86400 : null;
    setMade((await post(path`/v1/accounts/${account}/tokens`, { expires, topics: patterns(data.get("topics")), rights: rights.length === RIGHTS.length ? [] : rights })).token);
    done();
  });
  return html`<${Dialog} title="New token" close=${close}>
    ${made ? html`<div class="stack"><p>This is the only time that it is shown. Treat it as a password.</p><pre class="content">${made}</pre><div class="actions"><${Copy} text=${made} /><button type="button" class="primary" onClick=${close}>Done</button></div></div>`
      : html`<form ref=${form} class="stack" onSubmit=${(event) => (event.preventDefault(), create.run())}>
        <${Field} label="Topics" hint=${html`Names or patterns like <code>orders.*</code>; empty: all of the account`}><input name="topics" autocomplete="off" /><//>
        <${RightsFields} />
        <${Field} label="Ends after, in days" hint="Empty: never"><input name="days" type="number" min="0.01" step="any" defaultValue="90" /><//>
        <${Failure} error=${create.error} /><div class="actions"><button type="button" onClick=${close}>Cancel</button><button class="primary" disabled=${create.running}>Make it</button></div>
      </form>`}
  <//>`;
}

function Audit() {
  const audit = useLoad((stop) => newest("$audit", AUDIT_SHOWN, stop), [], { every_s: 5 });
  const word = useWord();
  const columns = [
    { id: "time", label: "Time", cell: (one) => html`<${Time} at=${one.timestamp} milliseconds=${false} />` },
    { id: "account", label: "Who", cell: (one) => html`<${Name}>${one.value?.account ?? ""}<//> <span class="dim">${format.safe(one.value?.peer ?? "")}</span>` },
    { id: "action", label: "Did", cell: (one) => html`<${Badge}>${format.safe(one.value?.action ?? "")}<//>` },
    { id: "target", label: "To", cell: (one) => html`<${Name}>${one.value?.target ?? ""}<//>` },
    { id: "detail", label: "Detail", wide: true, minor: true, cell: (one) => html`<span class="mono">${format.safe(one.value?.detail ? JSON.stringify(one.value.detail) : "").slice(0, 200)}</span>` },
  ];
  if (audit.error?.status === 404) return html`<${Empty} title="Nothing was changed yet">Who creates, changes or deletes something is written here, in the topic <code>$audit</code>.<//>`;
  return html`<${Card} title="Audit" note="newest first" flush actions=${html`<a href=${href("topic", { name: "$audit" })}>All of $audit</a>`}>
    <${Loaded} of=${audit}>${(data) => {
      const rows = data.filter((one) => !word || JSON.stringify(one.value).toLowerCase().includes(word));
      return rows.length ? html`<${Table} label="Audit" columns=${columns} rows=${rows} keyOf=${(one) => one.offset} />` : html`<${Empty} title="Nothing here">No change matches.<//>`;
    }}<//>
  <//>`;
}
