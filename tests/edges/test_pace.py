"""Pace: when the loop rests, and when it must not."""

from __future__ import annotations

import weakref
from itertools import pairwise

import pytest

from polybus.edges.tcp.connection import FULL_READS
from polybus.edges.tcp.pace import (
    BUSY_TURNS,
    FULL_BYTES,
    MUCH_BYTES,
    PAUSE_S_FULL,
    PAUSE_S_LEAST,
    PAUSE_S_MAX,
    REST_S_MAX,
    RESTS_MAX,
    SMALL_BYTES,
    SMALL_S,
    TURNS_WITHOUT,
    VAIN_RESTS_MAX,
    WAITED_PART,
    WAITED_S,
    Pace,
)

MESSAGE_BYTES = 100
TURN_S = 15e-6


class Loop:
    """A loop whose turns are made by the test; `rests` has the number of each turn with a rest."""

    def __init__(self, overslept_s: float = 0.0) -> None:
        self.now_s = 1.0
        self._overslept_s = overslept_s
        self.turn_count = 0
        self.rests: list[int] = []
        self.pause_s = 0.0
        self.pace = Pace(clock_s=lambda: self.now_s, sleep=self._rest)

    def _rest(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self.rests.append(self.turn_count)
        self.now_s += pause_s + self._overslept_s

    @property
    def has_just_rested(self) -> bool:
        return bool(self.rests) and self.rests[-1] == self.turn_count

    def turn(
        self,
        waited_s: float = 0.0,
        *,
        readers: int = 1,
        read_bytes: int = MESSAGE_BYTES,
        rested_bytes: int | None = None,
        took_s: float = TURN_S,
        is_narrow: bool = True,
    ) -> None:
        """Every reader reads so much, or another amount if there was a rest; then we write."""
        self.turn_count += 1
        self.now_s += waited_s
        for reader in range(readers):
            self.pace.before_read(reader)
            self.now_s += took_s / readers
            rested = self.has_just_rested and rested_bytes is not None
            came = rested_bytes or 0 if rested else read_bytes
            self.pace.after_read(reader, came, is_narrow=is_narrow)
        self.write()

    def write(self, waited_s: float = 0.0) -> None:
        self.now_s += waited_s
        self.pace.before_writes()
        self.pace.after_writes()


def test_a_loop_that_waits_for_its_peers_never_rests() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(waited_s=2 * WAITED_S)
    assert not loop.rests


def test_a_loop_kept_busy_by_small_reads_rests_every_turn_while_that_brings_more() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(rested_bytes=5 * MESSAGE_BYTES)
    assert loop.rests[0] > BUSY_TURNS
    assert loop.rests == list(range(loop.rests[0], 101))


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_now_and_then_there_are_enough_turns_without_a_rest_for_a_window_to_be_seen_full(
    readers: int,
) -> None:
    """Or else one who sent little, and now sends much, would be kept to a small window for ever."""
    loop = Loop()
    for _ in range(10 * RESTS_MAX):
        loop.turn(readers=readers, rested_bytes=5 * MESSAGE_BYTES)
    awake = [after - before - 1 for before, after in pairwise(loop.rests)]
    assert max(awake[:RESTS_MAX]) >= FULL_READS
    assert len(loop.rests) > 0.75 * loop.turn_count


def test_with_many_readers_few_turns_without_a_rest_are_as_many_reads() -> None:
    loop = Loop()
    for _ in range(2 * RESTS_MAX):
        loop.turn(readers=64, rested_bytes=5 * MESSAGE_BYTES)
    assert len(loop.rests) > 0.97 * loop.turn_count


def test_one_rest_serves_all_readers_of_a_turn() -> None:
    loop = Loop()
    for _ in range(50):
        loop.turn(readers=64, rested_bytes=5 * MESSAGE_BYTES)
    assert len(loop.rests) == len(set(loop.rests)) > 0


def test_rests_get_longer_while_they_bring_more_and_shorter_when_the_loop_waits() -> None:
    loop = Loop()
    while not loop.rests:
        loop.turn()
    assert loop.pause_s == PAUSE_S_LEAST
    for _ in range(50):
        loop.turn(read_bytes=20 * MESSAGE_BYTES)
    assert loop.pause_s == PAUSE_S_MAX
    for _ in range(3):
        loop.turn(waited_s=2 * WAITED_S)
    while not loop.has_just_rested:
        loop.turn()
    assert PAUSE_S_LEAST <= loop.pause_s < PAUSE_S_MAX / 2


def test_for_one_who_sends_much_rests_get_longer_until_they_fill_the_window_then_shorter() -> None:
    """While the window is full TCP makes large packets of small writes; more rest is only delay."""
    loop = Loop()
    while not loop.rests:
        loop.turn()
    for _ in range(10):
        loop.turn(rested_bytes=MUCH_BYTES)
    assert loop.pause_s == PAUSE_S_FULL
    pauses = []
    for _ in range(30):
        loop.turn(rested_bytes=FULL_BYTES)
        pauses.append(loop.pause_s)
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] == PAUSE_S_LEAST


@pytest.mark.parametrize(("readers", "is_narrow"), [(2, True), (1, False)])
def test_nobody_else_waits_longer_for_a_window_to_be_full(readers: int, is_narrow: bool) -> None:
    loop = Loop()
    for _ in range(30):
        loop.turn(readers=readers, rested_bytes=MUCH_BYTES, is_narrow=is_narrow)
    assert loop.has_just_rested
    assert loop.pause_s == PAUSE_S_MAX


