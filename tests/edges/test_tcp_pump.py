"""The pump: what it reads in one turn.

Each test runs on the compiled pump and on its source.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any, cast

import pytest
from edge_kit import TIMEOUT_S, frame, line, open_connections, until
from pump_kit import name_of, peers, pump, send_together, sockets_of, stored, transports_of

from polybus import scan
from polybus.edges.node import Node
from polybus.edges.tcp import pump as installed
from polybus.edges.tcp import window
from polybus.edges.tcp.connection import Connection
from polybus.testing import ScriptedPeer, run_bus

__all__ = ["pump"]


def test_the_compiled_pump_is_installed() -> None:
    assert scan.COMPILED == (not installed.__file__.endswith(".py"))


async def test_messages_of_one_turn_keep_their_senders_and_reach_subscribers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_bus("news") as node, peers(node, 20) as found:
        async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as subscriber:
            await subscriber.send(frame("$subscribe", b"news tell=position"))
            await subscriber.read_frame()
            calls: list[int] = []
            append_all = node.bus.log.append_all

            def counted(batches: Any, **options: Any) -> int:
                calls.append(len(batches))
                return append_all(batches, **options)

            monkeypatch.setattr(node.bus.log, "append_all", counted)
            values = [b"from %d" % number for number in range(20)]
            send_together(node, found, [frame("news", value) for value in values])
            got = [await subscriber.read_frame() for _ in values]
            assert sorted(content for _, content in got) == sorted(values)
            assert max(calls) > 1, "they were not published together"
            names = [name_of(one) for one in sockets_of(found)]
            rows = await stored(node, "news", 20)
            assert sorted(rows) == sorted(zip(values, names, strict=True))
            assert [value for value, _ in rows] == [content for _, content in got]


async def test_receipts_and_refusals_of_one_turn_go_to_their_publishers() -> None:
    async with run_bus("news", "other") as node, peers(node, 6) as found:
        messages = [
            frame("news?receipt=a", b"a"),
            frame("nowhere", b"b"),
            frame("other?receipt=c", b"c"),
            frame("news", b"d") + frame("news?receipt=e", b"e"),
            frame("$unsubscribe", b""),
            frame("nowhere?receipt=f", b"f") + frame("news?receipt=g", b"g"),
        ]
        # The scan knows these topics from now on.
        for _ in range(2):
            send_together(node, found, messages)
            answers = [await found[index].read_frame() for index in (0, 1, 2, 3)]
            kinds = [topic for topic, _ in answers]
            assert kinds == ["$receipt", "$error", "$receipt", "$receipt"]
            assert [content.split()[0] for _, content in answers] == [
                b"a",
                b"topic.unknown",
                b"c",
                b"e",
            ]
            both = sorted([(await found[5].read_frame())[1].split()[0] for _ in range(2)])
            assert both == [b"g", b"topic.unknown"]


async def test_bytes_cut_anywhere_are_the_same_messages_beside_others() -> None:
    async with run_bus("news") as node, peers(node, 3) as found:
        stream = b"".join(frame("news", b"%d" % number * (number % 50)) for number in range(200))
        cuts = [*range(0, len(stream), 37), len(stream)]
        for start, stop in zip(cuts, cuts[1:], strict=False):
            send_together(node, found, [frame("news", b"x"), stream[start:stop], frame("news")])
            await asyncio.sleep(0)
        name = name_of(sockets_of(found)[1])
        count = 200 + 2 * (len(cuts) - 1)
        rows = await stored(node, "news", count)
        mine = [value for value, sender in rows if sender == name]
        assert mine == [b"%d" % number * (number % 50) for number in range(200)]


async def test_small_reads_of_a_turn_are_handled_before_large_ones() -> None:
    async with run_bus("news") as node, peers(node, 3) as found:
        large = b"".join(frame("news", b"large") for _ in range(2000))
        messages = [large, frame("news", b"small"), frame("news", b"small")]
        send_together(node, found, messages)
        rows = await stored(node, "news", 2002)
        values = [value for value, _ in rows]
        assert values[:2] == [b"small", b"small"]
        assert values[2:] == [b"large"] * 2000


async def test_reads_beside_a_peer_of_single_messages_are_smaller_than_beside_other_floods(
    pump: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single message waits for little of a flood; floods beside each other are read faster."""
    # However slow the machine is, these peers send at the same time.
    monkeypatch.setattr(pump, "SHARED_S", 60.0)
    large = frame("news", b"x" * 1000) * 150
    async with run_bus("news", durability="memory") as node, peers(node, 2) as found:
        read: list[int] = []
        append_all = node.bus.log.append_all

        def noted(batches: Any, **options: Any) -> int:
            flood = name_of(sockets_of(found)[0])
            read.append(sum(batch.value_bytes for batch in batches if batch.sender == flood))
            return append_all(batches, **options)

        monkeypatch.setattr(node.bus.log, "append_all", noted)
        # Too few small reads: each may have been the end of a larger write.
        for number in range(2):
            await found[1].send(frame(f"news?receipt={number}", b""))
            await found[1].read_frame()
        send_together(node, found, [large, large])
        await stored(node, "news", 304)
        assert pump.BESIDE_SINGLE_BYTES < max(read) <= pump.SHARED_READ_BYTES
        for number in range(4):
            await found[1].send(frame(f"news?receipt={number}", b""))
            await found[1].read_frame()
        read.clear()
        send_together(node, found, [large, frame("news", b"")])
        await stored(node, "news", 459)
        assert 0 < max(read) <= pump.BESIDE_SINGLE_BYTES + len(frame("news", b"x" * 1000))
        assert sum(read) == 150 * 1000


