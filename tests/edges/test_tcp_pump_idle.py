"""The pump: ten thousand idle sockets cost the others nothing.

Each test runs on the compiled pump and on its source.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from types import FrameType, ModuleType
from typing import Any

import pytest
from edge_kit import TIMEOUT_S, frame, until
from pump_kit import peers, pump

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus

__all__ = ["pump"]

IDLE = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 500)
ROUNDS = 30
# A process of its own: one cannot have both ends of this many sockets open.
PROGRAM = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
port, count, first = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
held = []
for _ in range(count):
    held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
    held[-1].sendall(first)
print("open", flush=True)
sys.stdin.read()
"""


@contextlib.asynccontextmanager
async def idle_peers(node: Node, count: int) -> AsyncIterator[None]:
    """Peers that have subscribed to a topic without messages, and say no more."""
    first = frame("$subscribe", b"silent").hex()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        *(str(node.tcp_port), str(count), first),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"open\n"
        await until(lambda: len(node.bus.topic("silent").subscribers) == count)
        yield
    finally:
        child.kill()
        # The pipes of the child are closed with it.
        await child.communicate()


async def least_work(peer: ScriptedPeer) -> int:
    """The fewest calls that one request and its receipt took, with those of the peer itself."""
    least = sys.maxsize
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    for number in range(ROUNDS):
        calls = 0
        sys.setprofile(count)
        try:
            await peer.send(frame(f"news?receipt={number}", b""))
            assert (await peer.read_frame())[1].startswith(b"%d " % number)
        finally:
            sys.setprofile(None)
        least = min(least, calls)
    return least


@pytest.mark.slow
async def test_ten_thousand_idle_sockets_add_no_work_to_a_message(
    pump: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the calls for a message nor the sockets that are read depend on who is idle."""
    reads = 0
    if pump.__file__ is not None and pump.__file__.endswith(".py"):
        receive = pump.receive

        def counted(*arguments: Any) -> int:
            nonlocal reads
            reads += 1
            return int(receive(*arguments))

        monkeypatch.setattr(pump, "receive", counted)
    settings: dict[str, Any] = {"durability": "memory"}
    settings["limits"] = {"account-connections-max": IDLE + 500}
    async with run_bus("news", "silent", **settings) as node, peers(node, 1) as (peer,):
        reads = 0
        alone = await least_work(peer)
        reads_alone = reads
        async with idle_peers(node, IDLE):
            reads = 0
            beside = await least_work(peer)
            assert reads <= reads_alone + ROUNDS, "idle sockets are read"
            # Timers may run beside a round, but not in all of them.
            assert beside <= alone * 1.2
        await until(lambda: len(node.tcp.connections) == 1, timeout_s=4 * TIMEOUT_S)
        assert await least_work(peer) <= alone * 1.2
