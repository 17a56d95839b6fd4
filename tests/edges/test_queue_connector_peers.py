"""Peers of a queue connector that break its rules, leave, or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from edge_kit import FRAMES, NO_HEADERS, TIMEOUT_S, is_alive, open_connections, until
from queue_connector_kit import bridged, message, queue, queues_of, stored

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer

# Bad peers


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (-1, "queue.length-negative"),
        (-(1 << 31), "queue.length-negative"),
        (1001, "queue.message-too-large"),
        ((1 << 31) - 1, "queue.message-too-large"),
    ],
)
async def test_an_impossible_length_closes_the_connection_and_is_counted(
    length: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "polybus.peers")
    async with bridged("alive", limits={"message-bytes-max": 1000}) as (node, port):
        async with queue(node, port) as other, queue(node, port) as peer:
            await peer.send(message(b"good") + struct.pack(">i", length) + message(b"never"))
            # No error can be reported on a queue, and nothing comes before the end.
            assert await peer.read_to_end() == b""
            assert await other.read(8) == message(b"good")
            await until(lambda: len(queues_of(node)) == 1)
        assert node.bad_peers.counts[code] == 1
        assert stored(node) == [b"good"]
        assert f"(queue): {code}: " in caplog.text
        assert await is_alive(node) < 5


async def test_a_message_of_exactly_the_limit_passes() -> None:
    async with bridged(limits={"message-bytes-max": 1000}) as (node, port):
        async with queue(node, port) as reader, queue(node, port) as writer:
            await writer.send(message(b"x" * 1000))
            assert await reader.read(1004) == message(b"x" * 1000)


async def test_a_length_that_nothing_follows_takes_no_memory_and_is_ended_in_time() -> None:
    async with bridged(limits={"message-timeout-s": 0.5}) as (node, port):
        async with queue(node, port) as peer:
            await peer.send(struct.pack(">i", 60 << 20))
            assert await peer.read_to_end() == b""
        assert node.bad_peers.counts["peer.too-slow"] == 1
        assert stored(node) == []


async def test_a_peer_that_leaves_inside_a_message_leaves_nothing_behind() -> None:
    async with bridged() as (node, port):
        async with queue(node, port) as peer:
            await peer.send(message(b"whole") + struct.pack(">i", 10) + b"half")
            await until(lambda: stored(node) == [b"whole"])
        await until(lambda: not queues_of(node))
        assert stored(node) == [b"whole"]
        assert not node.tcp.assembly._deadlines


# Slow readers


class LazyPeer:
    """Reads from its socket when it is asked to, and never before."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    async def read(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        async with asyncio.timeout(TIMEOUT_S):
            while len(data) < size:
                piece = await loop.sock_recv(self._socket, size - len(data))
                assert piece, "the bus ended the stream"
                data += piece
        return bytes(data)


@contextlib.asynccontextmanager
async def lazy_queue(node: Node, port: int) -> AsyncIterator[LazyPeer]:
    known = len(queues_of(node))
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        await until(lambda: len(queues_of(node)) == known + 1)
        yield LazyPeer(sock)


async def flood(node: Node, mebibytes: int) -> None:
    """Publish, as a Boson client, more than any socket's buffers hold."""
    async with ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as writer:
        for _ in range(mebibytes):
            await writer.send(FRAMES.publish("news", bytes(1 << 20), NO_HEADERS))
        await writer.send(FRAMES.publish("news?receipt=all", b"end", NO_HEADERS))
        name, _ = await writer.read_frame()
        assert name == "$receipt"


async def test_a_queue_that_does_not_read_is_disconnected_and_others_go_on() -> None:
    limits = {"outbox-bytes-max": 1 << 20}
    async with bridged("alive", limits=limits, durability="memory") as (node, port):
        async with lazy_queue(node, port), queue(node, port) as good:
            reading = asyncio.create_task(good.read(32 * (4 + (1 << 20)) + 7))
            await flood(node, 32)
            assert (await reading)[-7:] == message(b"end")
            await until(lambda: node.bad_peers.counts["outbox.full"] == 1)
            await until(lambda: len(queues_of(node)) == 1)


async def test_drop_oldest_drops_whole_messages_so_that_the_stream_stays_readable() -> None:
    settings = {"slow_subscriber": "drop-oldest", "durability": "memory"}
    async with bridged(limits={"outbox-bytes-max": 4 << 20}, **settings) as (node, port):
        async with lazy_queue(node, port) as slow:
            await flood(node, 32)
            received = 0
            while (length := int.from_bytes(await slow.read(4))) != 3:
                assert await slow.read(length) == bytes(1 << 20)
                received += 1
            assert await slow.read(3) == b"end"
            assert 0 < received < 32
            await until(lambda: node.bad_peers.counts["outbox.dropped"] >= 1)


async def test_with_wait_publishers_wait_for_a_slow_queue_and_it_gets_everything() -> None:
    settings = {"slow_subscriber": "wait", "durability": "memory"}
    async with bridged(limits={"outbox-bytes-max": 1 << 20}, **settings) as (node, port):
        async with lazy_queue(node, port) as slow:
            publishing = asyncio.create_task(flood(node, 48))
            await until(lambda: any(one._held_by for one in open_connections(node)))
            assert not publishing.done()
            for _ in range(48):
                assert await slow.read(4 + (1 << 20)) == message(bytes(1 << 20))
            assert await slow.read(7) == message(b"end")
            await publishing
