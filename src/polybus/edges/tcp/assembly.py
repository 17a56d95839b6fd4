"""Unfinished messages: their memory is limited in total, and each has a timeout.

A connection may hold FREE_BYTES of an unfinished message. Beyond that all connections share one
pool, `assembly-bytes-max`. When the pool is full, connections that need more wait, all but one: it
can finish its message, so there is no deadlock.

After `message-timeout-s` a message must have arrived at RATE_LEAST bytes a second on average. A
connection must show its protocol within `detect-timeout-s` of its first byte, and send that byte
within SILENT_S.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from polybus.bus.subscriptions import Holdable
from polybus.config import Limits

FREE_BYTES = 64 << 10
RATE_LEAST = 1 << 10
SILENT_S = 60.0
GATE = "assembly"


class Assembling(Holdable, Protocol):
    """A connection that receives messages."""

    def too_slow(self) -> None: ...


class Assembly:
    """Counts and times the unfinished messages of all connections."""

    def __init__(self, limits: Limits, clock_s: Callable[[], float]) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._deadlines: dict[Assembling, float] = {}
        self._pool_bytes = 0
        self._leader: Assembling | None = None
        self._waiting: deque[Assembling] = deque()

    def connected(self, connection: Assembling) -> None:
        """Expect a first byte."""
        self._deadlines[connection] = self._clock_s() + SILENT_S

    def detecting(self, connection: Assembling) -> None:
        """Its first byte has arrived: expect it to show its protocol."""
        self._deadlines[connection] = self._clock_s() + self._limits.detect_timeout_s

    def update(self, connection: Assembling, before: int, now: int, *, completed: bool) -> None:
        """Its unfinished message grew from `before` to `now` bytes; `completed`: one has ended."""
        if not now:
            self._deadlines.pop(connection, None)
        elif completed or not before:
            self._deadlines[connection] = self._clock_s() + self._limits.message_timeout_s
        elif connection in self._deadlines:
            # Bytes that arrived fast do not extend the deadline without limit.
            later_s = self._deadlines[connection] + max(now - before, 0) / RATE_LEAST
            latest_s = self._clock_s() + self._limits.message_timeout_s
            self._deadlines[connection] = min(later_s, latest_s)
        if before > FREE_BYTES or now > FREE_BYTES:
            self._count(connection, max(before - FREE_BYTES, 0), max(now - FREE_BYTES, 0))

    def excuse(self, connection: Assembling) -> None:
        """It was not read from: its deadline begins anew."""
        if connection in self._deadlines:
            self._deadlines[connection] = self._clock_s() + self._limits.message_timeout_s

    def forget(self, connection: Assembling) -> None:
        """It is closed; an update to 0 bytes came before."""
        self._deadlines.pop(connection, None)
        if connection in self._waiting:
            self._waiting.remove(connection)
        if self._leader is connection:
            self._leader = None
        self._let_in()

    def overdue(self) -> list[Assembling]:
        """The connections whose deadline has passed."""
        self._let_in()
        now = self._clock_s()
        return [one for one, deadline in self._deadlines.items() if deadline < now]

    def _count(self, connection: Assembling, before: int, now: int) -> None:
        self._pool_bytes += now - before
        if not now and self._leader is connection:
            self._leader = None
        if now > before and self._pool_bytes > self._limits.assembly_bytes_max:
            if self._leader is None:
                self._leader = connection
            elif self._leader is not connection and connection.hold(GATE):
                self._waiting.append(connection)
        else:
            self._let_in()

    def _let_in(self) -> None:
        """Release one that waits, if there is room or no other connection can finish."""
        crowded = self._pool_bytes > self._limits.assembly_bytes_max
        if self._waiting and not (crowded and self._leader):
            connection = self._waiting.popleft()
            if crowded:
                self._leader = connection
            connection.release(GATE)
