"""Consoles: pages that follow the bus live while the load runs, as open browsers do."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from polybus.bench import BenchError

CHANNELS = ("figures", "connections", "graph", "pipeline")
"""What the overview, the consumers, the flow graph and the pipelines follow; most pages follow
fewer."""
POLLED_S = {"/v1/consumers": 2, "/v1/sessions": 3, "/v1/graph": 3, "/v1/topics": 15}
"""What pages load again, and how often."""
TIMEOUT_S = 30.0


@contextlib.contextmanager
def watching(host: str, port: int, count: int) -> Iterator[None]:
    """Keep pages open while the block runs. Raises BenchError if one is not shown anything."""
    with contextlib.ExitStack() as stack:
        url = f"ws://{host}:{port}/v1/live"
        pages = [
            stack.enter_context(connect(url, open_timeout=TIMEOUT_S, max_size=None))
            for _ in range(count)
        ]
        for page in pages:
            for number, channel in enumerate(CHANNELS):
                ask = {"op": "subscribe", "id": number, "channel": channel}
                page.send(json.dumps(ask))
            try:
                page.recv(timeout=TIMEOUT_S)
            except (TimeoutError, ConnectionClosed) as error:
                raise BenchError("a console is not shown anything") from error
        stop, loaded = threading.Event(), threading.Barrier(count + 1, timeout=TIMEOUT_S)
        threads = [threading.Thread(target=_read, args=(page,)) for page in pages]
        threads += [threading.Thread(target=_poll, args=(host, port, stop, loaded)) for _ in pages]
        for thread in threads:
            thread.start()
        try:
            # Pages that are open, not pages that are being opened.
            loaded.wait()
            yield
        except threading.BrokenBarrierError as error:
            raise BenchError("a console could not load what it shows") from error
        finally:
            stop.set()
            for page in pages:
                page.close()
            for thread in threads:
                thread.join()


def _read(page: ClientConnection) -> None:
    with contextlib.suppress(ConnectionClosed):
        while True:
            page.recv()


def _poll(host: str, port: int, stop: threading.Event, loaded: threading.Barrier) -> None:
    """Reload what a page reloads, each second what is due."""
    bus = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    second = 0
    # A bus that goes away fails the measurement by itself.
    ended = (OSError, http.client.HTTPException, threading.BrokenBarrierError)
    with contextlib.closing(bus), contextlib.suppress(*ended):
        while True:
            for path, every_s in POLLED_S.items():
                if second % every_s == 0:
                    bus.request("GET", path)
                    bus.getresponse().read()
            if second == 0:
                loaded.wait()
            second += 1
            if stop.wait(1.0):
                return
