// What is around every page: the navigation, the state of the bus, the login, the help.
import { Fragment, html, useEffect, useRef, useState } from "./vendor/preact.js";
import { account, loginNeeded, logIn, logInByToken, logOut } from "./api.js";
import { Dialog, Failure, Field, Notes, Waiting } from "./components.js";
import { useAction } from "./hooks.js";
import { helpShown, KEYS } from "./keys.js";
import { restart, state } from "./live.js";
import { href, route } from "./router.js";
import { setTheme, theme } from "./store.js";

// A page: its name, and the strokes of its icon.
const PAGES = {
  overview: ["Overview", "M4 4h7v8H4zM14 4h6v4h-6zM14 11h6v9h-6zM4 15h7v5H4z"],
  topics: ["Topics", "M4 6h16M4 12h16M4 18h10"],
  graph: ["Flow graph", "M3.5 6a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0M15.5 12a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0M3.5 18a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0M8.5 7l7 4M8.5 17l7-4"],
  consumers: ["Consumers", "M9 11a3.5 3.5 0 1 0 0-7a3.5 3.5 0 0 0 0 7M2.5 20c0-3.6 2.900-6 6.500-6s6.5 2.4 6.5 6M16 4.5a3.5 3.5 0 0 1 0 6.500M18 14.500c2.200.8 3.5 2.8 3.5 5.500"],
  "dead-letters": ["Dead letters", "M3 6h18v13H3zM3 7l9 7l9-7"],
  pipelines: ["Pipelines", "M3 5h6v5H3zM15 14h6v5h-6zM9 7.500h4v9h2"],
  sql: ["SQL", "M4 6c0-1.7 3.600-3 8-3s8 1.3 8 3s-3.6 3-8 3s-8-1.300-8-3v12c0 1.7 3.6 3 8 3s8-1.3 8-3V6M4 12c0 1.7 3.6 3 8 3s8-1.3 8-3"],
  settings: ["Settings and audit", "M4 7h9M19 7h1M4 17h1M11 17h9M13 7a3 3 0 1 0 6 0a3 3 0 1 0-6 0M5 17a3 3 0 1 0 6 0a3 3 0 1 0-6 0"],
};
const FILES = { ...Object.fromEntries(Object.keys(PAGES).map((page) => [page, page])), topic: "topic" };

export function Shell() {
  const { page } = route.value;
  const current = page === "topic" ? "topics" : page;
  const pages = useRef(null);
  useEffect(() => {
    // On a phone they are a row, of which a part is in view.
    const { offsetLeft = 0 } = pages.current.querySelector("[aria-current]") ?? {};
    pages.current.scrollLeft = offsetLeft - pages.current.clientWidth / 3;
  }, [current]);
  return html`<${Fragment}>
    <a class="skip" href="#content">Skip to the content</a>
    <nav class="side" aria-label="Pages">
      <a class="brand" href=${href("overview")}><${Mark} />Polybus</a>
      <ul ref=${pages}>${Object.entries(PAGES).map(([id, [text, icon]]) => html`<li key=${id}><a href=${href(id)} aria-current=${id === current ? "page" : undefined}><${Icon} path=${icon} /><span>${text}</span></a></li>`)}</ul>
      <div class="side-foot"><${Connection} /><${Account} /><${Theme} /><button type="button" class="quiet" onClick=${() => (helpShown.value = true)}>Keys <kbd>?</kbd></button></div>
    </nav>
    <main id="content" tabindex="-1">${loginNeeded.value ? html`<${Login} />` : html`<${Content} page=${page} key=${page} />`}</main>
    <${Notes} />
    ${helpShown.value && html`<${Help} />`}
  <//>`;
}

const Icon = ({ path }) => html`<svg viewBox="0 0 24 24" width="18" height="18" aria-hidden="true"><path d=${path} fill="none" stroke="currentColor" stroke-width="1.7" stroke-linecap="round" stroke-linejoin="round" /></svg>`;

const Mark = () => html`<svg viewBox="0 0 32 32" width="26" height="26" aria-hidden="true"><rect width="32" height="32" rx="8" fill="var(--brand)" /><path d="M7 10h18M7 16h18M7 22h18" stroke="#fff" stroke-opacity=".45" stroke-width="2" stroke-linecap="round" /><circle cx="11" cy="10" r="3" fill="#fff" /><circle cx="21" cy="16" r="3" fill="#fff" /><circle cx="14" cy="22" r="3" fill="#fff" /></svg>`;

/** A page's module is loaded when it is opened first. */
function Content({ page }) {
  const [shown, setShown] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (!FILES[page]) {
      setError({ message: "the console has no such page; choose one from the navigation" });
      return;
    }
    import(`./pages/${FILES[page]}.js`).then(
      (module) => setShown(() => module.default),
      () => setError({ message: "this part of the console could not be loaded: the bus is away, or has another version now; load the page again" }),
    );
  }, [page]);
  if (error) return html`<div class="page"><h1>Not here</h1><${Failure} error=${error} retry=${() => location.reload()} /></div>`;
  return shown ? html`<${shown} />` : html`<div class="page"><${Waiting} /></div>`;
}

function Connection() {
  const text = { live: "Live", connecting: "Connecting", away: "Bus away, trying again" }[state.value];
  return html`<p class="connection" data-state=${state.value} role="status">${text}</p>`;
}

function Account() {
  if (!account.value) return null;
  return html`<p class="account"><span>${account.value}</span> <button type="button" class="quiet" onClick=${logOut}>Log out</button></p>`;
}

function Theme() {
  return html`<label class="theme"><span class="hidden">Theme</span><select value=${theme.value} onChange=${(event) => setTheme(event.target.value)}>
    <option value="auto">System theme</option><option value="light">Light</option><option value="dark">Dark</option>
  </select></label>`;
}

function Login() {
  const form = useRef(null);
  const login = useAction(async () => {
    const { name, password, token } = Object.fromEntries(new FormData(form.current));
    await (token ? logInByToken(token) : logIn(name, password));
    restart();
  });
  return html`<div class="page login"><section class="card">
    <h1>Log in</h1>
    <p class="lead">This bus asks who you are: ${loginNeeded.value}.</p>
    <form ref=${form} class="stack" onSubmit=${(event) => (event.preventDefault(), login.run())}>
      <${Field} label="Account"><input name="name" autocomplete="username" autofocus /><//>
      <${Field} label="Password"><input name="password" type="password" autocomplete="current-password" /><//>
      <details><summary>Log in by a token</summary><${Field} label="Token" hint="Made by: polybus accounts token create NAME"><input name="token" type="password" autocomplete="off" /><//></details>
      <${Failure} error=${login.error} />
      <div class="actions"><button class="primary" disabled=${login.running}>Log in</button></div>
    </form>
    <p class="hint">The console keeps a token for twelve hours, in this tab only.</p>
  </section></div>`;
}

function Help() {
  return html`<${Dialog} title="Keys" close=${() => (helpShown.value = false)}>
    <dl class="keys">${KEYS.map(([key, text]) => html`<div key=${key}><dt>${key.split(" ").map((one) => html`<kbd>${one}</kbd> `)}</dt><dd>${text}</dd></div>`)}</dl>
  <//>`;
}
