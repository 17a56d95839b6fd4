"""Pace: many small reads cost more than few large ones, so under load the loop rests a moment.

A peer that sends one message a write makes the loop turn once for every few messages, and a turn
costs the same for one message as for a hundred. When turn follows turn without a wait, and each
reads little, the loop rests before it reads on: what comes in meanwhile is read at once. An idle
bus never rests: a message that the loop had to wait for is read when it comes.

Peers that wait for our answer send nothing meanwhile. So what a rest brings in is compared with
what came without one: while it is clearly more, rests get longer, up to PAUSE_S_MAX; if it is not a
few times, there is none for a while. After a long turn a rest is as long, up to REST_S_MAX.

While a peer's window is full, TCP puts what it writes into few large packets, and it is several
times as fast (`local`). So for one that sends much, alone in its turn and into a narrow window, a
rest may be longer until that is full, up to PAUSE_S_FULL; and once it is full, more rest only makes
the peer wait, so rests get shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, sleep

PAUSE_S_LEAST = 50e-6
"""What is asked for; Linux adds about as much again."""
PAUSE_S_MAX = 500e-6
PAUSE_S_FULL = 2e-3
REST_S_MAX = 1e-3
MUCH_BYTES = 16 << 10
FULL_BYTES = 48 << 10
"""What a reader brings in a turn is much, or a full window, from here on."""
SHORTER = 0.8
WAITED_S = 8e-6
WAITED_PART = 1 / 8
"""A turn that begins later than this after the last one ended had to wait for its peers: so many
seconds, or such a part of that turn, since asking for many sockets takes the longer."""
BUSY_TURNS = 4
SMALL_BYTES = 96 << 10
SMALL_S = 600e-6
"""What a reader brings in a turn is small if it is less than this, and not as long to work through:
who sends to hundreds of topics is helped by a larger window, which nobody gets after a rest."""
SLACK = 1.4
"""A rest is worth it if without one the loop would be at work for 1 / SLACK of the time."""
MORE = 1.25
"""At least so many times as much must a rest bring: a window that is full anyway needs none."""
VAIN_RESTS_MAX = 4
TURNS_WITHOUT = 256
RESTS_MAX = 512
TURNS_AWAKE = 128
"""After so many rests there are some turns without. They show what is usual now, and who sends so
much at once by now that its window is full without a rest too. With more than four readers turns
are long and they are fewer: then nobody is seen to fill it here."""


class Pace:
    """Told of every read and of the writes' end.

    A turn begins with a read that the loop had to wait for, or with a second read of a connection.
    """

    __slots__ = (
        "_began_s",
        "_busy_turns",
        "_bytes",
        "_clock_s",
        "_ended_s",
        "_gathered_s",
        "_is_narrow",
        "_pause_s",
        "_read",
        "_rests",
        "_sleep",
        "_usual_bytes",
        "_usual_s",
        "_vain_rests",
        "rested",
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
        self._began_s = 0.0
        self._ended_s = 0.0
        # How long the bytes of this turn took to come; 0: the loop had to wait for them.
        self._gathered_s = 0.0
        self._pause_s = PAUSE_S_LEAST
        self._is_narrow = False
        self._busy_turns = 0
        # What turns without a rest bring while the loop is busy, and how long that takes to come.
        self._usual_bytes = 0.0
        self._usual_s = 0.0
        # Whether there was a rest before the reads of this turn.
        self.rested = False
        self._rests = 0
        self._vain_rests = 0

    def before_read(self, reader: object) -> None:
        """The reader's socket has bytes: rest first, if more will be there afterwards."""
        now_s = self._clock_s()
        turn_s = self._ended_s - self._began_s
        waited = now_s - self._ended_s > max(WAITED_S, turn_s * WAITED_PART)
        if not waited and reader not in self._read:
            return
        turn_bytes, self._bytes = self._bytes, 0
        gathered_s = self._gathered_s
        self._gathered_s = 0.0 if waited else now_s - self._began_s
        self._began_s = now_s
        readers = len(self._read)
        is_small = turn_bytes < SMALL_BYTES * readers and turn_s < SMALL_S * readers
        is_full = turn_bytes >= FULL_BYTES * readers
        self._read.clear()
        rested, self.rested = self.rested, False
        if rested:
            self._judge(turn_bytes, gathered_s, readers, is_full=is_full)
        if not is_small:
            return
        if waited:
            # Not all at once: whoever else uses the processor makes a busy loop wait now and then.
            self._busy_turns -= self._busy_turns > 0
            self._pause_s = max(self._pause_s / 2, PAUSE_S_LEAST)
            return
        if not rested and gathered_s:
            self._usual_bytes = _learned(self._usual_bytes, turn_bytes)
            self._usual_s = _learned(self._usual_s, gathered_s)
        self._busy_turns = min(self._busy_turns + 1, 2 * BUSY_TURNS)
        if self._busy_turns > BUSY_TURNS:
            least_s = 0.0 if is_full else min(turn_s, REST_S_MAX)
            self._rest(max(least_s, self._pause_s), readers)

    def _rest(self, pause_s: float, readers: int) -> None:
        self._sleep(pause_s)
        self.rested = True
        self._rests += 1
        if self._rests == RESTS_MAX:
            self._rests = 0
            self._busy_turns = -min(TURNS_AWAKE, 4 * TURNS_AWAKE // readers)
        now_s = self._clock_s()
        self._gathered_s += now_s - self._began_s
        self._began_s = now_s

    def _judge(self, turn_bytes: int, gathered_s: float, readers: int, *, is_full: bool) -> None:
        """See whether the last rest was worth it.

        Peers that keep the loop busy send as much in a second while it rests. If it was clearly
        less, the loop would have had to wait for them, and each message came later for it.
        """
        times = gathered_s / self._usual_s if self._usual_s else 2.0
        # Peers that wait for us send as much as ever, busy ones so many times as much.
        if turn_bytes >= max((1 + times) / 2, times / SLACK, MORE) * self._usual_bytes:
            self._vain_rests = 0
            if is_full:
                self._pause_s = max(SHORTER * self._pause_s, PAUSE_S_LEAST)
                return
            may_fill = readers == 1 and self._is_narrow and turn_bytes >= MUCH_BYTES
            self._pause_s = min(2 * self._pause_s, PAUSE_S_FULL if may_fill else PAUSE_S_MAX)
            return
        self._pause_s = PAUSE_S_LEAST
        self._vain_rests += 1
        if self._vain_rests == VAIN_RESTS_MAX:
            self._vain_rests = 0
            self._busy_turns = -TURNS_WITHOUT

    def after_read(self, reader: object, read_bytes: int, *, is_narrow: bool = False) -> None:
        """What was read is handled; the reader has a narrow window, or not."""
        self._is_narrow = is_narrow
        self._read.add(reader)
        self._bytes += read_bytes
        self._ended_s = self._clock_s()

    def forget(self, reader: object) -> None:
        """The reader is gone."""
        self._read.discard(reader)

    def before_writes(self) -> None:
        """Something is about to be written."""
        waited_s = self._clock_s() - self._ended_s
        if waited_s > WAITED_S:
            # Nobody was read meanwhile: this belongs to no turn, and makes none longer.
            self._began_s += waited_s

    def after_writes(self) -> None:
        """Everything of this turn is written."""
        self._ended_s = self._clock_s()


def _learned(usual: float, now: float) -> float:
    """What is usual, given one more turn; one that is far above is not taken at its word."""
    usual = usual or now
    return usual + (min(now, 2 * usual) - usual) / BUSY_TURNS
