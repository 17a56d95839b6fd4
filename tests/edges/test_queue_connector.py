"""A queue connector: a port that is a topic, for programs that speak nothing but messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from edge_kit import (
    FRAMES,
    GOMS,
    NO_HEADERS,
    TIMEOUT_S,
    WAYS,
    Pipe,
    connected,
    epoch_of,
    is_alive,
    prepared,
    until,
)

from polybus.config import load
from polybus.edges.node import Node
from polybus.edges.queue import QueueTranslator
from polybus.errors import ConfigError
from polybus.queues import (
    ConnectListener,
    EventPump,
    MessageListener,
    MessageQueue,
    QueueBroker,
    Registry,
    Task,
    TcpTransport,
)
from polybus.testing import ScriptedPeer, run_bus

VALUES = [
    b"hello",
    b"",
    bytes(range(256)),
    'h\xe9llo "w"\n'.encode(),
    b"\0\0\0\0",
    b"x" * (1 << 20),
]
DATAGRAM_VALUES = VALUES[:-1]


def message(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


@contextlib.asynccontextmanager
async def bridged(
    *topics: str, topic: str = "news", **settings: Any
) -> AsyncIterator[tuple[Node, int]]:
    """A bus with a queue connector of the topic behind the usual two, and that one's port."""
    connectors = [
        {"protocol": "tcp", "port": 0},
        {"protocol": "udp", "port": 0, "speaks": "goms"},
        {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": topic},
    ]
    async with run_bus(*topics, connectors=connectors, **settings) as node:
        yield node, int(node.addresses[2].rpartition(":")[2])


def queues_of(node: Node) -> list[QueueTranslator]:
    """The queues that are subscribed."""
    return [
        one.translator
        for one in node.server.connections
        if isinstance(one.translator, QueueTranslator) and one.translator.subscriptions
    ]


@contextlib.asynccontextmanager
async def queue(node: Node, port: int) -> AsyncIterator[ScriptedPeer]:
    """A queue the bus knows of: nothing on the wire says that a subscription has begun."""
    known = len(queues_of(node))
    async with ScriptedPeer(port, timeout_s=TIMEOUT_S) as peer:
        await until(lambda: len(queues_of(node)) == known + 1)
        yield peer


def stored(node: Node, topic: str = "news") -> list[bytes]:
    batches = node.server.bus.log.read(topic, 0, bytes_max=1 << 30)
    return [value for batch in batches for value in batch.values()]


# Through the bus


async def test_a_message_goes_to_every_queue_but_the_one_it_came_on() -> None:
    async with (
        bridged() as (node, port),
        queue(node, port) as sender,
        queue(node, port) as first,
        queue(node, port) as second,
    ):
        await sender.send(message(b"to all"))
        for other in (first, second):
            assert await other.read(10) == message(b"to all")
        await first.send(message(b"back"))
        # The first thing the sender hears is the other's: its own did not come before it.
        assert await sender.read(8) == await second.read(8) == message(b"back")
        assert stored(node) == [b"to all", b"back"]


@pytest.mark.parametrize("way", WAYS)
async def test_what_queues_send_reaches_every_protocol_byte_for_byte(way: str) -> None:
    values = DATAGRAM_VALUES if way == "goms-udp" else VALUES
    async with bridged() as (node, port), connected(node, way) as reader:
        epoch = epoch_of(node, "news")
        await WAYS[way].subscribe(reader, "news", epoch)
        async with queue(node, port) as sender:
            for offset, value in enumerate(values):
                await sender.send(message(value))
                expected = WAYS[way].delivered("news", value, NO_HEADERS, epoch, offset)
                assert await reader.read(len(expected)) == expected
        assert stored(node) == values


@pytest.mark.parametrize("way", WAYS)
async def test_what_others_publish_reaches_queues_byte_for_byte_without_headers(way: str) -> None:
    values = DATAGRAM_VALUES if way == "goms-udp" else VALUES
    headers = {"origin": b"sensor 7"} if WAYS[way].has_headers else NO_HEADERS
    async with (
        bridged() as (node, port),
        queue(node, port) as reader,
        connected(node, way) as writer,
    ):
        await prepared(node, writer, way, "news")
        for value in values:
            await writer.send(WAYS[way].publish("news", value, headers))
            assert await reader.read(4 + len(value)) == message(value)


async def test_a_queue_hears_nothing_of_other_topics() -> None:
    async with bridged("sport") as (node, port), queue(node, port) as reader:
        async with ScriptedPeer(node.tcp_port) as writer:
            await writer.send(FRAMES.publish("sport", b"not for you", NO_HEADERS))
            await writer.send(FRAMES.publish("news", b"for you", NO_HEADERS))
        assert await reader.read(11) == message(b"for you")


async def test_a_message_in_any_pieces_is_one_message() -> None:
    stream = b"".join(map(message, [b"one", b"", b"three" * 20]))
    async with bridged() as (node, port), queue(node, port) as reader:
        async with queue(node, port) as writer:
            for byte in stream:
                await writer.send(bytes([byte]))
            assert await reader.read(len(stream)) == stream
    assert stored(node) == [b"one", b"", b"three" * 20]


async def test_thousands_of_messages_both_ways_keep_their_order() -> None:
    count = 20_000
    async with (
        bridged() as (node, port),
        queue(node, port) as left,
        queue(node, port) as right,
        asyncio.TaskGroup() as tasks,
    ):
        streams = {
            name: b"".join(message(f"{name} {n}".encode()) for n in range(count)) for name in "lr"
        }
        tasks.create_task(left.send(streams["l"]))
        tasks.create_task(right.send(streams["r"]))
        reads = [left.read(len(streams["r"])), right.read(len(streams["l"]))]
        assert await asyncio.gather(*reads) == [streams["r"], streams["l"]]


async def test_a_queue_that_only_reads_may_be_silent_for_ever() -> None:
    """Others must say in time what they speak; here that is known."""
    async with bridged(limits={"detect-timeout-s": 0.1, "message-timeout-s": 0.1}) as (node, port):
        async with queue(node, port) as reader:
            connections = list(node.server.connections)
            assert connections[0] not in node.server.assembly.overdue()
            assert not node.server.assembly._deadlines
            async with ScriptedPeer(node.tcp_port) as writer:
                await writer.send(FRAMES.publish("news", b"late", NO_HEADERS))
                assert await reader.read(8) == message(b"late")


async def test_what_was_sent_before_a_goodbye_is_stored() -> None:
    async with bridged() as (node, port):
        async with queue(node, port) as sender:
            await sender.send(message(b"last words"))
            sender.send_eof()
            assert await sender.read_to_end() == b""
        assert stored(node) == [b"last words"]


async def test_what_queues_sent_is_there_after_a_restart_but_not_sent_again(tmp_path: Path) -> None:
    async with bridged(data=str(tmp_path)) as (node, port), queue(node, port) as sender:
        await sender.send(message(b"before"))
        await until(lambda: stored(node) == [b"before"])
    async with bridged(data=str(tmp_path)) as (node, port), queue(node, port) as reader:
        assert stored(node) == [b"before"]
        async with ScriptedPeer(node.tcp_port) as writer:
            await writer.send(FRAMES.publish("news", b"after", NO_HEADERS))
            assert await reader.read(9) == message(b"after")


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
            # No error can be told on a queue, and nothing comes before the end.
            assert await peer.read_to_end() == b""
            assert await other.read(8) == message(b"good")
            await until(lambda: len(queues_of(node)) == 1)
        assert node.server.bad_peers.counts[code] == 1
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
        assert node.server.bad_peers.counts["peer.too-slow"] == 1
        assert stored(node) == []


async def test_a_peer_that_leaves_inside_a_message_leaves_nothing_behind() -> None:
    async with bridged() as (node, port):
        async with queue(node, port) as peer:
            await peer.send(message(b"whole") + struct.pack(">i", 10) + b"half")
            await until(lambda: stored(node) == [b"whole"])
        await until(lambda: not queues_of(node))
        assert stored(node) == [b"whole"]
        assert not node.server.assembly._deadlines


# Slow readers


class LazyPeer:
    """Reads from its socket when it is told to, and never before."""

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
            await until(lambda: node.server.bad_peers.counts["outbox.full"] == 1)
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
            await until(lambda: node.server.bad_peers.counts["outbox.dropped"] >= 1)


async def test_with_wait_publishers_wait_for_a_slow_queue_and_it_gets_everything() -> None:
    settings = {"slow_subscriber": "wait", "durability": "memory"}
    async with bridged(limits={"outbox-bytes-max": 1 << 20}, **settings) as (node, port):
        async with lazy_queue(node, port) as slow:
            publishing = asyncio.create_task(flood(node, 48))
            await until(lambda: any(one._held_by for one in node.server.connections))
            assert not publishing.done()
            for _ in range(48):
                assert await slow.read(4 + (1 << 20)) == message(bytes(1 << 20))
            assert await slow.read(7) == message(b"end")
            await publishing


# Its topic


async def test_the_connectors_topic_is_created_and_its_name_is_lower_case() -> None:
    async with bridged(topic="Not Declared") as (node, port):
        assert node.server.bus.has_topic("not declared")
        async with queue(node, port) as reader, queue(node, port) as writer:
            await writer.send(message(b"x"))
            assert await reader.read(5) == message(b"x")
        assert stored(node, "not declared") == [b"x"]


async def test_without_its_topic_queues_are_closed_until_it_is_back() -> None:
    async with bridged() as (node, port):
        async with queue(node, port) as peer:
            node.server.bus.delete_topic("news")
            assert await peer.read_to_end() == b""
        assert node.server.bad_peers.counts["topic.deleted"] == 1
        async with ScriptedPeer(port, timeout_s=TIMEOUT_S) as early:
            assert await early.read_to_end() == b""
        assert node.server.bad_peers.counts["topic.unknown"] == 1
        node.server.bus.create_topic("news")
        async with queue(node, port) as reader, queue(node, port) as writer:
            await writer.send(message(b"again"))
            assert await reader.read(9) == message(b"again")


# The framework's own queues


class Program(ConnectListener, MessageListener):
    """A queue program: keeps what comes."""

    def __init__(self) -> None:
        self.queue: MessageQueue | None = None
        self.messages: list[bytes] = []
        self.is_closed = False

    def connected(self, queue: MessageQueue) -> None:
        self.queue = queue
        queue.set_listener(self)

    def received(self, message: bytes) -> None:
        self.messages.append(message)

    def closed(self) -> None:
        self.is_closed = True


@contextlib.asynccontextmanager
async def programs(node: Node, port: int, count: int) -> AsyncIterator[tuple[Task, list[Program]]]:
    """Queue programs on this very loop, connected to the bus."""
    pump = EventPump()
    registry = Registry()
    registry.add("bus", "127.0.0.1", {1: port})
    broker = QueueBroker("program", pump, transport=TcpTransport(registry))
    ends = [Program() for _ in range(count)]
    for end in ends:
        Task(pump).post(lambda end=end: broker.connect("bus", 1, end))  # type: ignore[misc]
    stopped = pump.run_in(asyncio.get_running_loop())
    try:
        await until(lambda: all(end.queue for end in ends) and len(queues_of(node)) == count)
        yield Task(pump), ends
    finally:
        pump.stop()
        await stopped


async def test_queue_programs_meet_on_the_bus() -> None:
    async with bridged() as (node, port), programs(node, port, 3) as (task, ends):

        def send_all() -> None:
            assert ends[0].queue is not None
            for value in VALUES:
                ends[0].queue.send(value)

        task.post(send_all)
        await until(lambda: ends[1].messages == VALUES and ends[2].messages == VALUES)
        assert ends[0].messages == []
        assert stored(node) == VALUES


@pytest.mark.parametrize("dialect", [FRAMES, GOMS], ids=["boson", "goms"])
async def test_a_queue_program_and_a_client_of_another_protocol_talk(dialect: Any) -> None:
    async with bridged() as (node, port), ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) as other:
        pipe: Pipe = other
        epoch = epoch_of(node, "news")
        await dialect.subscribe(pipe, "news", epoch)
        async with programs(node, port, 1) as (task, (end,)):
            assert end.queue is not None
            ask = end.queue.send
            task.post(lambda: ask(b"ping"))
            expected = dialect.delivered("news", b"ping", NO_HEADERS, epoch, 0)
            assert await other.read(len(expected)) == expected
            await other.send(dialect.publish("news", b"pong", NO_HEADERS))
            await until(lambda: end.messages == [b"pong"])


