"""Helpers for tests of the sink: topics read back, and a proxy that can cut calls off."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spark_kit import RunningBus

from polybus.client.http.blocking import request_json


def messages(bus: RunningBus, topic: str) -> list[dict[str, Any]]:
    """All messages of a topic."""
    found: list[dict[str, Any]] = []
    offset = 0
    while True:
        path = f"/v1/topics/{topic}/messages?offset={offset}&limit=10000"
        answer = request_json(bus.url, "GET", path)
        if not answer["messages"]:
            return found
        found += answer["messages"]
        offset = answer["next"]


def values(bus: RunningBus, topic: str) -> list[Any]:
    """All values of a topic: JSON where they are JSON, else text."""
    return [one.get("value", one.get("text", one.get("base64"))) for one in messages(bus, topic)]


def staged_files(bus: RunningBus) -> list[str]:
    return sorted(path.name for path in (bus.data / "staging").glob("*/*"))


class Proxy:
    """Hands HTTP calls on to the bus; `before` and `after` may do what a network or a kill does.

    Both get (method, path). `after` is called when the bus has answered and the caller does not
    know; a call for which one of them returns False is cut off there.
    """

    def __init__(self, port: int) -> None:
        self.before: Callable[[str, str], bool] = lambda method, path: True
        self.after: Callable[[str, str], bool] = lambda method, path: True
        self._port = port
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.close_connection = True
                self.raw_requestline = self.rfile.readline()
                if self.raw_requestline and self.parse_request():
                    proxy.hand_on(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def hand_on(self, request: Any) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        if not self.before(request.command, request.path):
            return
        bus = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            bus.request(request.command, request.path, body, dict(request.headers))
            answer = bus.getresponse()
            content = answer.read()
        except OSError:
            return
        finally:
            bus.close()
        if not self.after(request.command, request.path):
            return
        head = f"HTTP/1.1 {answer.status} {answer.reason}\r\nconnection: close\r\n"
        head += f"content-type: {answer.headers.get('content-type', '')}\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        with contextlib.suppress(OSError):
            request.wfile.write(head.encode() + content)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def proxied(bus: RunningBus) -> Iterator[Proxy]:
    proxy = Proxy(bus.port)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
