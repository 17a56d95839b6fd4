"""Slow subscribers and a full bus: who waits, who is dropped, and that nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import pytest
from edge_kit import TIMEOUT_S, frame, is_alive, line, open_connections, properties, until

from polybus.edges.node import Node
from polybus.edges.tcp.connection import Connection
from polybus.testing import ScriptedPeer, run_bus

LIMITS = {"outbox-bytes-max": 1 << 20}
CHUNK = frame("news", b"x" * 4096) * 16
SUBSCRIBE = {
    "boson-frames": frame("$subscribe", b"news tell=position"),
    "boson-properties": properties(("hbfs", b"news tell=position")),
    "goms": line("register", topics=["news"], ack=True),
}


@contextlib.asynccontextmanager
async def stalled(node: Node, request: bytes) -> AsyncIterator[socket.socket]:
    """A subscriber that reads the answer to its request and then nothing; its window is small."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", node.tcp_port))
        await loop.sock_sendall(sock, request)
        await loop.sock_recv(sock, 1024)
        yield sock


async def read_to_end(sock: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    said = bytearray()
    async with asyncio.timeout(TIMEOUT_S):
        while data := await loop.sock_recv(sock, 1 << 20):
            said += data
    return bytes(said)


class Lag:
    """Measures how long the loop was kept from other work."""

    def __init__(self) -> None:
        self.most_s = 0.0
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> Lag:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(0.005)
            self.most_s = max(self.most_s, loop.time() - began - 0.005)


async def count_to(peer: ScriptedPeer, count: int) -> None:
    """Read frames of the chunk until this many messages came."""
    await peer.read(len(CHUNK) // 16 * count)


@pytest.mark.parametrize("protocol", SUBSCRIBE)
async def test_a_stalled_subscriber_is_disconnected_with_its_protocols_error(protocol: str) -> None:
    """Its neighbour gets everything, the publisher continues, and the loop never stands still."""
    chunks = 500
    async with run_bus("news", "alive", durability="memory", limits=LIMITS) as node:
        async with (
            stalled(node, SUBSCRIBE[protocol]) as victim,
            ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as neighbour,
            ScriptedPeer(node.tcp_port) as writer,
            Lag() as lag,
        ):
            await neighbour.send(SUBSCRIBE["boson-frames"])
            await neighbour.read_frame()
            reading = asyncio.create_task(count_to(neighbour, 16 * chunks))
            for _ in range(chunks):
                await writer.send(CHUNK)
            await until(lambda: node.bad_peers.counts["outbox.full"] == 1)
            said = await read_to_end(victim)
            await reading
            await is_alive(node)
    tail = said[-400:]
    if protocol == "goms":
        assert json.loads(tail.splitlines()[-1])["error-code"] == "000429"
    else:
        assert (b"$error" if protocol == "boson-frames" else b"hbfe") in tail
        assert b"outbox.full " in tail
    assert lag.most_s < 4.0
    assert node.context.memory.ledger.bytes == 0


async def test_what_a_disconnected_subscriber_got_is_whole_messages_without_a_gap() -> None:
    async with run_bus("news", durability="memory", limits=LIMITS) as node:
        async with stalled(node, SUBSCRIBE["goms"]) as victim:
            async with ScriptedPeer(node.tcp_port) as writer:
                n = 0
                while not node.bad_peers.counts["outbox.full"]:
                    frames = [frame("news", b"%d " % i + b"x" * 4096) for i in range(n, n + 16)]
                    await writer.send(b"".join(frames))
                    n += 16
                said = [json.loads(one) for one in (await read_to_end(victim)).splitlines()]
    numbers = [int(one["data"].split()[0]) for one in said[:-1]]
    assert numbers == list(range(len(numbers)))
    assert said[-1]["error-code"] == "000429"


@pytest.mark.parametrize("protocol", ["goms", "boson-frames"])
async def test_drop_oldest_keeps_the_newest_and_tells_how_many_went(protocol: str) -> None:
    sent = 16 * 500
    async with run_bus(
        "news", "alive", durability="memory", slow_subscriber="drop-oldest", limits=LIMITS
    ) as node:
        async with stalled(node, SUBSCRIBE[protocol]) as victim:
            async with ScriptedPeer(node.tcp_port) as writer:
                for start in range(0, sent, 16):
                    frames = [
                        frame("news", b"%d " % n + b"x" * 4096) for n in range(start, start + 16)
                    ]
                    await writer.send(b"".join(frames))
                await writer.send(frame("alive?receipt=1", b""))
                await writer.read_frame()
            last = b"%d x" % (sent - 1)
            loop = asyncio.get_running_loop()
            said = bytearray()
            async with asyncio.timeout(TIMEOUT_S):
                while last not in said[-8192:]:
                    said += await loop.sock_recv(victim, 1 << 20)
    if protocol == "goms":
        lines = [json.loads(one) for one in bytes(said).splitlines()[:-1]]
        got = [int(one["data"].split()[0]) for one in lines if one["messagetype"] == "message"]
        errors = [one["error"] for one in lines if one["messagetype"] == "error"]
        told = [int(error.removeprefix("outbox.dropped: ").split()[0]) for error in errors]
        got.append(sent - 1)
    else:
        got, told = [], []
        at = 0
        while at + 7 <= len(said):
            length, topic_bytes = int.from_bytes(said[at : at + 4]), said[at + 6]
            topic = said[at + 7 : at + 7 + topic_bytes]
            content = said[at + 7 + topic_bytes : at + 7 + topic_bytes + length]
            if topic == b"news":
                got.append(int(content.split()[0]))
            elif topic == b"$error":
                told.append(int(content.split()[1]))
            at += 7 + topic_bytes + length
    assert got == sorted(set(got)) and got[-1] == sent - 1
    assert told and sum(told) == sent - len(got) > 0


async def test_those_who_wait_for_a_slow_subscriber_lose_nothing() -> None:
    """Policy wait: the publisher stands still until the subscriber reads, and all arrives."""
    chunks = 500
    async with run_bus(
        "news", "alive", durability="memory", slow_subscriber="wait", limits=LIMITS
    ) as node:
        async with stalled(node, SUBSCRIBE["boson-frames"]) as victim:
            async with ScriptedPeer(node.tcp_port) as writer:
                writing = asyncio.create_task(send_all(writer, chunks))
                await until(lambda: any(one._held_by for one in open_connections(node)))
                await is_alive(node)
                assert not writing.done()
                loop = asyncio.get_running_loop()
                size = 0
                async with asyncio.timeout(TIMEOUT_S):
                    while size < chunks * len(CHUNK):
                        size += len(await loop.sock_recv(victim, 1 << 20))
                await writing
        assert size == chunks * len(CHUNK)
        assert not node.bad_peers.counts


async def send_all(writer: ScriptedPeer, chunks: int) -> None:
    for _ in range(chunks):
        await writer.send(CHUNK)


@pytest.mark.slow
async def test_one_that_stands_still_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polybus.edges.tcp.outbox.STANDSTILL_S", 0.5)
    async with run_bus(
        "news", "alive", durability="memory", slow_subscriber="wait", limits=LIMITS
    ) as node:
        async with (
            stalled(node, SUBSCRIBE["goms"]) as victim,
            ScriptedPeer(node.tcp_port) as writer,
        ):
            async with asyncio.timeout(TIMEOUT_S):
                await send_all(writer, 500)
            assert b"000429" in (await read_to_end(victim))[-400:]


async def test_a_stalled_publisher_of_receipts_does_not_fill_memory() -> None:
    """A peer that publishes and never reads its receipts is a slow subscriber of them."""
    async with run_bus("news", "alive", durability="memory", limits=LIMITS) as node:
        async with stalled(node, SUBSCRIBE["boson-frames"]) as victim:
            loop = asyncio.get_running_loop()
            chunk = frame("news?receipt=" + "i" * 200, b"") * 100
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(TIMEOUT_S):
                    while not node.bad_peers.counts["outbox.full"]:
                        await loop.sock_sendall(victim, chunk)
            await is_alive(node)


# Memory


@pytest.mark.parametrize("policy", ["disconnect", "drop-oldest"])
async def test_many_stalled_subscribers_of_many_topics_do_not_stop_the_bus(policy: str) -> None:
    """None is over its own limit; together they are over the bus's."""
    topics = [f"topic-{n}" for n in range(12)]
    limits = {"outbox-bytes-max": 4 << 20, "memory-bytes-max": 8 << 20}
    async with run_bus(
        *topics, "alive", durability="memory", slow_subscriber=policy, limits=limits
    ) as node:
        async with contextlib.AsyncExitStack() as stack:
            for topic in topics:
                request = frame("$subscribe", f"{topic} tell=position".encode())
                await stack.enter_async_context(stalled(node, request))
            writer = await stack.enter_async_context(ScriptedPeer(node.tcp_port))
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(4):
                    for topic in topics:
                        for _ in range(16):
                            await writer.send(frame(topic, b"x" * (1 << 16)))
                            assert node.context.memory.ledger.bytes < 16 << 20
                await is_alive(node)
        await until(lambda: node.context.memory.ledger.bytes == 0)


async def test_a_bus_over_its_memory_stops_reading_and_then_goes_on_with_nothing_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 2000
    async with run_bus("news", "alive", durability="memory") as node:
        over = True
        monkeypatch.setattr(node.context.memory, "is_full", lambda: over)
        async with ScriptedPeer(node.tcp_port) as writer:
            sent = b"".join(frame("news", b"%d" % n + b"x" * 4096) for n in range(count))
            writing = asyncio.create_task(writer.send(sent + frame("alive?receipt=1", b"")))
            (connection,) = await connections(node)
            await until(lambda: connection._held_by)
            stop = node.bus.log.bounds("news").stop
            await asyncio.sleep(0.1)
            assert node.bus.log.bounds("news").stop == stop < count
            over = False
            await writing
            assert (await writer.read_frame())[0] == "$receipt"
        batches = node.bus.log.read("news", 0, bytes_max=1 << 30)
        numbers = [value.rstrip(b"x") for batch in batches for value in batch.values()]
        assert numbers == [b"%d" % n for n in range(count)]


async def connections(node: Node) -> list[Connection]:
    await until(lambda: node.tcp.connections)
    return open_connections(node)


async def test_a_publisher_that_was_held_back_is_not_called_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message is unfinished because we did not read it."""
    limits = {"message-timeout-s": 0.2}
    async with run_bus("news", durability="memory", limits=limits) as node:
        over = True
        monkeypatch.setattr(node.context.memory, "is_full", lambda: over)
        async with ScriptedPeer(node.tcp_port) as writer:
            message = frame("news?receipt=1", b"x" * 1000)
            await writer.send(frame("news", b"") + message[:100])
            (connection,) = await connections(node)
            await until(lambda: connection._held_by)
            await asyncio.sleep(1.5)
            await writer.send(message[100:])
            over = False
            assert (await writer.read_frame())[0] == "$receipt"


@pytest.mark.slow
async def test_under_wait_a_publisher_may_read_its_receipts_at_the_end() -> None:
    """Many more receipts than an outbox holds; the publisher reads none before it has sent all."""
    chunk = b"".join(frame(f"news?receipt={number:08}", b"x" * 40) for number in range(100_000))
    limits = {"outbox-bytes-max": 1 << 18}
    async with run_bus("news", slow_subscriber="wait", limits=limits) as node:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", node.tcp_port))
            async with asyncio.timeout(TIMEOUT_S):
                for sent in range(1, 5):
                    await loop.sock_sendall(sock, chunk)
                    await until(lambda sent=sent: node.bus.receipts_given == sent * 100_000)
            sock.shutdown(socket.SHUT_WR)
            assert (await read_to_end(sock)).count(b"$receipt") == 400_000
