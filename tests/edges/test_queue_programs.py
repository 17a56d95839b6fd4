"""Programs of the queue framework at a queue connector."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from edge_kit import FRAMES, GOMS, NO_HEADERS, TIMEOUT_S, Pipe, epoch_of, until
from queue_connector_kit import VALUES, bridged, queues_of, stored

from polybus.edges.node import Node
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
from polybus.testing import ScriptedPeer


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
