"""What the tests of bad input share: a proper beginning, and what it costs."""

from __future__ import annotations

import gc
import tracemalloc

from edge_kit import TIMEOUT_S, frame, line, properties

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer

MEBI = 1 << 20
START = {
    "boson-frames": frame("news", b"first"),
    "boson-properties": properties(("topic", b"news"), ("content", b"first")),
    "goms": line("register", topics=["news"]),
}


class Growth:
    """How much Python's memory grew at most since it was made."""

    def __enter__(self) -> Growth:
        gc.collect()
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = tracemalloc.get_traced_memory()[1] - self._before
        tracemalloc.stop()


async def whole_answer(node: Node, data: bytes) -> bytes:
    """Send, end our side, and read until the bus has closed."""
    async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        await peer.send(data)
        peer.send_eof()
        return await peer.read_to_end()
