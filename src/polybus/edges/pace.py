"""Pace: many small reads cost more than few large ones, so under load the loop rests a moment.

A peer that sends one message a write makes the loop turn once for every few messages, and a turn
costs the same for one message as for a hundred. When turn follows turn without a wait, and each
reads little, the loop rests for about PAUSE_S before it reads on: what comes in meanwhile is read
at once. An idle bus never rests: a message that the loop had to wait for is read when it comes.

Peers that wait for our answer send nothing meanwhile. So what a rest brings in is compared with
what came without one; if it is not clearly more a few times, there is none for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep

PAUSE_S = 50e-6
"""What is asked for; Linux makes it about twice as much."""
WAITED_S = 8e-6
"""A turn that begins later than this after the last one ended had to wait for its peers."""
BUSY_TURNS = 4
SMALL_BYTES = 32 << 10
GAIN = 1.5
"""So many times as much must come in with a rest as without."""
VAIN_RESTS_MAX = 4
TURNS_WITHOUT = 256


class Pace:
    """Told of every read and of the writes' end. A second read of a connection is a new turn."""

    __slots__ = (
        "_busy_turns",
        "_bytes",
        "_clock_s",
        "_ended_s",
        "_read",
        "_rested",
        "_sleep",
        "_usual_bytes",
        "_vain_rests",
    )

    def __init__(
        self,
        clock_s: Callable[[], float] = perf_counter,
        sleep: Callable[[float], None] = sleep,
    ) -> None:
        self._clock_s = clock_s
        self._sleep = sleep
        self._read: set[object] = set()
        self._bytes = 0
        self._ended_s = 0.0
        self._busy_turns = 0
        self._usual_bytes = 0.0
        self._rested = False
        self._vain_rests = 0

    def before_read(self, reader: object) -> None:
        """The reader's socket has bytes: rest first, if more will be there afterwards."""
        if reader not in self._read:
            return
        waited = self._clock_s() - self._ended_s > WAITED_S
        turn_bytes, self._bytes = self._bytes, 0
        is_small = turn_bytes < SMALL_BYTES * len(self._read)
        self._read.clear()
        rested, self._rested = self._rested, False
        if waited or not is_small:
            self._busy_turns = min(self._busy_turns, 0)
            return
        if rested:
            self._judge(turn_bytes)
        elif self._busy_turns > 0:
            self._usual_bytes += (turn_bytes - self._usual_bytes) / BUSY_TURNS
        else:
            self._usual_bytes = turn_bytes
        self._busy_turns += 1
        if self._busy_turns > BUSY_TURNS:
            self._rested = True
            self._sleep(PAUSE_S)

    def _judge(self, turn_bytes: int) -> None:
        """See whether the last rest was worth it."""
        if turn_bytes >= GAIN * self._usual_bytes:
            self._vain_rests = 0
            return
        self._vain_rests += 1
        if self._vain_rests == VAIN_RESTS_MAX:
            self._vain_rests = 0
            self._busy_turns = -TURNS_WITHOUT

    def after_read(self, reader: object, read_bytes: int) -> None:
        """What was read is handled."""
        self._read.add(reader)
        self._bytes += read_bytes
        self._ended_s = self._clock_s()

    def after_writes(self) -> None:
        """Everything of this turn is written."""
        self._ended_s = self._clock_s()