async def test_a_program_hears_when_the_bus_stops() -> None:
    async with contextlib.AsyncExitStack() as stack:
        node, port = await stack.enter_async_context(bridged())
        pump_stack = await stack.enter_async_context(contextlib.AsyncExitStack())
        _, (end,) = await pump_stack.enter_async_context(programs(node, port, 1))
        await node.server.stop()
        await until(lambda: end.is_closed)


# Its settings


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"topic": None}, "connectors[0].topic"),
        ({"topic": ""}, "connectors[0].topic"),
        ({"topic": "$system"}, "connectors[0].topic"),
        ({"topic": "x" * 256}, "connectors[0].topic"),
        ({"speaks": ["queue", "goms"]}, "connectors[0].speaks"),
        ({"protocol": "udp"}, "connectors[0].protocol"),
        ({"tls": {"cert": "c", "key": "k"}}, "connectors[0].tls"),
    ],
)
def test_a_queue_connector_that_cannot_be_is_an_error_that_names_the_key(
    wrong: dict[str, Any], key: str, tmp_path: Path
) -> None:
    connector = {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "news"} | wrong
    path = tmp_path / "bus.json"
    path.write_text(json.dumps({"connectors": [connector]}))
    with pytest.raises(ConfigError) as caught:
        load(path, {})
    assert key in caught.value.text


def test_the_old_spelling_of_a_connector_loads_and_declares_its_topic(tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    connector = {"protocoll": "tcp", "ip": "127.0.0.1", "port": 4000, "speaks": "queue"}
    path.write_text(json.dumps({"connectors": [connector | {"topic": "News"}]}))
    config = load(path, {})
    assert config.connectors[0].protocols == ("queue",)
    assert [topic.name for topic in config.topic_list()] == ["news"]
