"""What all connections share, bounded: unfinished messages, log lines about peers, read buffers."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from polybus.config import Limits
from polybus.edges.tcp.buffers import ReadBuffers
from polybus.edges.tcp.context import FREE_BYTES, Assembly
from polybus.services.bad_peers import BadPeers


class Sender:
    """A connection that is held and released."""

    def __init__(self) -> None:
        self.held = False

    def too_slow(self) -> None:
        raise AssertionError("the server's to call")

    def hold(self, gate: Hashable) -> bool:
        new, self.held = not self.held, True
        return new

    def release(self, gate: Hashable) -> None:
        self.held = False


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pool() -> tuple[Assembly, Clock]:
    clock = Clock()
    limits = Limits(assembly_bytes_max=1000, message_timeout_s=30, detect_timeout_s=10)
    return Assembly(limits, clock), clock


def test_a_message_must_go_on() -> None:
    assembly, clock = pool()
    still, moving, done = Sender(), Sender(), Sender()
    for sender in (still, moving, done):
        assembly.update(sender, 0, 100, completed=False)
    clock.now_s = 29
    assembly.update(moving, 100, 100 + 20 * 1024, completed=False)
    assembly.update(done, 100, 0, completed=True)
    clock.now_s = 31
    assert assembly.overdue() == [still]
    clock.now_s = 60
    assert assembly.overdue() == [still, moving]


def test_bytes_that_came_fast_buy_no_hours_of_silence() -> None:
    assembly, clock = pool()
    sender = Sender()
    assembly.update(sender, 0, 1, completed=False)
    assembly.update(sender, 1, 64 << 20, completed=False)
    clock.now_s = 31
    assert assembly.overdue() == [sender]
    assembly.excuse(sender)
    assert assembly.overdue() == []


def test_a_connection_must_speak_and_show_what() -> None:
    assembly, clock = pool()
    silent, slow, good = Sender(), Sender(), Sender()
    for sender in (silent, slow, good):
        assembly.connected(sender)
    for sender in (slow, good):
        assembly.detecting(sender)
    assembly.update(good, 0, 0, completed=True)
    clock.now_s = 11
    assert assembly.overdue() == [slow]
    clock.now_s = 61
    assert assembly.overdue() == [silent, slow]


def test_no_step_of_a_detection_gets_more_time() -> None:
    """Bytes of TLS, of the first head of HTTP inside it: ten seconds for all."""
    assembly, clock = pool()
    sender = Sender()
    assembly.connected(sender)
    for step in range(5):
        clock.now_s = step * 2
        assembly.detecting(sender)
    first = assembly.deadline_s(sender)
    assembly.update(sender, 0, 0, completed=True)
    assembly.detecting(sender, no_later_s=first)
    clock.now_s = 9.5
    assert assembly.overdue() == []
    clock.now_s = 9.9
    assert assembly.overdue() == [sender]


def test_a_full_pool_lets_one_go_on_and_then_the_next() -> None:
    assembly, _ = pool()
    first, second, third = Sender(), Sender(), Sender()
    size = FREE_BYTES + 900
    for sender in (first, second, third):
        assembly.update(sender, 0, size, completed=False)
    assert [one.held for one in (first, second, third)] == [False, False, True]
    # The second is the one that may continue; it finishes.
    assembly.update(second, size, size + 5000, completed=False)
    assert not second.held
    assembly.update(second, size + 5000, 0, completed=True)
    assert not third.held
    # What is small is never held.
    small = Sender()
    assembly.update(small, 0, FREE_BYTES, completed=False)
    assert not small.held


def test_room_that_others_leave_is_used() -> None:
    """The one that may continue stands still; whoever waits need not wait for it."""
    assembly, _ = pool()
    first, leader, waiting = Sender(), Sender(), Sender()
    size = FREE_BYTES + 900
    for sender in (first, leader, waiting):
        assembly.update(sender, 0, size, completed=False)
    assert waiting.held
    assembly.update(first, size, 0, completed=False)
    assembly.forget(first)
    assembly.update(leader, size, FREE_BYTES, completed=False)
    assert not waiting.held


# Small things


def test_log_lines_about_bad_peers_are_few_and_all_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    bad_peers = BadPeers(lines_per_s=10, clock_s=clock)
    for second in range(3):
        clock.now_s = second
        for _ in range(1000):
            bad_peers.record("peer", "goms", "goms.000001", "text")
    assert bad_peers.counts["goms.000001"] == 3000
    assert len(caplog.records) <= 30
    assert "991 more lines" in caplog.text


def test_a_log_line_about_a_bad_peer_is_short(caplog: pytest.LogCaptureFixture) -> None:
    """goMS names all topics that it refuses: 1,024 of 255 bytes each."""
    BadPeers(lines_per_s=10, clock_s=Clock()).record("peer", "goms", "goms.001001", "x" * 261_120)
    assert 100 < len(caplog.messages[0]) < 1000


def test_a_read_buffer_is_used_again_only_when_nobody_refers_to_it() -> None:
    buffers = ReadBuffers(64)
    buffers.view[:5] = b"hello"
    kept = memoryview(buffers.current)[:5]
    first = id(buffers.current)
    for _ in range(200):
        buffers.replace()
        assert id(buffers.current) != first
        buffers.view[:5] = b"other"
    assert bytes(kept) == b"hello"
    kept.release()
    seen = set()
    for _ in range(200):
        buffers.replace()
        seen.add(id(buffers.current))
    assert first in seen
