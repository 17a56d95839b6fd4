"""Outboxes and the ledger, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polybus.batch import Batch, Buffer
from polybus.edges.protocols.peer import DroppedMessages
from polybus.edges.tcp.outbox import PATIENCE_S, Outbox, Outboxes, Policy
from polybus.log.memory import MemoryLog
from polybus.services.memory import MemoryGate

LIMIT = 1000


class Peer:
    """A peer with a transport that takes this many bytes and then pauses."""

    def __init__(self, outboxes: Outboxes, room_bytes: int = 0) -> None:
        self.room_bytes = room_bytes
        self.written = b""
        self.lost: list[DroppedMessages] = []
        self.outbox = Outbox(outboxes, self.write, self.overflow)
        self.released = 0

    def write(self, data: Buffer) -> None:
        self.written += bytes(data)
        self.room_bytes -= len(data)
        if self.room_bytes <= 0:
            self.outbox.pause()

    def overflow(self, lost: DroppedMessages) -> None:
        self.lost.append(lost)

    def read(self, size: int) -> None:
        """The peer takes bytes: the transport has room again."""
        self.room_bytes = size
        if self.outbox.paused:
            self.outbox.resume()

    def hold(self, gate: Hashable) -> bool:
        return True

    def release(self, gate: Hashable) -> None:
        self.released += 1


class Turn:
    """Runs what was called soon when told to."""

    def __init__(self) -> None:
        self.soon: list[object] = []

    def __call__(self, callback: object) -> None:
        self.soon.append(callback)

    def run(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            assert callable(callback)
            callback()


def shared(policy: Policy = "disconnect") -> tuple[Outboxes, Turn]:
    turn = Turn()
    loop = asyncio.new_event_loop()
    memory = MemoryGate(MemoryLog(clock=lambda: 0, bytes_max=1), loop, bytes_max=1 << 30)
    loop.close()
    outboxes = Outboxes(turn, memory, policy=policy, bytes_max=LIMIT)
    return outboxes, turn


def batch(value: bytes, topic: str = "news", offset: int = 0) -> Batch:
    made = Batch.of(topic, [value])
    made.epoch, made.first_offset = 1, offset
    return made


def test_peers_that_are_sent_the_same_share_what_is_put_together() -> None:
    outboxes, turn = shared()
    written: list[Buffer] = []
    peers = [Outbox(outboxes, written.append, lambda lost: None) for _ in range(3)]
    one, other = bytes([1]) * 10, bytes([2]) * 20
    for outbox in peers:
        outbox.send(one)
        outbox.send(other)
    peers[2].send(b"more")
    turn.run()
    assert written == [one + other, one + other, one + other + b"more"]
    assert written[0] is written[1]
    for outbox in peers:
        outbox.send(one)
        outbox.send(one)
    turn.run()
    assert written[3:] == [one + one] * 3


def test_a_peer_that_was_behind_keeps_little_that_is_its_own() -> None:
    """Peers share what they wait for. Of 8 MiB, a write copies less than 1 %."""
    outboxes, turn = shared("wait")
    written: list[Buffer] = []
    outbox = Outbox(outboxes, written.append, lambda lost: None)
    outbox.pause()
    large = bytes(4 << 20)
    pieces = [b"small", b"er", large, *(bytes(10_000) for _ in range(400))]
    for data in pieces:
        outbox.send(data)
    outbox.resume()
    assert b"".join(written) == b"".join(pieces)
    assert written[0] == b"smaller" and written[1] is large
    assert max(map(len, written[2:])) < 80_000
    assert len(written) < len(pieces) / 4, "small ones are joined all the same"


def test_everything_of_a_turn_is_one_write() -> None:
    outboxes, turn = shared()
    peer = Peer(outboxes, room_bytes=10_000)
    for value in (b"a", b"b", b"c"):
        peer.outbox.send(value)
    assert peer.written == b""
    turn.run()
    assert (peer.written, peer.outbox.bytes, outboxes.ledger.bytes) == (b"abc", 0, 0)


def test_what_one_call_sends_is_one_write_before_the_next_turn() -> None:
    outboxes, turn = shared()
    peer = Peer(outboxes, room_bytes=10_000)

    def send(values: list[bytes]) -> None:
        for value in values:
            peer.outbox.send(value)
        assert peer.written == b""

    outboxes.together(send, [b"a", b"b"])
    assert (peer.written, peer.outbox.bytes, turn.soon) == (b"ab", 0, [])
    peer.outbox.send(b"c")
    turn.run()
    assert peer.written == b"abc", "turns continue as before"


def test_a_buffer_that_many_wait_for_is_counted_once() -> None:
    outboxes, turn = shared()
    peers = [Peer(outboxes) for _ in range(5)]
    for peer in peers:
        peer.outbox.pause()
    data = b"x" * 100
    for peer in peers:
        peer.outbox.send(data, (batch(b"x"),))
    assert outboxes.ledger.bytes == 100
    for peer in peers:
        peer.read(1000)
    turn.run()
    assert outboxes.ledger.bytes == 0
    assert all(peer.written == data for peer in peers)


def test_a_full_outbox_ends_in_one_complaint_and_holds_nothing() -> None:
    outboxes, _ = shared("disconnect")
    peer = Peer(outboxes)
    peer.outbox.pause()
    for n in range(11):
        peer.outbox.send(b"x" * 100, (batch(b"x", offset=n),))
    (lost,) = peer.lost
    assert lost.messages == 11
    assert peer.outbox.bytes == 0
    peer.outbox.close()
    assert outboxes.ledger.bytes == 0


def test_one_message_over_the_limit_is_not_dropped() -> None:
    policies: list[Policy] = ["disconnect", "drop-oldest", "wait"]
    for policy in policies:
        outboxes, _ = shared(policy)
        peer = Peer(outboxes)
        peer.outbox.pause()
        peer.outbox.send(b"x" * 2 * LIMIT, (batch(b"x"),))
        assert peer.lost == []
        peer.read(10_000)
        assert len(peer.written) == 2 * LIMIT


def test_drop_oldest_drops_messages_but_no_replies_and_tells_where_it_goes_on() -> None:
    outboxes, _ = shared("drop-oldest")
    peer = Peer(outboxes)
    peer.outbox.pause()
    peer.outbox.send(b"receipt")
    for n in range(20):
        peer.outbox.send(b"%02d" % n + b"x" * 98, (batch(b"x", offset=n),))
    assert peer.outbox.bytes <= LIMIT
    peer.read(100_000)
    assert peer.written.startswith(b"receipt") and peer.written.endswith(b"19" + b"x" * 98)
    (lost,) = peer.lost
    kept = peer.written.count(b"x" * 98)
    assert (lost.messages, lost.next_positions) == (20 - kept, {"news": (1, 20 - kept)})
    assert outboxes.ledger.bytes == 0


def test_publishers_wait_a_little_for_a_peer_that_may_be_disconnected() -> None:
    outboxes, _ = shared("disconnect")
    peer = Peer(outboxes)
    peer.outbox.pause()
    assert not peer.outbox.wants_wait()
    peer.outbox.send(b"x" * 300, (batch(b"x"),))
    assert peer.outbox.wants_wait()
    peer.outbox.add_waiter(peer)
    for _ in range(round(PATIENCE_S / 0.1) + 1):
        assert not peer.outbox.tick(0.1)
    assert peer.released == 1
    assert not peer.outbox.wants_wait()


async def test_a_replay_waits_for_a_slow_peer_as_long_as_it_takes() -> None:
    outboxes, _ = shared("disconnect")
    peer = Peer(outboxes)
    peer.outbox.pause()
    replay = asyncio.ensure_future(peer.outbox.drained())
    for _ in range(100):
        peer.outbox.tick(0.1)
        await asyncio.sleep(0)
    assert not replay.done()
    peer.read(1000)
    await replay


def test_a_waiting_publisher_is_released_when_the_peer_has_caught_up_or_gone() -> None:
    for leave in (False, True):
        outboxes, _ = shared("wait")
        peer = Peer(outboxes)
        peer.outbox.pause()
        peer.outbox.send(b"x" * 900, (batch(b"x"),))
        peer.outbox.add_waiter(peer)
        peer.outbox.tick(5.0)
        assert peer.released == 0
        if leave:
            peer.outbox.close()
        else:
            peer.read(10_000)
        assert peer.released == 1
        assert outboxes.congested == set()


def test_under_wait_only_one_that_stands_still_must_go() -> None:
    outboxes, _ = shared("wait")
    peer = Peer(outboxes)
    peer.outbox.pause()
    peer.outbox.send(b"x" * 900, (batch(b"x"),))
    assert not any(peer.outbox.tick(1.0) for _ in range(10))
    assert peer.outbox.tick(1.0)


class LedgerMachine(RuleBasedStateMachine):
    """Outboxes send, pause, resume and close in any order; what the ledger says stays true."""

    def __init__(self) -> None:
        super().__init__()
        self.outboxes, self.turn = shared("drop-oldest")
        self.peers = [Peer(self.outboxes, room_bytes=500) for _ in range(3)]
        self.shared_data = [b"s" * size for size in (1, 90, 400)]

    @rule(size=st.integers(0, 600), who=st.integers(0, 2), reply=st.booleans())
    def send(self, size: int, who: int, reply: bool) -> None:
        self.peers[who].outbox.send(b"x" * size, () if reply else (batch(b"x"),))

    @rule(index=st.integers(0, 2))
    def send_to_all(self, index: int) -> None:
        for peer in self.peers:
            peer.outbox.send(self.shared_data[index], (batch(b"x"),))

    @rule()
    def end_turn(self) -> None:
        self.turn.run()

    @rule(who=st.integers(0, 2), size=st.integers(1, 3000))
    def read(self, who: int, size: int) -> None:
        self.peers[who].read(size)

    @rule(who=st.integers(0, 2))
    def give_up(self, who: int) -> None:
        self.peers[who].outbox.give_up()

    @precondition(lambda self: len({id(peer) for peer in self.peers}) == 3)
    @rule(who=st.integers(0, 2))
    def leave(self, who: int) -> None:
        self.peers[who].outbox.close()
        self.peers[who] = Peer(self.outboxes, room_bytes=500)

    @invariant()
    def the_ledger_counts_what_waits(self) -> None:
        held: dict[int, int] = {}
        for peer in self.peers:
            if peer.outbox.paused:
                pending = (data for data, _ in peer.outbox._pending)
                waiting = [peer.outbox._written, *pending]
                held |= {id(data): len(data) for data in waiting}
        assert self.outboxes.ledger.bytes == sum(held.values())

    def teardown(self) -> None:
        for peer in self.peers:
            peer.outbox.close()
        assert self.outboxes.ledger.bytes == 0
        assert self.outboxes.ledger._holders == {}
        assert self.outboxes.congested == set()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class Held:
    """A publisher that a gate may hold, or not."""

    def __init__(self, holds: bool) -> None:
        self.holds = holds
        self.released = asyncio.Event()

    def hold(self, gate: Hashable) -> bool:
        return self.holds

    def release(self, gate: Hashable) -> None:
        self.released.set()


async def test_the_memory_gate_looks_again_only_for_publishers_that_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    memory = MemoryGate(MemoryLog(clock=lambda: 0, bytes_max=1), loop, bytes_max=1 << 30)
    looks: list[object] = []
    later = loop.call_later

    def counted(delay_s: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        looks.append(callback)
        return later(delay_s, callback, *arguments)

    monkeypatch.setattr(loop, "call_later", counted)
    for _ in range(3):
        memory.hold(Held(holds=False))
    assert looks == []
    held = Held(holds=True)
    memory.hold(held)
    memory.hold(Held(holds=True))
    assert len(looks) == 1
    await held.released.wait()
