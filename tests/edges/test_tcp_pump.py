"""The pump: what it reads in one turn, and what hostile peers do to the others.

Each test runs on the compiled pump and on its source.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any, cast

import pytest
from edge_kit import TIMEOUT_S, frame, line, open_connections, until

from polybus import scan
from polybus.edges.node import Node
from polybus.edges.tcp import pump as installed
from polybus.edges.tcp import shared
from polybus.edges.tcp.buffers import ReadBuffers
from polybus.edges.tcp.connection import Connection
from polybus.scan import plain
from polybus.testing import ScriptedPeer, run_bus
from polybus.wire.boson_frames import BosonFramesCodec

MEBI = 1 << 20


@pytest.fixture(params=["installed", "source"], autouse=True)
def pump(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    chosen = installed
    if request.param == "source":
        tcp = "polybus.edges.tcp"
        for name in (f"{tcp}.transport", f"{tcp}.handling", installed.__name__):
            chosen = plain.from_source(name)
            monkeypatch.setitem(sys.modules, name, chosen)
    monkeypatch.setattr(shared, "Pump", chosen.Pump)
    yield chosen


def test_the_compiled_pump_is_installed() -> None:
    assert scan.COMPILED == (not installed.__file__.endswith(".py"))


@contextlib.asynccontextmanager
async def peers(node: Node, count: int) -> AsyncIterator[list[ScriptedPeer]]:
    """Peers whose protocol is known, and whose topic was seen before."""
    async with contextlib.AsyncExitStack() as stack:
        found = [ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) for _ in range(count)]
        for peer in found:
            await stack.enter_async_context(peer)
            await peer.send(frame("news?receipt=hello", b"hello"))
            await peer.read_frame()
        yield found


def sockets_of(found: list[ScriptedPeer]) -> list[socket.socket]:
    return [peer._writer.get_extra_info("socket") for peer in found]


def name_of(one: socket.socket) -> str:
    return f"127.0.0.1:{one.getsockname()[1]}"


def send_together(node: Node, found: list[ScriptedPeer], messages: list[bytes]) -> None:
    """Let all messages arrive before the loop goes on: the pump reads them in one turn."""
    for one, message in zip(sockets_of(found), messages, strict=True):
        assert os.write(one.fileno(), message) == len(message)


async def stored(node: Node, topic: str, count: int) -> list[tuple[bytes, str]]:
    """Value and sender of a topic's last messages."""
    await until(lambda: node.bus.log.bounds(topic).stop >= count)
    await asyncio.to_thread(node.bus.log.sync)
    rows: list[tuple[bytes, str]] = []
    offset = node.bus.log.bounds(topic).stop - count
    while len(rows) < count:
        for batch in node.bus.log.read(topic, offset):
            senders = [batch.sender] * len(batch)
            if batch.stored is not None:
                senders = batch.stored.column("sender").to_pylist()
            rows += zip(batch.values(), senders, strict=True)
            offset = batch.last_offset + 1
    return rows


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


