"""No connection leaves a reference cycle behind: `polybus serve` hardly ever looks for cycles.

The clients are plain sockets on a thread, which make no cycles themselves. So with the collector
off, everything it finds afterwards was left behind by the bus.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import pytest
from cycles_kit import LARGE_FRAME, SCENARIOS, TLS, Bus, Scenario, new_session, talk
from edge_kit import frame, until
from uvloop import new_event_loop

from polybus.edges.http.upper import Upper
from polybus.edges.node import Node
from polybus.edges.protocols.translator import Translator
from polybus.edges.tcp.connection import Connection
from polybus.edges.tcp.outbox import Outbox
from polybus.edges.udp import UdpPeer
from polybus.services.accounts import accounts, throttle
from polybus.testing import run_bus

ROUNDS = 5
# The bus closes a connection after this many bytes of head, or of waiting messages.
SETTINGS: dict[str, Any] = {
    "http": {"head-bytes-max": 4096},
    "limits": {"outbox-bytes-max": 1 << 16, "connections-max": 8},
    "msgstream": {"websocket-message-bytes-max": 4096},
}
CONNECTORS = [
    {"protocol": "tcp", "port": 0},
    {"protocol": "udp", "port": 0, "speaks": "goms"},
    {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "news"},
    {
        "protocol": "tcp",
        "port": 0,
        "tls": {"cert": str(TLS / "cert.pem"), "key": str(TLS / "key.pem")},
    },
]
SERVING = (
    *("polybus.edges.", "polybus.services.", "polybus.bus.", "polybus.wire.", "polybus.scan."),
    *("uvicorn.", "websockets.", "uvloop.", "asyncio.", "ssl."),
)
# What asyncio leaves of each process that ends, as that of an export which is interrupted.
OF_A_PROCESS = (
    *("asyncio.subprocess.SubprocessStreamProtocol", "asyncio.streams.StreamReader"),
    "asyncio.streams.StreamWriter",
)
PARTS = (Connection, Outbox, Translator, Upper, UdpPeer)

World = tuple[asyncio.Runner, Node, Bus]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One bus for all scenarios, on the loop of `polybus serve`."""
    bus = run_bus("news", "flood", "large", "quiet", connectors=CONNECTORS, **SETTINGS)
    with (
        asyncio.Runner(loop_factory=new_event_loop) as runner,
        pytest.MonkeyPatch.context() as patch,
    ):
        for module in (accounts, throttle):
            patch.setattr(module, "DELAY_S_MIN", 0.0)
        # What already exists is of no interest, and takes the collector long.
        gc.collect()
        gc.freeze()
        node = runner.run(bus.__aenter__())
        runner.run(node.accounts.set_password("default", "right"))
        tcp, udp, queue, tls = (int(one.rpartition(":")[2]) for one in node.addresses)
        ports = Bus(tcp, udp, queue, tls)
        runner.run(asyncio.to_thread(prepare, ports))
        yield runner, node, ports
        runner.run(bus.__aexit__(None, None, None))


def prepare(bus: Bus) -> None:
    bus.key = new_session(bus, '{"topics":["news"]}')
    talk(bus.tcp, frame("news?receipt=1", b"first"), until=b"$receipt")
    for _ in range(8):
        talk(bus.tcp, frame("large?receipt=1", bytes(1 << 20)), until=b"$receipt")
    talk(bus.tcp, LARGE_FRAME, until=b"$receipt")


async def left_behind(
    node: Node, bus: Bus, scenario: Scenario, round_count: int = ROUNDS
) -> Counter[str]:
    """What the collector finds after some rounds, by type; only what each round leaves."""

    async def rounds(count: int) -> None:
        for _ in range(count):
            await asyncio.to_thread(scenario, bus)
        await until(lambda: not node.tcp.connections)

    await rounds(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    found: Counter[str] = Counter()
    try:
        await rounds(round_count)
        # Requests under way and timers may keep a connection for some turns of the loop.
        await until(lambda: not count_garbage(found))
    finally:
        gc.enable()
    return Counter({name: count for name, count in found.items() if count >= round_count})


def count_garbage(found: Counter[str]) -> int:
    """Add what only the collector finds; return how many parts of connections are still in use."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found.update(filter(None, map(of_a_connection, gc.garbage)))
    gc.garbage.clear()
    gc.collect()
    return sum(isinstance(one, PARTS) for one in gc.get_objects())


def of_a_connection(one: Any) -> str | None:
    """The name of what a connection may have left; None for garbage of other threads.

    A connection's cycle has an object or a frame of the bus in it, or of what it serves with.
    """
    if isinstance(one, TracebackType):
        one = one.tb_frame
    if isinstance(one, FrameType):
        name = f"{one.f_globals.get('__name__')}.{one.f_code.co_name}"
    else:
        name = f"{getattr(one, '__module__', None)}.{type(one).__qualname__}"
    return name if name.startswith(SERVING) and name not in OF_A_PROCESS else None


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_connection_leaves_no_cycle(world: World, name: str) -> None:
    """Nor does anything else keep it: it is gone soon after its socket."""
    runner, node, bus = world
    # Each of these ends a process of the bus, and the next one has to start.
    round_count = 2 if name == "http, export interrupted" else ROUNDS
    assert not runner.run(left_behind(node, bus, SCENARIOS[name], round_count))
