"""What the tests of bad input share: a proper beginning, and what it costs."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

from edge_kit import TIMEOUT_S, frame, line, properties

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer

MEBI = 1 << 20
RESET_PEAK = "5"  # proc(5): sets VmHWM to VmRSS.
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


class ResidentGrowth:
    """How much the memory of this process grew at most within the block, in resident pages.

    Unlike `Growth` it slows nothing down and counts native memory, but memory that was freed before
    and is used again does not count: it is for floods that would take hundreds of MiB.
    """

    def __enter__(self) -> ResidentGrowth:
        gc.collect()
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        self._before = _status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.peak_bytes = _status_bytes("VmHWM") - self._before


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


async def whole_answer(node: Node, data: bytes) -> bytes:
    """Send, end our side, and read until the bus has closed."""
    async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as peer:
        await peer.send(data)
        peer.send_eof()
        return await peer.read_to_end()
