"""Any sequence of actions on queues does what a short model says, on both transports."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from queue_world import Caller, Notes, Server, World

from polybus.errors import UsageError
from polybus.queues import MessageQueue, QueueLimits

PORTS = st.integers(1, 2)
SIZES = st.sampled_from([0, 1, 10, 100, 5_000, 70_000])


@dataclass
class End:
    """What the model knows of one end of a queue."""

    queue: MessageQueue
    notes: Notes
    listening: bool = False
    closed: bool = False
    accepted: list[bytes] = field(default_factory=list)
    unheard: int = 0
    """How many were accepted before anyone listened: their `sent` may have gone unheard."""
    sent_at_close: int = 0
    received_at_close: int = 0

    @property
    def sent_count(self) -> int:
        """How many of the accepted messages are sent, as far as the listener heard."""
        sent = self.notes.sent_messages
        return self.accepted.index(sent[-1]) + 1 if sent else 0


class Queues(RuleBasedStateMachine):
    """Up to three queues; either end may be without a listener, so that rings fill up."""

    kind = "local"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.kind, until_s=2.0)
        limits = QueueLimits(ring_bytes=1000)
        self.server = self.world.broker("server", limits=limits)
        self.client = self.world.broker("client", limits=limits)
        self.bound: dict[int, Server] = {}
        self.pairs: list[tuple[End, End]] = []
        self.number = 0

    def teardown(self) -> None:
        try:
            self.world.settle()
            self.every_end_is_as_the_model_says()
        finally:
            self.world.close()

    @rule(port=PORTS)
    def bind(self, port: int) -> None:
        server = Server(listen=None)
        assert self.world.do(lambda: self.server.bind(port, server)) is (port not in self.bound)
        self.bound.setdefault(port, server)

    @rule(port=PORTS)
    def unbind(self, port: int) -> None:
        assert self.world.do(lambda: self.server.unbind(port)) is (port in self.bound)
        self.bound.pop(port, None)

    @precondition(lambda self: len(self.pairs) < 3)
    @rule(port=PORTS)
    def connect(self, port: int) -> None:
        server = self.bound.get(port)
        before = len(server.queues) if server else 0
        caller = self.world.connect(self.client, "server", port, Caller(listen=None))
        assert caller.connected_once is (server is not None)
        if server is not None:
            self.world.until(lambda: len(server.queues) == before + 1)
            ends = [End(queue, Notes(queue)) for queue in (caller.queue, server.queues[-1])]
            self.pairs.append((ends[0], ends[1]))

    @precondition(lambda self: self.pairs)
    @rule(pick=st.data(), sizes=st.lists(SIZES, min_size=1, max_size=5))
    def send(self, pick: st.DataObject, sizes: list[int]) -> None:
        end, _ = self.pick(pick)
        messages = []
        for size in sizes:
            self.number += 1
            messages.append((b"%d:" % self.number + bytes(size))[: max(size, 8)])
        if end.closed:
            with pytest.raises(UsageError):
                self.world.send(end.queue, *messages)
        else:
            self.world.send(end.queue, *messages)
            end.accepted += messages

    @precondition(lambda self: self.pairs)
    @rule(pick=st.data())
    def listen(self, pick: st.DataObject) -> None:
        end, _ = self.pick(pick)
        if end.closed:
            with pytest.raises(UsageError):
                self.world.do(lambda: end.queue.set_listener(end.notes))
        else:
            self.world.do(lambda: end.queue.set_listener(end.notes))
            if not end.listening:
                end.unheard = len(end.accepted)
            end.listening = True

    @precondition(lambda self: self.pairs)
    @rule(pick=st.data())
    def close(self, pick: st.DataObject) -> None:
        end, _ = self.pick(pick)
        if not end.closed:
            end.closed = True
            end.sent_at_close = end.sent_count
            end.received_at_close = len(end.notes.received_messages)
        self.world.do(end.queue.close)

    @invariant()
    def every_end_is_as_the_model_says(self) -> None:
        for one, other in self.pairs:
            self.check(one, other)
            self.check(other, one)

    def check(self, end: End, other: End) -> None:
        notes = end.notes
        if end.closed:
            # Nothing comes after a local close but the word that it is over.
            assert end.sent_count == end.sent_at_close
            assert len(notes.received_messages) == end.received_at_close
        elif end.listening:
            if other.closed or (other.listening and len(end.accepted) > end.unheard):
                self.world.until(lambda: max(end.sent_count, end.unheard) == len(end.accepted))
            owed = other.sent_at_close if other.closed else len(other.accepted)
            self.world.until(lambda: len(notes.received_messages) >= owed)
        over = end.listening and (end.closed or other.closed)
        self.world.until(lambda: notes.closed_count == over)
        # `closed` is known here before the listener is notified, never the other way round.
        assert end.queue.closed or not (end.closed or over)
        assert notes.received_messages == other.accepted[: len(notes.received_messages)]
        first_sent = end.sent_count - len(notes.sent_messages)
        assert notes.sent_messages == end.accepted[first_sent : end.sent_count]
        assert first_sent <= end.unheard
        assert self.world.errors == []

    def pick(self, pick: st.DataObject) -> tuple[End, End]:
        one, other = pick.draw(st.sampled_from(self.pairs), label="pair")
        return pick.draw(st.sampled_from([(one, other), (other, one)]), label="end")


class QueuesOverTcp(Queues):
    kind = "tcp"


SHORT = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestQueuesInProcess = pytest.mark.slow(Queues.TestCase)
TestQueuesInProcess.settings = SHORT
TestQueuesOverTcp = pytest.mark.slow(QueuesOverTcp.TestCase)
TestQueuesOverTcp.settings = SHORT
