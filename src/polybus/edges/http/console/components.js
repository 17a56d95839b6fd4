// The few pieces that every page is made of.
import { Fragment, html, signal, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact.js";
import * as format from "./format.js";
import { useAction } from "./hooks.js";
import { change, href, route } from "./router.js";

let isFirst = true;

/** A page: its title, what can be done, and its content. Whoever comes from another page is at its title. */
export function Page({ title, lead, actions, children }) {
  const heading = useRef(null);
  useEffect(() => {
    if (!isFirst) heading.current.focus({ preventScroll: true });
    isFirst = false;
  }, []);
  useEffect(() => {
    document.title = `${typeof title === "string" ? title : title.text} · Polybus`;
  }, [typeof title === "string" ? title : title.text]);
  return html`<div class="page">
    <header class="page-head">
      <div><h1 ref=${heading} tabindex="-1">${typeof title === "string" ? title : title.shown}</h1>${lead && html`<p class="lead">${lead}</p>`}</div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}
  </div>`;
}

export function Card({ title, note, actions, children, flush = false, label }) {
  return html`<section class=${`card${flush ? " flush" : ""}`} aria-label=${label ?? title}>
    ${title && html`<header class="card-head"><h2>${title}</h2>${note && html`<span class="note">${note}</span>`}${actions && html`<div class="actions">${actions}</div>`}</header>`}
    ${children}
  </section>`;
}

/** One figure that leads to its page. */
export function Tile({ label, value, note, to, tone }) {
  const [, number, unit] = String(value).match(/^([^\s/]*)(.*)$/);
  return html`<a class="tile" href=${to} data-tone=${tone}>
    <span class="tile-label">${label}</span>
    <span class="tile-value">${number}<small>${unit}</small></span>
    <span class="tile-note">${note}</span>
  </a>`;
}

export const Badge = ({ tone = "plain", children }) => html`<span class="badge" data-tone=${tone}>${children}</span>`;

export const Protocol = ({ name }) => html`<span class="protocol" data-protocol=${name}>${format.protocol(name)}</span>`;

/** Local time; hovering shows UTC. */
export function Time({ at, date, milliseconds }) {
  if (!at) return html`<span class="dim">–</span>`;
  if (Number.isNaN(new Date(at).getTime())) return html`<span class="dim">${format.safe(String(at))}</span>`;
  return html`<time datetime=${new Date(at).toISOString()} title=${format.utc(at)}>${format.time(at, { date, milliseconds })}</time>`;
}

/** A name of strangers. It is text whatever is in it. */
export const Name = ({ children }) => html`<bdi class="name" title=${format.safe(children)}>${format.safe(children)}</bdi>`;

export const TopicLink = ({ topic, params = {} }) =>
  html`<a href=${href("topic", { name: topic, ...params })}><${Name}>${topic}<//></a>`;

/** A link to a message, which is the newest of what is listed beside it. */
export const MessageLink = ({ topic, offset, children }) =>
  html`<a href=${href("topic", { name: topic, message: offset, before: offset + 1 })}>${children}</a>`;

/** Nothing here yet, and what to do next. */
export const Empty = ({ title, children }) => html`<div class="empty"><p class="empty-title">${title}</p><div>${children}</div></div>`;

/** What happened and what to do. */
export function Failure({ error, retry }) {
  if (!error) return null;
  return html`<div class="failure" role="alert">
    <div><strong>${format.safe(sentence(error.message ?? error.detail ?? String(error)))}</strong>${error.code && html` <code>${error.code}</code>`}</div>
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** Data, or why there is none. */
export function Loaded({ of, children, empty }) {
  if (of.data === null) return of.error ? html`<${Failure} error=${of.error} retry=${of.reload} />` : html`<${Waiting} />`;
  const stale = of.error && html`<${Failure} error=${of.error} retry=${of.reload} />`;
  return html`<${Fragment}>${stale}${empty?.(of.data) || children(of.data)}<//>`;
}

export const Waiting = ({ text = "Loading" }) => html`<p class="waiting" role="status">${text}<span class="dots" aria-hidden="true"></span></p>`;

/** Browsers give the clipboard to pages of https and localhost only; others copy what is selected. */
async function toClipboard(text, box) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    // In the same window: a modal one lets nothing outside be selected.
    box.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    if (!isCopied) throw new Error("the browser does not let this page copy");
  }
}