def test_after_a_full_window_a_long_turn_is_no_reason_for_a_long_rest() -> None:
    loop = Loop()
    for _ in range(50):
        loop.turn(rested_bytes=FULL_BYTES, took_s=SMALL_S / 2)
    assert loop.has_just_rested
    assert loop.pause_s == PAUSE_S_LEAST


def test_after_a_long_turn_a_rest_is_as_long() -> None:
    for took_s, pause_s in ((1e-6, PAUSE_S_LEAST), (2e-4, 2e-4), (2e-3, REST_S_MAX)):
        loop = Loop()
        while not loop.rests:
            loop.turn(readers=4, took_s=took_s)
        assert abs(loop.pause_s - pause_s) < 1e-9


def test_what_is_written_later_is_no_part_of_a_turn() -> None:
    """A peer that publishes again a moment after each receipt waits for us, and we for the disk."""
    loop = Loop()
    for number in range(1000):
        loop.turn(waited_s=100e-6, read_bytes=100 + number % 10 * 100)
        loop.write(waited_s=2e-3)
    assert not loop.rests


def test_writing_for_others_now_and_then_keeps_nobody_from_being_read_at_once() -> None:
    loop = Loop()
    for number in range(1000):
        loop.turn(waited_s=100e-6, read_bytes=100 + number % 10 * 100)
        for _ in range(30):
            loop.write(waited_s=3e-3)
    assert not loop.rests


@pytest.mark.parametrize(("part", "rests"), [(0.9, True), (1.1, False)])
def test_a_moment_after_a_long_turn_is_no_wait(part: float, rests: bool) -> None:
    """To ask for many sockets takes longer than to ask for one."""
    loop = Loop()
    for _ in range(100):
        loop.turn(part * WAITED_PART * 1e-3, readers=64, took_s=1e-3)
    assert bool(loop.rests) == rests


def test_busy_peers_are_a_reason_to_rest_though_it_brings_only_half_as_much_again() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(readers=64, took_s=1e-3, rested_bytes=MESSAGE_BYTES * 8 // 5)
    assert loop.rests == list(range(loop.rests[0], 101))


def test_large_reads_are_never_delayed() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(read_bytes=SMALL_BYTES)
    assert not loop.rests


def test_one_who_fills_the_window_without_a_rest_is_left_alone_to_get_a_larger_one() -> None:
    """The first turns took long, as they do: then what comes after a rest comes soon."""
    loop = Loop()
    for _ in range(BUSY_TURNS + 1):
        loop.turn(read_bytes=FULL_BYTES, took_s=1.5 * SMALL_S)
    for _ in range(200):
        loop.turn(read_bytes=FULL_BYTES, rested_bytes=FULL_BYTES + MESSAGE_BYTES)
    assert len(loop.rests) <= VAIN_RESTS_MAX


def test_messages_that_are_much_work_are_not_delayed() -> None:
    """Hundreds of topics in a small window: it must be seen to be full without a rest."""
    loop = Loop()
    for _ in range(100):
        loop.turn(took_s=1.1 * SMALL_S)
    assert not loop.rests


def test_the_first_message_after_a_wait_is_read_at_once() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(rested_bytes=5 * MESSAGE_BYTES)
    loop.turn(waited_s=2 * WAITED_S)
    assert not loop.has_just_rested


@pytest.mark.parametrize(("readers", "took_s"), [(1, TURN_S), (64, 1e-3)])
def test_peers_that_wait_for_our_answer_are_not_delayed_for_long(
    readers: int, took_s: float
) -> None:
    """A rest in vain costs them time: after a few there is none for many turns."""
    loop = Loop()
    for _ in range(1000):
        loop.turn(readers=readers, took_s=took_s, rested_bytes=MESSAGE_BYTES * 7 // 5)
    assert 0 < len(loop.rests) <= VAIN_RESTS_MAX * (1 + 1000 // TURNS_WITHOUT)


@pytest.mark.parametrize(("message_s", "is_load"), [(1e-4, False), (3e-5, False), (2e-6, True)])
def test_only_peers_that_keep_the_loop_busy_without_rests_are_a_reason_to_rest(
    message_s: float, is_load: bool
) -> None:
    """After a rest there is a message in any case: what counts is how many."""
    loop = Loop(overslept_s=60e-6)
    read_count = 0
    while loop.now_s < 1.2:
        if loop.turn_count % 500 < 8:
            # A hiccup now and then: turns that follow one another at once.
            loop.turn()
            continue
        loop.turn_count += 1
        loop.now_s = max(loop.now_s, 1.0 + (read_count + 1) * message_s)
        loop.pace.before_read(0)
        count = int((loop.now_s - 1.0) / message_s) - read_count
        read_count += count
        loop.now_s += TURN_S
        loop.pace.after_read(0, count * MESSAGE_BYTES)
        loop.pace.after_writes()
    often = len(loop.rests) / loop.turn_count
    assert often > 0.5 if is_load else often < 0.05


def test_a_reader_that_is_gone_is_not_kept() -> None:
    class Reader:
        pass

    reader = Reader()
    gone = weakref.ref(reader)
    loop = Loop()
    loop.pace.after_read(reader, MESSAGE_BYTES)
    loop.pace.forget(reader)
    del reader
    assert gone() is None
