"""Pace: when the loop rests, and when it must not."""

from __future__ import annotations

from polybus.edges.pace import (
    BUSY_TURNS,
    GAIN,
    PAUSE_S,
    SMALL_BYTES,
    TURNS_WITHOUT,
    VAIN_RESTS_MAX,
    WAITED_S,
    Pace,
)

MESSAGE_BYTES = 100


class Loop:
    """A loop whose turns are made by the test; `rests` has the number of each turn with a rest."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.turn_count = 0
        self.rests: list[int] = []
        self.pace = Pace(clock_s=lambda: self.now_s, sleep=self._rest)

    def _rest(self, pause_s: float) -> None:
        assert pause_s == PAUSE_S
        self.rests.append(self.turn_count)
        self.now_s += pause_s

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
    ) -> None:
        """Every reader reads so much, or another amount if there was a rest; then we write."""
        self.turn_count += 1
        self.now_s += waited_s
        for reader in range(readers):
            self.pace.before_read(reader)
            rested = self.has_just_rested and rested_bytes is not None
            self.pace.after_read(reader, rested_bytes or 0 if rested else read_bytes)
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


def test_one_rest_serves_all_readers_of_a_turn() -> None:
    loop = Loop()
    for _ in range(50):
        loop.turn(readers=64, rested_bytes=5 * MESSAGE_BYTES)
    assert len(loop.rests) == len(set(loop.rests)) > 0


def test_large_reads_are_never_delayed() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(read_bytes=SMALL_BYTES)
    assert not loop.rests


def test_the_first_message_after_a_wait_is_read_at_once() -> None:
    loop = Loop()
    for _ in range(100):
        loop.turn(rested_bytes=5 * MESSAGE_BYTES)
    loop.turn(waited_s=2 * WAITED_S)
    assert not loop.has_just_rested


def test_peers_that_wait_for_our_answer_are_not_delayed_for_long() -> None:
    """A rest in vain costs them time: after a few there is none for many turns."""
    loop = Loop()
    for _ in range(1000):
        loop.turn(rested_bytes=int(GAIN * MESSAGE_BYTES) - 1)
    assert 0 < len(loop.rests) <= VAIN_RESTS_MAX * (1 + 1000 // TURNS_WITHOUT)
