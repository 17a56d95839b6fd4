// Calls of the public HTTP API, and who makes them.
import { signal } from "./vendor/preact.js";

const TOKEN = "polybus.token";
const ACCOUNT = "polybus.account";
const GIVEN = "token";

/** The account that was logged in here; empty is whoever the bus takes the browser for. */
export const account = signal(sessionStorage.getItem(ACCOUNT) ?? "");
/** Why a login is needed now; empty if none is. */
export const loginNeeded = signal("");
/** Whether the last call reached the bus. */
export const reached = signal(true);

export class Problem extends Error {
  constructor(status, code, text) {
    super(text);
    this.status = status;
    this.code = code;
  }
}

/** An id for a query. `crypto.randomUUID` is there for https and localhost only. */
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (one) => one.toString(16).padStart(2, "0")).join("");

/** A path of which the names are encoded: path`/v1/topics/${name}`. */
export function path(parts, ...names) {
  return parts.reduce((whole, part, index) => whole + encodeURIComponent(names[index - 1]) + part);
}

function address(where, query = {}) {
  const url = new URL(where, location.origin);
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

export const token = () => sessionStorage.getItem(TOKEN) ?? "";

async function problemOf(answer) {
  const content = await answer.json().catch(() => ({}));
  const text = content.detail ?? `the bus answered ${answer.status} ${answer.statusText}`;
  return new Problem(answer.status, content.code ?? "http.failed", text);
}

// Queries have few processes: one that finds all of them busy waits for a while.
const BUSY_TRIES = 20;
const BUSY_MS = 500;

/** The raw answer. Throws Problem; `bus.away` if the bus does not answer at all. */
export async function ask(method, where, options = {}) {
  for (let tries = 1; ; tries++) {
    try {
      return await askOnce(method, where, options);
    } catch (error) {
      if (error.code !== "sql.busy" || tries === BUSY_TRIES || options.signal?.aborted) throw error;
      await new Promise((done) => setTimeout(done, BUSY_MS));
    }
  }
}

async function askOnce(method, where, { query, body, type, accept, signal: stop, authorization }) {
  const headers = {};
  const known = authorization ?? (token() && `Bearer ${token()}`);
  if (known) headers.authorization = known;
  if (type) headers["content-type"] = type;
  if (accept) headers.accept = accept;
  let answer;
  try {
    // Without credentials of the browser: it would ask for a password in a window of its own.
    answer = await fetch(address(where, query), { method, body, headers, signal: stop, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    reached.value = false;
    throw new Problem(0, "bus.away", "the bus does not answer; this page tries again by itself");
  }
  reached.value = true;
  if (answer.ok) return answer;
  const problem = await problemOf(answer);
  if (answer.status === 401 && !authorization) {
    forget();
    loginNeeded.value = problem.message;
  }
  throw problem;
}

async function json(method, where, options) {
  const answer = await ask(method, where, options);
  return answer.status === 204 ? null : answer.json();
}

const withBody = (method) => (where, body, options = {}) =>
  json(method, where, { ...options, ...(body === undefined ? {} : { body: JSON.stringify(body), type: "application/json" }) });

export const get = (where, query, options = {}) => json("GET", where, { query, ...options });
export const post = withBody("POST");
export const put = withBody("PUT");
export const patch = withBody("PATCH");
export const remove = (where, options) => json("DELETE", where, options);

function base64(text) {
  return btoa(String.fromCharCode(...new TextEncoder().encode(text)));
}

/** Log in by name and password: the password is used once, for a token that ends by itself. */
export async function logIn(name, password) {
  const authorization = `Basic ${base64(`${name}:${password}`)}`;
  const expires = Date.now() / 1000 + 12 * 3600;
  const made = await post("/v1/tokens", { expires }, { authorization });
  remember(made.token, name);
}

export async function logInByToken(text) {
  await get("/v1/topics", {}, { authorization: `Bearer ${text}` });
  remember(text, GIVEN);
}

function remember(text, name) {
  // For this tab only, and until it is closed.
  sessionStorage.setItem(TOKEN, text);
  sessionStorage.setItem(ACCOUNT, name);
  account.value = name;
  loginNeeded.value = "";
}

function forget() {
  sessionStorage.removeItem(TOKEN);
  sessionStorage.removeItem(ACCOUNT);
  account.value = "";
}

export async function logOut() {
  // A token that was made here is nobody else's; one that was given may be.
  const [, id] = token().split("_");
  if (account.value !== GIVEN) await remove(path`/v1/tokens/${id}`).catch(() => {});
  forget();
  location.reload();
}

/** Let the browser save an answer of the API as a file; whether rows are missing in it. */
export async function download(where, options, name) {
  const answer = await ask(options.method ?? "GET", where, options);
  save(await answer.blob(), name);
  return answer.headers.get("polybus-truncated") === "true";
}

export function save(content, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
