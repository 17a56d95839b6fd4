"use strict";
const ROWS_MAX = 500;
const CHARACTERS_MAX = 2000;
const RETRY_MS = 1000;
const element = (id) => document.getElementById(id);
let shown = 0;
// What is followed now. A newer choice replaces the object, and the older one's events count no more.
let tail = null;

function show(state, text) {
  element("status").dataset.state = state;
  element("status").textContent = text;
}

async function api(method, path, body, type = "application/json") {
  const answer = await fetch(path, { method, body, headers: body && { "content-type": type } });
  const content = answer.status === 204 ? null : await answer.json();
  if (!answer.ok) throw new Error(content.detail);
  return content;
}

// Topics and messages are anybody's: they are only ever set as text, never as HTML.
function add(type, data, isNotice) {
  const text = typeof data === "string" ? data : data === undefined ? "" : JSON.stringify(data);
  const cut = text.length > CHARACTERS_MAX ? `${text.slice(0, CHARACTERS_MAX)} … (${text.length} characters)` : text;
  const row = document.createElement("tr");
  if (isNotice) row.className = "notice";
  const now = new Date();
  const time = `${now.toTimeString().slice(0, 8)}.${String(now.getMilliseconds()).padStart(3, "0")}`;
  for (const cell of [time, type, cut]) row.insertCell().textContent = cell;
  const rows = element("messages");
  rows.prepend(row);
  while (rows.childElementCount > ROWS_MAX) rows.lastElementChild.remove();
  if (!isNotice) shown += 1;
  count();
}

function count() {
  const rows = element("messages").childElementCount;
  const newest = shown > ROWS_MAX ? `, the newest ${ROWS_MAX} shown` : "";
  element("count").textContent = shown ? `${shown} message${shown === 1 ? "" : "s"}${newest}` : "No messages yet";
  element("table").hidden = rows === 0;
  element("empty").hidden = rows !== 0;
}

function clear() {
  shown = 0;
  element("messages").replaceChildren();
  count();
}

function connect(mine) {
  const url = new URL("/msgstream", location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  url.searchParams.set("sessionKey", mine.key);
  const socket = mine.socket = new WebSocket(url);
  socket.onopen = () => mine === tail && show("live", "live");
  socket.onmessage = (event) => mine === tail && take(mine, JSON.parse(event.data));
  socket.onclose = () => {
    if (mine !== tail) return;
    if (mine.ended) return open(mine);
    show("waiting", "connection lost, trying again");
    setTimeout(() => mine === tail && connect(mine), RETRY_MS);
  };
}

function take(mine, packs) {
  for (const [id, messages] of Object.entries(packs)) {
    // A pack that was shown may come again after a lost connection; pack 0 has no number.
    if (id !== "0" && Number(id) <= mine.last) continue;
    if (id !== "0") mine.last = Number(id);
    for (const [type, data] of messages) {
      if (id === "0" && type === "session.unset") mine.ended = true;
      else if (id === "0" && type === "session.overflow") add(type, `${data.count} messages were lost: too many waited`, true);
      else add(type, data, false);
    }
  }
  mine.socket.send(Object.keys(packs).join(","));
}

async function open(mine) {
  show("waiting", "connecting");
  mine.ended = false;
  mine.last = 0;
  try {
    const wanted = JSON.stringify({ topics: [mine.topic], from: mine.from });
    mine.key = (await api("POST", "/v1/sessions", wanted)).sessionKey;
    // A session that expired begins anew with new messages: what was before is on the page.
    mine.from = "latest";
  } catch (error) {
    if (mine !== tail) return;
    show("failed", error.message);
    return void setTimeout(() => mine === tail && open(mine), 5 * RETRY_MS);
  }
  if (mine === tail) connect(mine);
  else leave(mine);
}

function leave(old) {
  if (old.socket) old.socket.close();
  if (old.key) fetch(`/v1/sessions/${old.key}`, { method: "DELETE", keepalive: true }).catch(() => {});
}

function follow() {
  const before = tail;
  tail = null;
  if (before) leave(before);
  clear();
  const topic = element("topic").value;
  if (!topic) return;
  const path = `/v1/topics/${encodeURIComponent(topic)}/messages`;
  element("example").textContent = `curl --data 'hello' '${location.origin}${path.replaceAll("'", "%27")}'`;
  tail = { topic, from: element("from").value, key: null, socket: null, last: 0, ended: false };
  open(tail);
}

async function begin() {
  try {
    const { topics } = await api("GET", "/v1/topics");
    const wanted = decodeURIComponent(location.hash.slice(1));
    element("topic").replaceChildren(...topics.map(({ name }) => new Option(name, name, false, name === wanted)));
    if (topics.length) return follow();
    element("empty").textContent = "This bus has no topics yet. Create one: polybus topics create news";
    show("waiting", "no topics");
  } catch (error) {
    show("failed", `the bus does not answer: ${error.message}`);
  }
  setTimeout(begin, 2 * RETRY_MS);
}

element("follow").addEventListener("change", (event) => {
  if (event.target.id === "topic") history.replaceState(null, "", "#" + encodeURIComponent(event.target.value));
  follow();
});
element("follow").addEventListener("submit", (event) => event.preventDefault());
element("publish").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = element("text").value;
  if (!text || !tail) return;
  element("text").value = "";
  try {
    await api("POST", `/v1/topics/${encodeURIComponent(tail.topic)}/messages`, text, "text/plain");
  } catch (error) {
    add("not published", error.message, true);
  }
});
element("clear").addEventListener("click", clear);
addEventListener("pagehide", () => tail && leave(tail));
addEventListener("pageshow", (event) => event.persisted && follow());
begin();
