// One WebSocket for the whole tab: figures, tails, the graph. It comes back by itself.
import { signal } from "./vendor/preact.js";
import { loginNeeded, token } from "./api.js";

const RETRY_MS_MIN = 500;
const RETRY_MS_MAX = 8000;

/** "connecting", "live" or "away". */
export const state = signal("connecting");
/** The last sample of the bus's figures: one per second. */
export const figures = signal(null);

const wanted = new Map();
let socket = null;
let next_id = 1;
let retry_ms = RETRY_MS_MIN;
let left = false;
// Connected, and logged in if there is a token.
let ready = false;

/** Follow a channel; returns a function that ends it. `failed` gets what the bus refused. */
export function follow(channel, fields, take, failed = () => {}) {
  const id = next_id++;
  wanted.set(id, { channel, fields, take, failed });
  if (ready) ask(id);
  return () => {
    wanted.delete(id);
    if (ready) send({ op: "unsubscribe", id });
  };
}

export function start() {
  follow("figures", {}, (data) => (figures.value = data));
  connect();
  // A page that is left may be kept by the browser for the way back: then it must not stay connected.
  addEventListener("pagehide", () => {
    left = true;
    socket.close();
  });
  addEventListener("pageshow", (event) => {
    left = false;
    if (event.persisted) connect();
  });
}

const send = (message) => socket.send(JSON.stringify(message));

function ask(id) {
  const { channel, fields } = wanted.get(id);
  send({ op: "subscribe", id, channel, ...fields });
}

function connect() {
  const url = new URL("/v1/live", location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(url);
  socket.onopen = () => {
    if (token()) send({ op: "login", token: token() });
    else askAll();
  };
  socket.onmessage = (event) => take(JSON.parse(event.data));
  socket.onclose = () => {
    ready = false;
    if (left) return;
    state.value = "away";
    // Tabs that lost the same bus do not all come back in the same moment.
    setTimeout(connect, retry_ms * (0.75 + Math.random() / 2));
    retry_ms = Math.min(RETRY_MS_MAX, retry_ms * 2);
  };
}

function askAll() {
  ready = true;
  for (const id of wanted.keys()) ask(id);
}

function take(message) {
  if (message.op === "login") {
    askAll();
    return;
  }
  if (message.error?.code?.startsWith("auth.")) {
    // What was asked for stays wanted: it is asked for again after the login.
    loginNeeded.value = message.error.detail;
    return;
  }
  const one = wanted.get(message.id);
  if (!one) return;
  if (message.error) {
    wanted.delete(message.id);
    one.failed(message.error);
    return;
  }
  // Only data shows that the bus lets this tab in.
  state.value = "live";
  retry_ms = RETRY_MS_MIN;
  one.take(message.data);
}

/** Begin again, as after a login. */
export function restart() {
  retry_ms = RETRY_MS_MIN;
  socket?.close();
}