export function Copy({ text, label = "Copy" }) {
  const box = useRef(null);
  const [done, setDone] = useState(false);
  const copy = useAction(async () => {
    await toClipboard(text, box.current);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  });
  return html`<span class="bar" ref=${box}><button type="button" class="quiet" onClick=${copy.run}>${done ? "Copied" : label}</button>
    ${copy.error && html`<${Field} label="The browser does not let this page copy. Copy it from here:"><input readonly value=${text} onFocus=${(event) => event.target.select()} /><//>`}</span>`;
}

/** Links that switch a part of the page; which one is in the address. */
export function Tabs({ param, tabs, label }) {
  const chosen = route.value.params[param] ?? tabs[0][0];
  return html`<nav class="tabs" aria-label=${label}>
    ${tabs.map(([id, text, number]) => html`<a key=${id} href=${href(route.value.page, { ...route.value.params, [param]: id === tabs[0][0] ? "" : id })}
      aria-current=${id === chosen ? "page" : undefined}>${text}${number !== undefined && html`<span class="tab-count">${number}</span>`}</a>`)}
  </nav>`;
}

export const chosenTab = (param, tabs) => route.value.params[param] ?? tabs[0][0];

/** The search of a page: its text is in the address. The key / goes to it. */
export function Search({ param = "q", label, placeholder, clears = {} }) {
  const timer = useRef(0);
  const input = useRef(null);
  const value = route.value.params[param] ?? "";
  useEffect(() => {
    if (input.current && document.activeElement !== input.current) input.current.value = value;
  }, [value]);
  const typed = (event) => {
    const text = event.target.value;
    clearTimeout(timer.current);
    timer.current = setTimeout(() => change({ ...clears, [param]: text }), 120);
  };
  return html`<input ref=${input} class="search" type="search" data-search aria-label=${label} placeholder=${placeholder ?? label}
    defaultValue=${value} onInput=${typed} autocomplete="off" spellcheck="false" />`;
}

const ROW_PX = 40;
const ROWS_DRAWN_MAX = 60;
const OVERSCAN = 8;

/**
 * Rows, sorted by the address. Of many, only those in view are drawn.
 * A column: {id, label, cell(row), value(row) to sort by, end: right-aligned, wide: takes the space, minor: not on a phone,
 * spare: on large screens alone}. `whole`: all rows are drawn, as high as what is in them.
 */
export function Table({ columns, rows, keyOf, label, open, opened, sortParam = "sort", initial = "", className = "", whole = false }) {
  const sort = route.value.params[sortParam] ?? initial;
  const [top, setTop] = useState(0);
  const box = useRef(null);
  const by = columns.find((one) => one.id === sort.replace("-", ""));
  const sorted = by?.value ? [...rows].sort(comparing(by.value, sort.startsWith("-"))) : rows;
  const isLong = sorted.length > ROWS_DRAWN_MAX && !whole;
  const first = isLong ? Math.max(0, Math.floor(top / ROW_PX) - OVERSCAN) : 0;
  const shown = isLong ? sorted.slice(first, first + ROWS_DRAWN_MAX) : sorted;
  const spacer = (count) => (count > 0 ? html`<tr class="spacer" aria-hidden="true"><td colspan=${columns.length} style=${{ height: `${count * ROW_PX}px` }}></td></tr>` : null);
  return html`<div class=${`table-box${isLong ? " long" : ""} ${className}`} ref=${box} tabindex="0" role="region" aria-label=${label}
      onScroll=${isLong ? () => setTop(box.current.scrollTop) : undefined}>
    <table aria-rowcount=${sorted.length}>
      <thead><tr>${columns.map((one) => html`<${Heading} key=${one.id} column=${one} sort=${sort} param=${sortParam} />`)}</tr></thead>
      <tbody>
        ${spacer(first)}
        ${shown.map((row) => html`<${Row} key=${keyOf(row)} row=${row} columns=${columns} open=${open} current=${opened === keyOf(row)} />`)}
        ${spacer(sorted.length - first - shown.length)}
      </tbody>
    </table>
  </div>`;
}

const classOf = (column) => ["end", "wide", "minor", "spare"].filter((one) => column[one]).join(" ");

