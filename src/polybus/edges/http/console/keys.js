// The keyboard: / searches, g and a letter goes to a page, ? shows the keys.
import { signal } from "./vendor/preact.js";
import { go } from "./router.js";

export const helpShown = signal(false);

export const KEYS = [
  ["/", "search or filter on this page"],
  ["g o", "overview"],
  ["g t", "topics"],
  ["g f", "flow graph"],
  ["g c", "consumers"],
  ["g d", "dead letters"],
  ["g p", "pipelines"],
  ["g s", "SQL"],
  ["g e", "settings and audit"],
  ["j, k", "next and previous message, or dead letter"],
  ["p", "pause and follow a live topic"],
  ["Ctrl Enter", "run the SQL query"],
  ["Esc", "close a window or a message"],
  ["?", "these keys"],
];
const PAGES = { o: "overview", t: "topics", f: "graph", c: "consumers", d: "dead-letters", p: "pipelines", s: "sql", e: "settings" };
const G_MS = 1500;

const own = new Map();
let g_at = 0;

/** A key of the page that is shown; returns a function that takes it back. */
export function onKey(key, act) {
  own.set(key, act);
  return () => own.get(key) === act && own.delete(key);
}

const isTyping = (element) => element?.closest?.("input:not([type=checkbox]), textarea, select, [contenteditable], .editor") !== null;

export function listen() {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    if (document.querySelector("dialog[open]")) return;
    if (handled(event.key)) event.preventDefault();
  });
}

function handled(key) {
  const after_g = Date.now() - g_at < G_MS;
  g_at = 0;
  if (after_g && PAGES[key]) {
    go(PAGES[key]);
    return true;
  }
  if (key === "g") {
    g_at = Date.now();
    return true;
  }
  if (key === "?") {
    helpShown.value = true;
    return true;
  }
  if (key === "/") {
    document.querySelector("[data-search]")?.focus();
    return true;
  }
  const act = own.get(key);
  act?.();
  return act !== undefined;
}
