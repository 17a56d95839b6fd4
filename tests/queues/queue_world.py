"""A pump that tests drive step by step, brokers on either transport, and listeners that note all.

world.do(runnable)      post it, run until it ran, return what it returned or raise what it raised
world.until(condition)  run until it is true; fails if that takes too long
world.settle()          run for a little, so that what must not happen had its chance
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from polybus.queues import (
    AcceptListener,
    ConnectListener,
    EventPump,
    MessageListener,
    MessageQueue,
    QueueBroker,
    QueueLimits,
    Registry,
    Task,
    TcpTransport,
)

T = TypeVar("T")
UNTIL_S = 10.0
SETTLE_S = 0.02
PORT = 1


class Notes(MessageListener):
    """One end of a queue: everything it heard, in order."""

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.received_messages: list[bytes] = []
        self.sent_messages: list[bytes] = []
        self.closed_count = 0
        self.after_closed: list[bytes] = []

    def received(self, message: bytes) -> None:
        self.received_messages.append(message)
        if self.closed_count:
            self.after_closed.append(message)

    def sent(self, message: bytes) -> None:
        self.sent_messages.append(message)

    def closed(self) -> None:
        self.closed_count += 1


class Server(AcceptListener):
    """Accepts, and listens to each queue with notes (or with what `listen` makes)."""

    def __init__(self, listen: Callable[[MessageQueue], Notes] | None = Notes) -> None:
        self._listen = listen
        self.queues: list[MessageQueue] = []
        self.ends: list[Notes] = []

    def accepted(self, queue: MessageQueue) -> None:
        self.queues.append(queue)
        if self._listen is not None:
            self.ends.append(self._listen(queue))
            queue.set_listener(self.ends[-1])


class Caller(ConnectListener):
    """Notes how a connect went."""

    def __init__(self, listen: Callable[[MessageQueue], Notes] | None = Notes) -> None:
        self._listen = listen
        self._end: Notes | None = None
        self._queue: MessageQueue | None = None
        self.refused_count = 0

    def connected(self, queue: MessageQueue) -> None:
        assert self._queue is None
        self._queue = queue
        if self._listen is not None:
            self._end = self._listen(queue)
            queue.set_listener(self._end)

    def refused(self) -> None:
        self.refused_count += 1

    @property
    def queue(self) -> MessageQueue:
        assert self._queue is not None, "not connected"
        return self._queue

    @property
    def end(self) -> Notes:
        assert self._end is not None, "not connected"
        return self._end

    @property
    def connected_once(self) -> bool:
        return self._queue is not None

    @property
    def done(self) -> bool:
        return self._queue is not None or self.refused_count > 0


class World:
    """Everything a test needs, on one transport: "local" or "tcp"."""

    def __init__(self, kind: str, *, until_s: float = UNTIL_S) -> None:
        self.kind = kind
        self._until_s = until_s
        self.loop = asyncio.SelectorEventLoop()
        self.pump = EventPump()
        self.stopped = self.pump.run_in(self.loop)
        self.errors: list[Exception] = []
        self.task = Task(self.pump, self.errors.append)
        self.registry = Registry()
        self.transport = TcpTransport(self.registry) if kind == "tcp" else None

    def broker(
        self, name: str, *, connect_timeout_s: float = 0.0, limits: QueueLimits | None = None
    ) -> QueueBroker:
        self.registry.add(name, any_port=True)
        return QueueBroker(
            name,
            self.pump,
            transport=self.transport,
            connect_timeout_s=connect_timeout_s,
            limits=limits,
        )

    def do(self, runnable: Callable[[], T]) -> T:
        outcome: list[T] = []
        failure: list[Exception] = []

        def run() -> None:
            try:
                outcome.append(runnable())
            except Exception as error:
                failure.append(error)

        self.task.post(run)
        self.until(lambda: bool(outcome or failure))
        if failure:
            raise failure[0]
        return outcome[0]

    def send(self, queue: MessageQueue, *messages: bytes) -> None:
        """Send all in one turn."""

        def send_all() -> None:
            for message in messages:
                queue.send(message)

        self.do(send_all)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = self.loop.time() + self._until_s
        while not condition():
            assert self.loop.time() < deadline_s, "this did not happen in time"
            self.loop.run_until_complete(asyncio.sleep(0))

    def settle(self) -> None:
        self.loop.run_until_complete(asyncio.sleep(SETTLE_S))

    def connect(
        self, broker: QueueBroker, name: str, port: int = PORT, caller: Caller | None = None
    ) -> Caller:
        caller = caller or Caller()
        self.do(lambda: broker.connect(name, port, caller))
        self.until(lambda: caller.done)
        return caller

    def pair(self, limits: QueueLimits | None = None) -> tuple[Notes, Notes]:
        """Two connected ends with notes: of the one who connected, of the one who accepted."""
        server = Server()
        listening = self.broker("pair-server", limits=limits)
        calling = self.broker("pair-client", limits=limits)
        self.do(lambda: listening.bind(PORT, server))
        caller = self.connect(calling, "pair-server")
        self.until(lambda: bool(server.ends))
        return caller.end, server.ends[0]

    def raw_peer(self, name: str, port: int = PORT) -> socket.socket:
        """A socket connected to a broker's port, for peers that do not behave."""
        address = self.registry.address(name, port)
        assert address is not None
        return socket.create_connection(address)

    def close(self) -> None:
        self.pump.stop()
        self.loop.run_until_complete(self.stopped)
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture(params=["local", "tcp"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


@pytest.fixture
def tcp_world() -> Iterator[World]:
    made = World("tcp")
    yield made
    made.close()