async def test_a_writer_of_single_messages_is_gathered_and_nobody_else_waits(
    pump: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever floods is read at intervals; a peer beside it at once, at any time."""
    # A writer in this process is slow.
    monkeypatch.setattr(pump, "GATHER_S", 1e-2)
    monkeypatch.setattr(pump, "SMALL_MESSAGES_MAX", 20)
    async with run_bus("news", "calm", durability="memory") as node, peers(node, 2) as found:
        flooding, calm = transports_of(node, found)
        is_over = False

        def flood() -> int:
            (one, _) = sockets_of(found)
            with socket.socket(fileno=os.dup(one.fileno())) as raw:
                raw.setblocking(True)
                count = 0
                while not is_over:
                    raw.sendall(frame("news", b"x"))
                    count += 1
                return count

        flooded = asyncio.create_task(asyncio.to_thread(flood))
        try:
            await until(lambda: flooding.is_gathering)
            for _ in range(20):
                await found[1].send(frame("calm?receipt=1", b""))
                await found[1].read_frame()
                assert not calm.is_gathering
                # Everybody's first message of a tick is read at once.
                await asyncio.sleep(0.025)
        finally:
            is_over = True
        count = await flooded
        await until(lambda: node.bus.log.bounds("news").stop == count + 2)
        await until(lambda: not flooding.is_gathering)
        await found[0].send(frame("news?receipt=2", b""))
        assert (await found[0].read_frame())[0] == "$receipt"


def transports_of(node: Node, found: list[ScriptedPeer]) -> list[Any]:
    by_name = {one.name: one.transport for one in open_connections(node)}
    return [by_name[name_of(one)] for one in sockets_of(found)]


async def test_floods_of_all_kinds_leave_others_their_turn() -> None:
    """One floods in large writes, one in single ones, one sends byte by byte, one never reads."""
    settings: dict[str, Any] = {"slow-subscriber": "disconnect", "durability": "memory"}
    async with run_bus("news", "calm", **settings) as node, peers(node, 4) as found:
        is_over = False

        def flood(one: socket.socket, data: bytes) -> None:
            with socket.socket(fileno=os.dup(one.fileno())) as raw:
                raw.setblocking(True)
                with contextlib.suppress(OSError):
                    while not is_over:
                        raw.sendall(data)

        async def trickle() -> None:
            while not is_over:
                for byte in frame("news", b"slow"):
                    os.write(sockets_of(found)[2].fileno(), bytes([byte]))
                    await asyncio.sleep(0)

        await found[3].send(frame("$subscribe", b"news"))
        large = frame("news", b"x" * 100) * 2000
        sockets = sockets_of(found)
        floods = [
            asyncio.create_task(asyncio.to_thread(flood, sockets[0], large)),
            asyncio.create_task(asyncio.to_thread(flood, sockets[1], frame("news", b"y"))),
            asyncio.create_task(trickle()),
        ]
        try:
            async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as calm:
                for number in range(50):
                    await calm.send(frame(f"calm?receipt={number}", b""))
                    assert (await calm.read_frame())[1].startswith(b"%d " % number)
        finally:
            is_over = True
            await asyncio.gather(*floods)


async def test_a_peer_that_is_gone_while_it_is_not_read_from_is_noticed_later() -> None:
    """A reset of a paused connection neither spins the loop nor ends it before it is read."""
    async with run_bus("news") as node, peers(node, 1) as found:
        (transport,) = transports_of(node, found)
        (one,) = sockets_of(found)
        (connection,) = open_connections(node)
        connection.hold("test")
        os.write(one.fileno(), frame("news", b"last"))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        found[0]._writer.transport.abort()
        await asyncio.sleep(0.05)
        assert node.tcp.connections
        connection.release("test")
        await until(lambda: not node.tcp.connections)
        assert transport.is_closing()
        assert node.bus.log.bounds("news").stop == 2


async def test_an_error_of_ours_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_bus("news") as node, peers(node, 3) as found:
        scan_plain = BosonFramesCodec.scan_plain

        def fails(self: BosonFramesCodec, data: Any, start: int, stop: int) -> Any:
            if b"bad" in bytes(data[start:stop]):
                raise RuntimeError("a bug")
            return scan_plain(self, data, start, stop)

        monkeypatch.setattr(BosonFramesCodec, "scan_plain", fails)
        with caplog.at_level(logging.ERROR, "polybus.tcp"):
            send_together(node, found, [frame("news", b"bad"), *[frame("news?receipt=1")] * 2])
            assert await found[0].read_to_end() == b""
        assert "a bug" in caplog.text
        for peer in found[1:]:
            assert (await peer.read_frame())[0] == "$receipt"


async def test_a_slow_reader_gets_everything_after_partial_writes() -> None:
    async with run_bus("news", **{"slow-subscriber": "wait"}) as node, peers(node, 1) as found:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        with slow:
            await loop.sock_connect(slow, ("127.0.0.1", node.tcp_port))
            await loop.sock_sendall(slow, frame("$subscribe", b"news tell=position"))
            epoch = node.bus.log.bounds("news").epoch
            position = frame("$position", b"%d:1 news" % epoch)
            assert await loop.sock_recv(slow, len(position)) == position
            values = [bytes([number]) * (MEBI // 2) for number in range(8)]

            async def publish() -> None:
                for value in values:
                    await found[0].send(frame("news", value))

            publishing = asyncio.create_task(publish())
            expected = b"".join(frame("news", value) for value in values)
            got = b""
            while len(got) < len(expected):
                async with asyncio.timeout(TIMEOUT_S):
                    got += await loop.sock_recv(slow, 1 << 16)
            assert got == expected
            await publishing


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


async def test_a_publisher_whose_reads_end_within_messages_is_not_too_slow() -> None:
    async with run_bus("news", limits={"message-timeout-s": 0.5}) as node, peers(node, 1) as found:
        stream = frame("news", b"x" * 93) * 30
        size = len(frame("news", b"x" * 93))
        # Each part ends 40 bytes into a message.
        await found[0].send(stream[:40])
        for at in range(40, len(stream) - size, size):
            await found[0].send(stream[at : at + size])
            await asyncio.sleep(0.05)
        await found[0].send(stream[at + size :])
        await until(lambda: node.bus.log.bounds("news").stop == 31)


async def test_every_flood_is_read_when_the_buffer_is_full(
    pump: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "ReadBuffers", lambda: ReadBuffers(256 << 10))
    async with run_bus("news", durability="memory") as node, peers(node, 5) as found:
        is_over = False
        large = frame("news", b"x" * 1000) * 200

        def flood(one: socket.socket) -> None:
            with socket.socket(fileno=os.dup(one.fileno())) as raw:
                raw.setblocking(True)
                with contextlib.suppress(OSError):
                    while not is_over:
                        raw.sendall(large)

        floods = [asyncio.create_task(asyncio.to_thread(flood, one)) for one in sockets_of(found)]
        try:
            names = {name_of(one) for one in sockets_of(found)}
            seen: set[str] = set()
            append_all = node.bus.log.append_all

            def noted(batches: Any, **options: Any) -> int:
                seen.update(batch.sender for batch in batches)
                return append_all(batches, **options)

            monkeypatch.setattr(node.bus.log, "append_all", noted)
            await until(lambda: seen >= names)
        finally:
            is_over = True
            await asyncio.gather(*floods)


async def test_a_small_message_keeps_little_in_memory_beside_a_large_read(
    pump: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_bus("news", "calm", durability="memory") as node, peers(node, 3) as found:
        await found[1].send(frame("calm?receipt=1", b""))
        await found[1].read_frame()
        kept: list[int] = []
        append_all = node.bus.log.append_all

        def noted(batches: Any, **options: Any) -> int:
            kept.extend(
                memoryview(getattr(batch.buffer, "obj", batch.buffer)).nbytes
                for batch in batches
                if batch.topic == "calm"
            )
            return append_all(batches, **options)

        monkeypatch.setattr(node.bus.log, "append_all", noted)
        large = frame("news", b"x" * 1000) * 60
        send_together(node, found, [large, frame("calm", b"y"), large])
        await until(lambda: kept)
        assert max(kept) <= pump.CHUNK_BYTES


async def test_a_slow_subscriber_holds_only_the_publishers_of_its_topics() -> None:
    settings: dict[str, Any] = {"slow-subscriber": "wait"}
    limits = {"outbox-bytes-max": 1 << 16}
    async with run_bus("news", "calm", limits=limits, **settings) as node, peers(node, 3) as found:
        await found[2].send(frame("$subscribe", b"news tell=position"))
        await found[2].read_frame()
        found[2]._writer.transport.pause_reading()  # type: ignore[attr-defined]
        loud, calm, _ = (one for one in sorted(open_connections(node), key=_order(found)))
        for _ in range(2000):
            if loud._held_by:
                break
            os.write(sockets_of(found)[0].fileno(), frame("news", b"x" * 8000))
            await asyncio.sleep(0)
        for _ in range(20):
            send_together(node, found[:2], [frame("news", b"x"), frame("calm?receipt=1", b"y")])
            assert (await found[1].read_frame())[0] == "$receipt"
            assert not calm._held_by
        found[2]._writer.transport.resume_reading()  # type: ignore[attr-defined]


def _order(found: list[ScriptedPeer]) -> Any:
    names = [name_of(one) for one in sockets_of(found)]
    return lambda connection: names.index(connection.name)


async def test_receipts_of_equal_addresses_go_to_their_own_connections() -> None:
    """Connections of two connectors may have the same address and port of the client."""
    async with run_bus("news") as node, peers(node, 2) as found:
        one, other = sorted(open_connections(node), key=_order(found))
        other.name = one.name
        for number in range(5):
            ids = [b"%d-a" % number, b"%d-b" % number]
            send_together(node, found, [frame(b"news?receipt=" + each) for each in ids])
            for peer, each in zip(found, ids, strict=True):
                assert (await peer.read_frame())[1].split()[0] == each


async def test_an_error_while_writing_to_a_peer_costs_nobody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_bus("news") as node, peers(node, 3) as found:
        for peer in found[:2]:
            await peer.send(frame("$subscribe", b"news tell=position"))
            await peer.read_frame()
        bad, _, _ = sorted(open_connections(node), key=_order(found))

        def fails(_: Any) -> None:
            raise RuntimeError("a bug")

        bad.outbox.write_through(fails)
        with caplog.at_level(logging.ERROR, "polybus.tcp"):
            for value in (b"1", b"2"):
                await found[2].send(frame("news?receipt=1", value))
                assert (await found[2].read_frame())[0] == "$receipt"
                assert await found[1].read_frame() == ("news", value)
        assert "a bug" in caplog.text


async def test_a_topic_that_freezes_after_its_delivery_is_refused_to_the_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_bus("news") as node, peers(node, 2) as found:
        subscribers_of = node.bus.subscribers_of

        def freeze(batches: Any) -> Any:
            subscribers = subscribers_of(batches)
            node.bus.log.freeze("news", "found just now")
            return subscribers

        monkeypatch.setattr(node.bus, "subscribers_of", freeze)
        send_together(node, found, [frame("news?receipt=a", b"a"), frame("news?receipt=b", b"b")])
        for peer in found:
            topic, content = await peer.read_frame()
            assert (topic, content.split()[0]) == ("$error", b"log.frozen")


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


async def test_a_peer_of_the_admin_socket_that_is_gone_while_it_is_written_to_is_noticed() -> None:
    """A closed Unix socket reports a hang-up, and perhaps nothing else."""
    async with run_bus("news") as node:
        path = json.loads((node.data / "run.json").read_text())["admin"]
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            await asyncio.get_running_loop().sock_connect(peer, path)
            await until(lambda: open_connections(node) != [])
            (connection,) = open_connections(node)
            transport = connection.transport
            assert transport is not None
            transport.pause_reading()
            transport.write(bytes(4 * MEBI))
        await until(transport.is_closing)


async def test_who_takes_reads_first_leaves_the_others_to_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Picky(sys.modules["polybus.edges.tcp.transport"].Taker):  # type: ignore[misc]
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
            connections[name_of(one)].hand_reads_to(picky)
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
