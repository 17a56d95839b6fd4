"""How long the console takes until it can be used, in a real browser with an empty cache."""

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import count
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from polybus.bench import BenchError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)
TIMEOUT_S = 30.0
TRIES = 10
LOADED = """
new Promise((resolve) => {
  if (document.readyState === "complete") resolve(1);
  else addEventListener("load", () => resolve(1));
})
"""
# The heading and the first live figures are there.
READY = """
new Promise((resolve) => {
  const look = () => {
    const tiles = [...document.querySelectorAll(".tile-value")];
    const hasFigure = tiles.some((one) => /[0-9]/.test(one.textContent));
    const isShown = document.querySelector("h1") && hasFigure;
    if (isShown) resolve(performance.now());
    else setTimeout(look, 2);
  };
  look();
})
"""


def interactive_ms(host: str, port: int) -> float:
    """Open the overview once. Raises BenchError."""
    with _browser() as debugger:
        try:
            with connect(debugger, open_timeout=TIMEOUT_S, max_size=None) as socket:
                return _opened(socket, f"http://{host}:{port}")
        except (WebSocketException, TimeoutError, KeyError) as error:
            raise BenchError(f"the browser shows no console: {error!r}") from error


@contextlib.contextmanager
def _browser() -> Iterator[str]:
    """A browser of its own; the address of its debugger."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        raise BenchError("chromium is not installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory(
        prefix="polybus-bench-", ignore_cleanup_errors=True
    ) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            said = (line for line in process.stderr if "listening on ws://" in line)
            line = next(said, None)
            if line is None:
                raise BenchError("the browser has ended at its start")
            yield line.split()[-1]
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


def _opened(socket: ClientConnection, bus: str) -> float:
    numbers = count(1)

    def ask(method: str, session: str = "", **params: Any) -> dict[str, Any]:
        number = next(numbers)
        request = {"id": number, "method": method, "params": params}
        socket.send(json.dumps(request | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(socket.recv(timeout=TIMEOUT_S))
            if answer.get("id") == number:
                return dict(answer.get("result", {}))

    pages = ask("Target.getTargets")["targetInfos"]
    page = next(one["targetId"] for one in pages if one["type"] == "page")
    session = ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def opened(url: str, is_ready: str) -> float:
        ask("Page.navigate", session, url=url)
        for _ in range(TRIES):
            # The page before may still be there at first, and ends without an answer.
            found = ask("Runtime.evaluate", session, expression=is_ready, awaitPromise=True)
            if "value" in found.get("result", {}):
                return float(found["result"]["value"])
        raise BenchError(f"the browser does not say when it shows {url}")

    # A browser starts its network process with its first request: that is not the page's time.
    opened(f"{bus}/healthz", LOADED)
    # The time is the page's own, from its beginning.
    return opened(f"{bus}/console/", READY)
