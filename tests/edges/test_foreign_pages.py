"""Web pages of other origins, in a real browser: they write nothing and read nothing.

The same pages succeed if their origin is in `http.cors-origins`, so it is the bus that stops them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from browser_kit import open_browser
from http_kit import Http, http_bus
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait

from polybus.edges.http.console_files import digest

WAIT_S = 15
PAGE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\n"
    b"<!doctype html><title>evil</title><body>"
)
IS_LIVE = "return document.querySelector('.connection')?.dataset.state === 'live'"
# evil.example is another site; another port of 127.0.0.1 is another origin of the same site.
EVIL, NEIGHBOUR = "evil.example", "127.0.0.1"
ATTACK = """
const [bus, key, done] = arguments;
const messages = `${bus}/v1/topics/news/messages`;
const poll = `${bus}/msgstream?transport=shortpolling&sessionKey=${key}&confirmIds=1`;
const text = { method: "POST", body: "forged", headers: { "content-type": "text/plain" } };
const tried = (promise) => promise.then((found) => found, (error) => error.name);
const submit = () => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.name = "target";
  const form = document.body.appendChild(document.createElement("form"));
  Object.assign(form, { method: "post", action: messages, enctype: "text/plain" });
  form.target = "target";
  form.append(Object.assign(document.createElement("input"), { name: "forged", value: "1" }));
  form.submit();
  return "sent";
};
const loaded = (tag, fields) => new Promise((resolve) => {
  const element = Object.assign(document.createElement(tag), fields);
  element.onload = () => resolve("loaded");
  element.onerror = () => resolve("refused");
  document.body.append(element);
});
const socket = () => new Promise((resolve) => {
  const socket = new WebSocket(`${bus.replace("http", "ws")}/msgstream?sessionKey=${key}`);
  socket.onmessage = (event) => resolve(event.data);
  socket.onerror = () => resolve("refused");
});
(async () => done({
  text: await tried(fetch(messages, text).then((answer) => answer.status)),
  opaque: await tried(fetch(messages, { ...text, mode: "no-cors" }).then((answer) => answer.type)),
  form: submit(),
  read: await tried(fetch(messages).then((answer) => answer.text())),
  opaque_read: await tried(fetch(messages, { mode: "no-cors" }).then((answer) => answer.type)),
  script: await loaded("script", { src: `${bus}/page.js` }),
  image: await loaded("img", { src: poll }),
  socket: await socket(),
  poll: await tried(fetch(poll).then((answer) => answer.status)),
}))();
"""
PUBLISH = """
const done = arguments[0];
const own = { method: "POST", body: "own", headers: { "content-type": "text/plain" } };
fetch("/v1/topics/news/messages", own).then((answer) => done(answer.status));
"""
REFUSED = {
    "text": "TypeError",
    "opaque": "TypeError",
    "form": "sent",
    "read": "TypeError",
    "opaque_read": "TypeError",
    "script": "refused",
    "image": "refused",
    "socket": "refused",
    "poll": "TypeError",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    rule = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
    with open_browser(tmp_path_factory.mktemp("chromium"), rule) as browser:
        browser.set_script_timeout(WAIT_S)
        yield browser


@contextlib.asynccontextmanager
async def other_server() -> AsyncIterator[int]:
    """Serves an empty page on a port of its own."""

    # A browser opens more connections than it uses.
    opened: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(PAGE)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for writer in opened:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


async def run(browser: Chrome, page: str, script: str, *arguments: Any) -> Any:
    await asyncio.to_thread(browser.get, page)
    return await asyncio.to_thread(browser.execute_async_script, script, *arguments)


async def attack(browser: Chrome, page: str, http: Http) -> tuple[dict[str, Any], str]:
    """What the page could do, and the key of the session that it knew."""
    key = await http.open_session()
    await http.post(key, ["secret"])
    bus = f"http://127.0.0.1:{http.node.tcp_port}"
    script = ATTACK.replace("page.js", f"console/{digest()}/main.js")
    return await run(browser, page, script, bus, key), key


@pytest.mark.parametrize("host", [EVIL, NEIGHBOUR])
async def test_a_page_of_another_origin_writes_and_reads_nothing(
    browser: Chrome, host: str
) -> None:
    async with http_bus("news") as http, other_server() as port:
        done, key = await attack(browser, f"http://{host}:{port}/", http)
        assert done == REFUSED
        # They did arrive: two fetches, a form, an image, a WebSocket and a poll.
        await http.until(lambda: http.node.bad_peers.counts["http.origin-foreign"] == 6)
        assert http.node.bus.log.bounds("news").stop == 0
        assert await http.packs(key) == {"1": [["secret"]]}


async def test_the_same_page_may_if_its_origin_is_named(browser: Chrome) -> None:
    async with other_server() as port:
        page = f"http://{EVIL}:{port}"
        async with http_bus("news", http={"cors-origins": [page]}) as http:
            done, _ = await attack(browser, page, http)
            assert done["text"] == 200 and done["poll"] == 204
            assert done["socket"] == '{"1":[["secret"]]}'
            assert '"forged"' in done["read"]
            await http.until(lambda: http.node.bus.log.bounds("news").stop == 3)


async def test_a_rebound_name_shows_nothing_of_the_bus(browser: Chrome) -> None:
    """evil.example has the address of the bus: to the browser they are one origin."""
    fetched = """
    const done = arguments[0];
    fetch("/v1/topics").then(async (answer) => done([answer.status, await answer.json()]));
    """
    async with http_bus("secret-name") as http:
        page = f"http://{EVIL}:{http.node.tcp_port}/"
        status, problem = await run(browser, page, fetched)
        assert (status, problem["code"]) == (421, "http.host-unknown")
        assert "secret-name" not in str(problem)


async def test_the_page_of_the_bus_itself_works(browser: Chrome) -> None:
    async with http_bus("news") as http:
        for host in ("127.0.0.1", "localhost"):
            url = f"http://{host}:{http.node.tcp_port}/"
            await asyncio.to_thread(browser.get, "about:blank")
            await asyncio.to_thread(browser.get, url)
            waiting = WebDriverWait(browser, WAIT_S, poll_frequency=0.05)
            await asyncio.to_thread(waiting.until, lambda _: browser.execute_script(IS_LIVE))
            assert await asyncio.to_thread(browser.execute_async_script, PUBLISH) == 200
        assert http.node.bus.log.bounds("news").stop == 2
