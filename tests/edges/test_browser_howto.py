"""The web page of docs/howto/browser.md, in a browser, from another origin than the bus."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser_kit import open_browser
from docs_kit import run_by
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from polybus.client import connect
from polybus.testing import run_bus

TIMEOUT_S = 30


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[str]:
    """Serves the page as `python3 -m http.server` does."""
    folder = tmp_path / "site"
    folder.mkdir()
    [page] = run_by("edges/test_browser_howto.py", "docs/howto/browser.md")
    (folder / "index.html").write_text(page.text)
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.slow
async def test_the_page_shows_what_others_publish_and_publishes_itself(
    tmp_path: Path, origin: str
) -> None:
    async with run_bus("news", http={"cors-origins": [origin]}) as bus:
        async with connect(f"boson://127.0.0.1:{bus.tcp_port}") as client:
            await client.publish("news", "<b>hello</b>", receipt=True)

        def look() -> None:
            with open_browser(tmp_path / "profile") as browser:
                browser.get(f"{origin}/?bus=http://localhost:{bus.tcp_port}")

                def shows(text: str) -> None:
                    found = WebDriverWait(browser, TIMEOUT_S)
                    found.until(lambda _: text in browser.find_element(By.ID, "news").text)

                shows('"<b>hello</b>"')
                browser.find_element(By.NAME, "text").send_keys("from the page")
                browser.find_element(By.TAG_NAME, "button").click()
                shows('"from the page"')

        await asyncio.to_thread(look)