@contextlib.asynccontextmanager
async def flooding(
    node: Node, found: list[ScriptedPeer], *, stored: int = 0
) -> AsyncIterator[None]:
    """The first peer writes single messages as fast as it can, and is gathered.

    The topic has as many messages as peers before, and `stored` more.
    """
    (transport, *_) = transports_of(node, found)
    is_over = False

    def flood() -> int:
        with socket.socket(fileno=os.dup(sockets_of(found)[0].fileno())) as raw:
            raw.setblocking(True)
            count = 0
            while not is_over:
                raw.sendall(frame("news", b"x"))
                count += 1
            return count

    flooded = asyncio.create_task(asyncio.to_thread(flood))
    try:
        await until(lambda: transport.is_gathering)
        yield
    finally:
        is_over = True
        count = await flooded
    await until(lambda: node.bus.log.bounds("news").stop == count + len(found) + stored)
    await until(lambda: not transport.is_gathering)


@pytest.fixture
def gathers_soon(pump: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # A writer in this process is slow.
    monkeypatch.setattr(pump, "GATHER_S", 1e-2)
    monkeypatch.setattr(pump, "SMALL_MESSAGES_MAX", 20)


@pytest.mark.usefixtures("gathers_soon")
async def test_a_writer_of_single_messages_is_gathered_and_who_sends_seldom_never() -> None:
    """Whoever floods is read at intervals; a peer that sends once in a while at once."""
    async with run_bus("news", "calm", durability="memory") as node, peers(node, 2) as found:
        _, calm = transports_of(node, found)
        async with flooding(node, found):
            for _ in range(20):
                await found[1].send(frame("calm?receipt=1", b""))
                await found[1].read_frame()
                assert not calm.is_gathering
                # Everybody's first message of a tick is read at once.
                await asyncio.sleep(0.025)
        await found[0].send(frame("news?receipt=2", b""))
        assert (await found[0].read_frame())[0] == "$receipt"


@pytest.mark.usefixtures("gathers_soon")
async def test_who_waits_for_each_receipt_beside_a_flood_is_gathered_once_and_gets_all() -> None:
    """Its second message of a tick waits for the end of the tick; that brought one, so no more."""
    async with run_bus("news", "calm", durability="memory") as node, peers(node, 2) as found:
        _, busy = transports_of(node, found)
        number = 0

        async def ask() -> None:
            nonlocal number
            await found[1].send(frame(f"calm?receipt={number}", b""))
            assert (await found[1].read_frame())[1].startswith(b"%d " % number)
            number += 1

        async with flooding(node, found):
            async with asyncio.timeout(TIMEOUT_S):
                while not busy.is_gathering:
                    await ask()
            await until(lambda: not busy.is_gathering)
            for _ in range(50):
                await ask()
                assert not busy.is_gathering
        await until(lambda: not busy.is_gathering)
        assert node.bus.log.bounds("calm").stop == number


def receive_bytes(transport: Any) -> int:
    found: int = transport.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return found


@pytest.mark.usefixtures("gathers_soon")
async def test_a_writer_of_single_messages_has_a_narrow_window_until_it_writes_much_at_once(
    pump: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_bus("news", durability="memory") as node, peers(node, 1) as found:
        (transport,) = transports_of(node, found)
        async with flooding(node, found):
            sizes = range(2 * window.NARROW_BYTES, window.OFFERED_MAX + 1)
            assert transport.is_narrow and receive_bytes(transport) in sizes
        monkeypatch.setattr(pump, "BULK_BYTES", 1 << 20)
        bulk = frame("news", b"x" * 1000) * 2000
        await found[0].send(bulk + frame("news?receipt=1", b""))
        await found[0].read_frame()
        assert not transport.is_narrow and receive_bytes(transport) > window.OFFERED_MAX
        assert node.bus.log.bounds("news").stop > 2000


@pytest.mark.usefixtures("gathers_soon")
async def test_a_window_that_has_grown_is_not_narrowed() -> None:
    """What the peer was offered already would be dropped."""
    async with run_bus("news", durability="memory") as node, peers(node, 1) as found:
        (transport,) = transports_of(node, found)
        # Linux lets a window grow with what its application reads; this is as large.
        window.widen(transport.socket)
        bulk = frame("news", b"x" * 1000) * 20_000
        await found[0].send(bulk + frame("news?receipt=1", b""))
        await found[0].read_frame()
        before = receive_bytes(transport)
        stop = node.bus.log.bounds("news").stop
        async with flooding(node, found, stored=stop - 1):
            assert not transport.is_narrow
            assert receive_bytes(transport) >= before > window.OFFERED_MAX


@pytest.mark.usefixtures("gathers_soon")
async def test_a_gathered_peer_that_brings_much_is_read_on_at_once(
    pump: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes next is gathered already: there is no further tick, which would bring nothing."""
    # The bulk comes within the tick, however slow the machine is.
    monkeypatch.setattr(pump, "GATHER_S", 0.3)
    async with run_bus("news", "calm", durability="memory") as node, peers(node, 2) as found:
        _, transport = transports_of(node, found)
        async with flooding(node, found):
            async with asyncio.timeout(TIMEOUT_S):
                while not transport.is_gathering:
                    await found[1].send(frame("calm?receipt=1", b""))
                    await asyncio.sleep(0)
            bulk = frame("calm", b"x" * 1000) * 40
            assert len(bulk) > window.NARROW_BYTES
            await found[1].send(bulk)
            await until(lambda: not transport.is_gathering)
            assert transport.exempt_until == 0


def test_a_peer_of_another_machine_keeps_its_window() -> None:
    """A narrow window would slow it down by the time to it and back."""

    class FarSocket(socket.socket):
        def getpeername(self) -> Any:
            return "192.0.2.7", 4000

        def getsockname(self) -> Any:
            return "192.0.2.8", 55545

    nameless, other = socket.socketpair()
    with FarSocket() as far, nameless, other:
        for one in (far, nameless):
            before = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert not window.narrow(one)
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == before


async def test_layers_and_other_protocols_share_a_turn_with_plain_frames() -> None:
    async with run_bus("news") as node, peers(node, 2) as found:
        async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as goms:
            await goms.send(line("register", topics=["news"], ack=True))
            await goms.read_line()
            every = [*found, goms]
            sent = [
                frame("news", b"a"),
                frame("news", b"b"),
                line("send", topics=["news"], data="c"),
            ]
            send_together(node, every, sent)
            rows = await stored(node, "news", 3)
            assert sorted(value for value, _ in rows) == [b"a", b"b", b"c"]
            got = sorted([(await goms.read_line()) for _ in range(2)])
            assert [b'"data":"a"' in got[0], b'"data":"b"' in got[1]] == [True, True]


async def test_a_message_that_nobody_subscribes_to_is_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_bus("news") as node, peers(node, 1) as found:
        (connection,) = open_connections(node)

        def encode(*_: object) -> bytes:
            raise AssertionError("encoded for nobody")

        monkeypatch.setattr(type(connection.translator), "encode", encode)
        await found[0].send(frame("news?receipt=a", b"a"))
        assert (await found[0].read_frame())[0] == "$receipt"


async def test_who_takes_reads_first_leaves_the_others_to_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Picky(sys.modules["polybus.edges.tcp.transport"].ReadInterceptor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.taken: list[bytes] = []

        def take(self, data: bytes, start: int, stop: int) -> bool:
            piece = data[start:stop]
            if piece == b"bad":
                raise ValueError
            if piece.startswith(b"mine"):
                self.taken.append(piece)
            return piece.startswith(b"mine")

    async with run_bus("news") as node, peers(node, 4) as found:
        picky = Picky()
        connections = {one.name: cast(Connection, one) for one in node.tcp.connections}
        for one in sockets_of(found)[:3]:
            connections[name_of(one)].intercept_reads(picky)
        messages = [b"mine 1", frame("news?receipt=a", b"a"), b"bad", frame("news?receipt=b", b"b")]

        send_together(node, found, messages)

        for index, name in ((1, b"a"), (3, b"b")):
            topic, content = await found[index].read_frame()
            assert (topic, content.split()[0]) == ("$receipt", name)
        assert await found[2].read_to_end() == b""
        assert picky.taken == [b"mine 1"]
        assert "an error in a connection" in caplog.text
        await found[0].send(frame("news?receipt=c", b"c"))
        assert (await found[0].read_frame())[0] == "$receipt"
