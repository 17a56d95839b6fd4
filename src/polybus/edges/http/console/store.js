// What this browser remembers: the theme, favourites, saved filters and queries. Never a message or a token.
import { signal } from "./vendor/preact.js";

const PREFIX = "polybus.";
const ENTRIES_MAX = 200;

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function kept(name, otherwise) {
  const value = signal(read(name, otherwise));
  return {
    value,
    set(next) {
      value.value = next;
      try {
        localStorage.setItem(PREFIX + name, JSON.stringify(next));
      } catch {
        // Full or forbidden: it lasts as long as the page.
      }
    },
  };
}

const themes = kept("theme", "auto");
const stars = kept("favourites", []);
const filters = kept("filters", []);
const queries = kept("queries", []);
const past = kept("history", []);

export const theme = themes.value;
export const favourites = stars.value;
export const savedFilters = filters.value;
export const savedQueries = queries.value;
export const queryHistory = past.value;

export function setTheme(name) {
  themes.set(name);
  applyTheme();
}

export function applyTheme() {
  const name = themes.value.peek();
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

export function toggleFavourite(topic) {
  const all = stars.value.peek();
  stars.set(all.includes(topic) ? all.filter((one) => one !== topic) : [...all, topic].slice(-ENTRIES_MAX));
}

const named = (store) => ({
  save: (entry) => store.set([entry, ...store.value.peek().filter((one) => one.name !== entry.name)].slice(0, ENTRIES_MAX)),
  forget: (name) => store.set(store.value.peek().filter((one) => one.name !== name)),
});

export const { save: saveFilter, forget: forgetFilter } = named(filters);
export const { save: saveQuery, forget: forgetQuery } = named(queries);

export function noteQuery(text) {
  past.set([text, ...past.value.peek().filter((one) => one !== text)].slice(0, 50));
}
