"""The pump: what slow, flooding and failing peers do to the others.

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
from types import ModuleType
from typing import Any

import pytest
from edge_kit import TIMEOUT_S, frame, open_connections, until
from pump_kit import name_of, peers, pump, send_together, sockets_of, transports_of

from polybus.edges.tcp.buffers import ReadBuffers
from polybus.testing import ScriptedPeer, run_bus
from polybus.wire.boson_frames import BosonFramesCodec

__all__ = ["pump"]

MEBI = 1 << 20


def _order(found: list[ScriptedPeer]) -> Any:
    names = [name_of(one) for one in sockets_of(found)]
    return lambda connection: names.index(connection.name)


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
        topics_alike = node.bus.topics_alike

        def freeze(batches: Any, access: Any) -> Any:
            topics = topics_alike(batches, access)
            node.bus.log.freeze("news", "found just now")
            return topics

        monkeypatch.setattr(node.bus, "topics_alike", freeze)
        send_together(node, found, [frame("news?receipt=a", b"a"), frame("news?receipt=b", b"b")])
        for peer in found:
            topic, content = await peer.read_frame()
            assert (topic, content.split()[0]) == ("$error", b"log.frozen")


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
