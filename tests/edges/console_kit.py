"""The console in a real browser, and a bus beside it that may go away and come back."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from browser_kit import open_browser
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from websockets.sync.client import connect

WAIT_S = 20
TABS_MAX = 80
TASKS = "disabled-by-default-devtools.timeline"
EDITOR_IS_READY = "return document.activeElement.matches('.editor')"
OFFERED = "return document.querySelector('.editor').shadowRoot.querySelector('li')?.innerText"
TRACED = "Tracing.tracingComplete"
# Where the Tab key has led to, and what does not show the focus. A page is new for each address.
TABBING = """
    if (window.tabbed) return;
    [window.tabbed, window.unmarked] = [new Set(), new Set()];
    addEventListener("focusin", ({ target }) => {
        tabbed.add(target);
        if (getComputedStyle(target).outlineStyle === "none") unmarked.add(target);
    });
"""
OUT_OF_REACH = """
    const controls = ":is(a[href], button, input, select, textarea, summary, [tabindex='0'])";
    const missed = [...document.querySelectorAll(controls)].filter((one) =>
        one.checkVisibility() && !one.disabled && !tabbed.has(one));
    return [...missed, ...unmarked].map((one) => one.outerHTML.slice(0, 150));
"""
VENDOR = Path(__file__).parent.parent.parent / "vendor"
PAGES = {
    "overview": "Overview",
    "topics": "Topics",
    "graph": "Flow graph",
    "consumers": "Consumers",
    "dead-letters": "Dead letters",
    "pipelines": "Pipelines",
    "sql": "SQL",
    "settings": "Settings and audit",
}


def axe_source() -> str:
    """axe-core, installed from the lock file if it is not there."""
    found = VENDOR / "node_modules" / "axe-core" / "axe.min.js"
    if not found.exists():
        if shutil.which("npm") is None:
            text = "npm is missing; on Debian: apt-get install nodejs npm"
            if os.environ.get("CI") == "true":
                pytest.fail(text)
            pytest.skip(text)
        install = ["npm", "ci", "--ignore-scripts", "--no-fund", "--no-audit"]
        # Two workers that install at once break each other's installation.
        with open(VENDOR / "package-lock.json") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            if not found.exists():
                subprocess.run(install, cwd=VENDOR, check=True, capture_output=True)
    return found.read_text()


class ConsoleBus:
    """`polybus serve`, always on the same ports; `queue_port` is a queue of the topic `queue`."""

    def __init__(self, folder: Path, *topics: str, queue: str = "orders", **settings: Any) -> None:
        self._folder = folder
        self._queue = queue
        self._settings = settings
        self._topics = topics
        self.port = 0
        self.queue_port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(timeout=WAIT_S)

    @property
    def data(self) -> Path:
        return self._folder / "data"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        config = {
            "data": str(self._folder / "data"),
            "topics": list(self._topics),
            "connectors": [
                {"protocol": "tcp", "port": self.port},
                {
                    "protocol": "tcp",
                    "port": self.queue_port,
                    "speaks": "queue",
                    "topic": self._queue,
                },
            ],
            **self._settings,
        }
        file = self._folder / "bus.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "polybus.cli", "serve", "--config", str(file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        ports = re.findall(r"tcp://127\.0\.0\.1:(\d+)", line)
        assert "ready" in line and len(ports) == 2, line
        self.port, self.queue_port = map(int, ports)
        self.client.base_url = httpx.URL(self.url)

    def stop(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.terminate()
            self._process.wait(WAIT_S)
            self._process.stdout.close()
            self._process = None

    def publish(self, topic: str, *lines: dict[str, Any]) -> list[int]:
        """Messages as the API takes them: value or base64, key, headers."""
        answer = self.client.post(
            f"/v1/topics/{topic}/messages",
            content="".join(json.dumps(line) + "\n" for line in lines),
            headers={"content-type": "application/x-ndjson"},
        )
        assert answer.status_code == 200, answer.text
        return list(answer.json()["offsets"])


@contextmanager
def console_bus(folder: Path, *topics: str, **settings: Any) -> Iterator[ConsoleBus]:
    bus = ConsoleBus(folder, *topics, **settings)
    bus.start()
    try:
        yield bus
    finally:
        bus.stop()
        bus.client.close()


class Console:
    """What a person does: opens pages, clicks, types, and reads what is shown."""

    def __init__(self, browser: Chrome, bus: ConsoleBus) -> None:
        self.browser = browser
        self.host = "127.0.0.1"
        self._bus = bus

    def open(self, page: str = "", **params: object) -> None:
        self.browser.get("about:blank")
        self.complaints()
        query = f"?{urlencode({name: str(value) for name, value in params.items()})}"
        path = "" if page == "overview" else page
        address = f"http://{self.host}:{self._bus.port}/console"
        self.browser.get(f"{address}/{path}{query if params else ''}")
        self.until(lambda: self.texts("h1"), "the page has a heading")

    def run(self, script: str, *given: object) -> Any:
        return self.browser.execute_script(script, *given)

    def run_async(self, script: str, *given: object) -> Any:
        """`script` is the body of an async function; its value is returned."""
        body = "const done = arguments[arguments.length - 1]; const given = [...arguments];"
        whole = f"{body} (async () => {{ {script} }})().then(done, (error) => done(String(error)))"
        return self.browser.execute_async_script(whole, *given)

    def texts(self, selector: str) -> list[str]:
        # SVG has no innerText.
        script = """
            const found = document.querySelectorAll(arguments[0]);
            return [...found].map((one) => one.innerText ?? one.textContent);
        """
        return [str(one).strip() for one in self.run(script, selector)]

    def until(self, condition: Callable[[], object], what: str) -> None:
        waiting = WebDriverWait(self.browser, WAIT_S, poll_frequency=0.05)
        try:
            waiting.until(lambda _: condition())
        except TimeoutException:
            shown = self.run("return document.body.innerText")[:2000]
            pytest.fail(f"waited for: {what}\n{self.browser.current_url}\n{shown}")

    def sees(self, *texts: str, within: str = "body") -> None:
        """Wait until the element shows all the texts."""
        for text in texts:
            self.until(lambda text=text: any(text in one for one in self.texts(within)), text)  # type: ignore[misc]

    def click(self, text: str, within: str = "body") -> None:
        """Click the button, link or summary that has this text or this label."""
        script = """
            const [text, within] = arguments;
            const all = document.querySelectorAll("button, a, summary, label, input");
            const found = [...all].filter((one) => one.closest(within) && !one.disabled)
                .find((one) => (one.innerText ?? "").trim() === text || one.ariaLabel === text);
            found?.scrollIntoView({ block: "center" });
            found?.click();
            return Boolean(found);
        """
        self.until(lambda: self.run(script, text, within), f"something to click: {text}")

    def keys(self, *keys: str) -> None:
        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()

    def fill(self, selector: str, text: str) -> None:
        """Type into a field."""
        self.until(lambda: self.run("return document.querySelector(arguments[0])", selector), text)
        focus = "const one = document.querySelector(arguments[0]); one.focus(); one.select?.()"
        self.run(focus, selector)
        self.keys(text)

    def choose(self, selector: str, value: str) -> None:
        script = """
            const one = document.querySelector(arguments[0]);
            if (!one) return false;
            one.value = arguments[1];
            one.dispatchEvent(new Event("change", { bubbles: true }));
            return true;
        """
        self.until(lambda: self.run(script, selector, value), f"{selector} to choose from")

    def tab_to(self, selector: str) -> None:
        """Press the Tab key until an element has the focus."""
        for _ in range(TABS_MAX):
            self.keys(Keys.TAB)
            if self.run("return document.activeElement.matches(arguments[0])", selector):
                return
        pytest.fail(f"the Tab key does not lead to {selector}")

    def out_of_reach(self) -> list[str]:
        """Controls of the page that the Tab key has not led to, or without showing it."""
        self.run(TABBING)
        self.keys(Keys.TAB * TABS_MAX)
        return [str(one) for one in self.run(OUT_OF_REACH)]

    def press(self, modifier: str, key: str) -> None:
        ActionChains(self.browser).key_down(modifier).send_keys(key).key_up(modifier).perform()

    def heap_bytes(self) -> int:
        """What the page holds, without garbage."""
        self.browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        return int(self.browser.execute_cdp_cmd("Runtime.getHeapUsage", {})["usedSize"])

    def longest_task_ms(self, act: Callable[[], None]) -> float:
        """How long the page computes at a stretch while somebody does something.

        It is the time of the processor: other programs may take that away from the page.
        """
        address = self.browser.capabilities["goog:chromeOptions"]["debuggerAddress"]
        version = httpx.get(f"http://{address}/json/version").json()
        categories = {"includedCategories": [TASKS], "excludedCategories": ["*"]}
        with connect(version["webSocketDebuggerUrl"], max_size=None) as debugger:
            start = {"method": "Tracing.start", "params": {"traceConfig": categories}}
            debugger.send(json.dumps({"id": 1, **start}))
            debugger.recv(timeout=WAIT_S)
            act()
            debugger.send(json.dumps({"id": 2, "method": "Tracing.end"}))
            events: list[dict[str, Any]] = []
            while (said := json.loads(debugger.recv(timeout=WAIT_S))).get("method") != TRACED:
                events += said.get("params", {}).get("value", [])
        names = [one for one in events if one["name"] == "thread_name"]
        pages = {one["tid"] for one in names if one["args"]["name"] == "CrRendererMain"}
        tasks = [one for one in events if one["name"] == "RunTask" and one["tid"] in pages]
        return float(max(one["tdur"] for one in tasks if "tdur" in one)) / 1000

    def theme(self, name: str) -> None:
        self.run("document.documentElement.dataset.theme = arguments[0]", name)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    @contextmanager
    def answering(self, source: str) -> Iterator[None]:
        """Pages opened meanwhile ask the `fetch` of `source`; `real` is the browser's."""
        script = {"source": f"{{ const real = window.fetch; {source} }}"}
        added = self.browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
        try:
            yield
        finally:
            self.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    def complaints(self) -> list[str]:
        """What the browser wrote to its console: script errors, and what the policy forbade."""
        entries: list[Any] = self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        return [str(entry["message"]) for entry in entries]

    def barriers(self, axe: str) -> list[str]:
        """What axe-core finds that keeps people out."""
        if not self.run("return Boolean(window.axe)"):
            self.run(axe)
        found = self.run_async(
            "return (await axe.run(document, { resultTypes: ['violations'] })).violations"
        )
        return [
            f"{one['id']}: {one['help']}: {one['nodes'][0]['html'][:200]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]


@contextmanager
def open_console(profile: Path, bus: ConsoleBus, *flags: str) -> Iterator[Console]:
    with open_browser(profile, "--hide-scrollbars", *flags) as browser:
        browser.set_script_timeout(WAIT_S)
        downloads = {"behavior": "allow", "downloadPath": str(profile / "downloads")}
        browser.execute_cdp_cmd("Browser.setDownloadBehavior", downloads)
        console = Console(browser, bus)
        console.resize(1280, 900)
        yield console
