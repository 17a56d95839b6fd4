"""Pace: the loop rests briefly under load, so that it reads more at once.

A peer that sends one message per write causes a loop turn for every few messages, and a turn costs
the same for one message as for a hundred. When turn follows turn without a wait and each reads
little, the loop rests before it reads on, and then reads what has arrived meanwhile. An idle bus
never rests: it reads a message that it had to wait for at once.

Peers that wait for our answer send nothing during a rest. So the yield of a rest is compared with
that of turns without one. While it is clearly larger, rests grow up to PAUSE_S_MAX. After a few
rests that yield nothing, the loop does not rest for a while. After a long turn the rest is as long
as the turn, up to REST_S_MAX.

While a local peer's window is full, TCP joins its writes into few large packets, and the peer is
several times as fast (`local`). So a single peer that sends much into a narrow window gets longer
rests, up to PAUSE_S_FULL, until the window is full. Then rests shrink: they only delay the peer.
"""

from collections.abc import Callable
from time import perf_counter, sleep

PAUSE_S_LEAST = 50e-6
"""The requested time; Linux adds about as much again."""
PAUSE_S_MAX = 500e-6
PAUSE_S_FULL = 2e-3
REST_S_MAX = 1e-3
MUCH_BYTES = 16 << 10
FULL_BYTES = 48 << 10
"""From how many bytes per reader and turn on a read is large, or the window full."""
SHORTER = 0.8
WAITED_S = 8e-6
WAITED_PART = 1 / 8
"""A turn that begins later than this after the last one ended had to wait for its peers. The limit
is the larger of the two: polling many sockets takes longer, in proportion to the turn."""
BUSY_TURNS = 4
SMALL_BYTES = 96 << 10
SMALL_S = 600e-6
"""A turn is small below both, per reader. A peer that sends to hundreds of topics takes longer to
handle; it needs a larger window, which no peer gets after a rest."""
SLACK = 1.4
"""A rest pays if the loop would otherwise be busy for at least 1 / SLACK of the time."""
MORE = 1.25
"""The least factor by which a rest must increase the yield."""
VAIN_RESTS_MAX = 4
TURNS_WITHOUT = 256
RESTS_MAX = 512
TURNS_AWAKE = 128
"""After RESTS_MAX rests come turns without a rest. They measure the usual yield again, and find
peers that fill their window without a rest. With more than four readers there are fewer such turns,
since each is long."""


class Pace:
    """Decides on rests. It is called around every read and around the writes of a turn.

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
        # How long this turn's bytes took to arrive; 0: the loop had to wait for them.
        self._gathered_s = 0.0
        self._pause_s = PAUSE_S_LEAST
        self._is_narrow = False
        self._busy_turns = 0
        # The yield of busy turns without a rest, and how long it takes to arrive.
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
            # Gradually: other processes make even a busy loop wait now and then.
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
        """Check whether the last rest paid.

        Busy peers send at the same rate during a rest. If clearly less arrived, the loop would
        have waited for them anyway, and the rest only delayed their messages.
        """
        times = gathered_s / self._usual_s if self._usual_s else 2.0
        # The yield of busy peers grows with the time; that of peers that wait for us does not.
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
        """The bytes read were handled."""
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
            # Nothing was read meanwhile: the wait is not part of a turn.
            self._began_s += waited_s

    def after_writes(self) -> None:
        """Everything of this turn is written."""
        self._ended_s = self._clock_s()


def _learned(usual: float, now: float) -> float:
    """A moving average; a value far above it counts as twice the average."""
    usual = usual or now
    return usual + (min(now, 2 * usual) - usual) / BUSY_TURNS