function Heading({ column, sort, param }) {
  const name = sort.replace("-", "");
  const down = sort.startsWith("-");
  const className = classOf(column);
  if (!column.value || !column.label) return html`<th scope="col" class=${className}>${column.label || html`<span class="hidden">${column.hidden ?? "actions"}</span>`}</th>`;
  const mine = name === column.id;
  const next = mine ? (down ? column.id : `-${column.id}`) : column.end ? `-${column.id}` : column.id;
  return html`<th scope="col" class=${className} aria-sort=${mine ? (down ? "descending" : "ascending") : undefined}>
    <button type="button" class="sort" onClick=${() => change({ [param]: next })}>${column.label}<span aria-hidden="true">${mine ? (down ? " ↓" : " ↑") : ""}</span></button>
  </th>`;
}

function Row({ row, columns, open, current }) {
  const act = open && ((event) => {
    if (!event.target.closest("a, button, input, label")) open(row);
  });
  const keyed = open && ((event) => event.key === "Enter" && event.target === event.currentTarget && open(row));
  return html`<tr onClick=${act} onKeyDown=${keyed} tabindex=${open ? 0 : undefined} class=${open ? "opens" : ""} aria-current=${current ? "true" : undefined}>
    ${columns.map((one) => html`<td key=${one.id} class=${classOf(one)}>${one.cell(row)}</td>`)}
  </tr>`;
}

function comparing(value, down) {
  const sign = down ? -1 : 1;
  return (left, right) => {
    const a = value(left);
    const b = value(right);
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return (a < b ? -1 : 1) * sign;
  };
}

/** The table of a drawing; its rows are made when it is opened. */
export function TableBelow({ label, children }) {
  const [open, setOpen] = useState(false);
  return html`<details class="chart-table" onToggle=${(event) => setOpen(event.target.open)}><summary>Table</summary>
    ${open && html`<div class="table-box" tabindex="0" role="region" aria-label=${`${label}, as a table`}>${children()}</div>`}
  </details>`;
}

/** A window over the page. Escape closes it. */
export function Dialog({ title, close, children, wide = false }) {
  const box = useRef(null);
  useLayoutEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${box} class=${wide ? "wide" : ""} aria-label=${title} onClose=${close} onClick=${(event) => event.target === box.current && close()}>
    <div class="dialog-body">
      <header class="card-head"><h2>${title}</h2><div class="actions"><button type="button" class="quiet" aria-label="Close" onClick=${close}>✕</button></div></header>
      ${children}
    </div>
  </dialog>`;
}

/** Ask before what cannot be undone; `word` must be typed first if it is given. */
export function Confirm({ title, text, word, act, does, close }) {
  const [typed, setTyped] = useState("");
  const confirmed = useAction(async () => {
    await act();
    close();
  });
  return html`<${Dialog} title=${title} close=${close}>
    <form class="stack" onSubmit=${(event) => (event.preventDefault(), confirmed.run())}>
      <p>${text}</p>
      ${word && html`<${Field} label=${html`Type <${Name}>${word}<//> to confirm`}><input value=${typed} onInput=${(event) => setTyped(event.target.value)} autocomplete="off" autofocus /><//>`}
      <${Failure} error=${confirmed.error} />
      <div class="actions"><button type="button" onClick=${close}>Cancel</button><button class="danger" disabled=${confirmed.running || (Boolean(word) && typed !== word)}>${does}</button></div>
    </form>
  <//>`;
}

export const Field = ({ label, hint, children }) =>
  html`<label class="field"><span class="field-label">${label}</span>${children}${hint && html`<span class="hint">${hint}</span>`}</label>`;

/** Short notes about what was done, or failed; they go by themselves. */
const notes = signal([]);
let note_id = 0;

export function say(text, tone) {
  const id = note_id++;
  notes.value = [...notes.value.slice(-2), { id, text, tone }];
  setTimeout(() => (notes.value = notes.value.filter((one) => one.id !== id)), 5000);
}

/** What no part of the page has caught is not lost: it is noted. */
export function noteFailures() {
  addEventListener("unhandledrejection", ({ reason }) => {
    if (reason?.name !== "AbortError") say(sentence(format.safe(reason?.message ?? String(reason))), "bad");
  });
}

export const Notes = () => html`<div class="notes" role="status" aria-live="polite">${notes.value.map(({ id, text, tone }) => html`<p key=${id} data-tone=${tone}>${text}</p>`)}</div>`;
