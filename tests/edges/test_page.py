"""The page at `/`, in a real browser: a message of any protocol shows up, and as text only."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from browser_kit import open_browser
from http_kit import Http, http_bus
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from polybus.edges.http.websocket import WebSocketPeer
from polybus.testing import ScriptedPeer

WAIT_S = 15
HOSTILE = "<img src=x onerror=document.title='owned'>"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with open_browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


class Page:
    """The page in the browser; its calls block, and so they leave the loop to the bus."""

    def __init__(self, browser: Chrome, http: Http) -> None:
        self._browser = browser
        self._url = f"http://127.0.0.1:{http.node.tcp_port}/"

    async def open(self, fragment: str = "") -> None:
        await asyncio.to_thread(self._browser.get, "about:blank")
        # What the page of the last test said when its bus went away.
        await self.complaints()
        await asyncio.to_thread(self._browser.get, self._url + fragment)

    async def text_of(self, selector: str) -> list[str]:
        return await asyncio.to_thread(self._texts, selector)

    def _texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return list(self._browser.execute_script(script, selector))

    async def shows(self, selector: str, *texts: str) -> None:
        """Wait until the elements have these texts."""
        waiting = WebDriverWait(self._browser, WAIT_S, poll_frequency=0.05)
        wanted = list(texts)
        try:
            await asyncio.to_thread(waiting.until, lambda _: self._texts(selector) == wanted)
        except Exception:
            pytest.fail(f"{selector} is {await self.text_of(selector)}, not {wanted}")

    async def type(self, selector: str, text: str) -> None:
        element = await asyncio.to_thread(self._browser.find_element, By.CSS_SELECTOR, selector)
        await asyncio.to_thread(element.send_keys, text)

    async def complaints(self) -> list[str]:
        """What the browser wrote to its console: script errors, and what the policy forbade."""
        entries = await asyncio.to_thread(self._browser.get_log, "browser")
        return [str(entry["message"]) for entry in entries]

    async def screenshot(self, path: Path) -> None:
        assert await asyncio.to_thread(self._browser.save_screenshot, str(path))


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with http_bus("alerts", "news", HOSTILE) as http:
        yield http


@pytest.fixture
def page(browser: Chrome, http: Http) -> Page:
    return Page(browser, http)


async def test_a_message_published_on_boson_is_seen_in_the_browser(
    http: Http, page: Page, tmp_path: Path
) -> None:
    await page.open("#news")
    await page.shows("#status", "live")
    async with ScriptedPeer(http.node.tcp_port) as peer:
        await peer.send_frame("news", b"hello from boson")
        await peer.send_frame("news", b'{"n": [1, 2]}')

        await page.shows("#messages td:nth-child(2)", "news", "news")
        await page.shows("#messages td:nth-child(3)", '{"n":[1,2]}', "hello from boson")
        times = await page.text_of("#messages td:nth-child(1)")
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", time) for time in times)
    await page.screenshot(tmp_path / "page.png")
    assert await page.complaints() == []


async def test_all_topics_can_be_picked_and_each_shows_its_own_messages(
    http: Http, page: Page
) -> None:
    await http.publish("news", b"old news")
    await page.open()
    await page.shows("#topic option", *sorted(["alerts", "news", HOSTILE]))
    await page.type("#topic", "news")
    await page.type("#from", "all")
    await page.shows("#messages td:nth-child(3)", "old news")
    await page.type("#topic", "alerts")
    await page.shows("#messages td:nth-child(3)")
    await http.publish("alerts", b"fire")

    await page.shows("#messages td:nth-child(3)", "fire")


async def test_names_and_messages_of_strangers_are_text_and_run_no_script(
    http: Http, page: Page
) -> None:
    await page.open("#" + HOSTILE.replace(" ", "%20"))
    await page.shows("#status", "live")
    script = "</td><script>document.title='owned'</script>" + HOSTILE
    async with ScriptedPeer(http.node.tcp_port) as peer:
        await peer.send_frame(HOSTILE, script.encode())

        await page.shows("#messages td:nth-child(2)", HOSTILE)
    await page.shows("#messages td:nth-child(3)", script)
    assert await page.text_of("title") == ["Polybus: tail a topic"]
    assert await page.text_of("img") == []
    assert await page.complaints() == []


async def test_a_message_can_be_published_from_the_page(http: Http, page: Page) -> None:
    await page.open("#news")
    await page.shows("#status", "live")
    await page.type("#text", "from the page\n")

    await page.shows("#messages td:nth-child(3)", "from the page")
    assert http.node.bus.log.bounds("news").stop == 1


async def test_the_page_goes_on_after_its_connection_was_lost(http: Http, page: Page) -> None:
    await page.open("#news")
    await page.shows("#status", "live")
    await http.publish("news", b"1")
    await page.shows("#messages td:nth-child(3)", "1")
    for peer in cast(list[WebSocketPeer], list(http.node.http.websockets)):
        peer._transport.abort()
    await page.shows("#status", "connection lost, trying again")
    await http.publish("news", b"2")

    await page.shows("#messages td:nth-child(3)", "2", "1")
    await page.shows("#status", "live")
