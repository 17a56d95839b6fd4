// The address is the state: which page, and everything that it shows.
import { batch, signal } from "./vendor/preact.js";

const BASE = "/console/";

function read() {
  const page = decodeURIComponent(location.pathname.slice(BASE.length)) || "overview";
  return { page, params: Object.fromEntries(new URLSearchParams(location.search)) };
}

export const route = signal(read());

export function href(page, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "" && value !== false) query.set(name, value === true ? "1" : value);
  }
  const text = query.toString();
  return `${BASE}${page === "overview" ? "" : page}${text ? `?${text}` : ""}`;
}

export function go(page, params = {}, { replace = false } = {}) {
  const before = route.peek();
  history[replace ? "replaceState" : "pushState"](null, "", href(page, params));
  batch(() => (route.value = read()));
  if (before.page !== page) scrollTo(0, 0);
}

/** Change parameters of the page; those set to nothing go. */
export function change(params, options = { replace: true }) {
  const { page, params: before } = route.peek();
  go(page, { ...before, ...params }, options);
}

addEventListener("popstate", () => (route.value = read()));

// A click on a link of the console stays in the page; others, and those for a new tab, do not.
addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.defaultPrevented) return;
  if (link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
  if (!link.pathname.startsWith(BASE)) return;
  event.preventDefault();
  const isNew = link.href !== location.href;
  const before = route.peek();
  if (isNew) history.pushState(null, "", link.href);
  route.value = read();
  if (before.page !== route.peek().page) scrollTo(0, 0);
});
