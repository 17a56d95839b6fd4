"""Where a subscription to one topic stands: what to ask for next, and whether something is missing.

The bus starts a subscription exactly where it was asked to, or says where else. So every message
is where the one before it ended, and anything else is a gap. A place *before* the expected one is
a gap too: the bus lost its newest messages in a crash, and gives their offsets to others.
"""

from __future__ import annotations

from polybus.client.message import Position


class Tracker:
    """One topic of one subscription, over all its connections."""

    __slots__ = ("_expected", "_gap", "_start")

    def __init__(self, start: str) -> None:
        self._start = start
        self._expected: Position | None = None
        self._gap = False

    def resume(self) -> str:
        """Where to subscribe from now, in the bus's words."""
        return str(self._expected) if self._expected is not None else self._start

    def told(self, position: Position) -> None:
        """The bus said where the next message stands."""
        if self._expected is not None and position != self._expected:
            self._gap = True
        self._expected = position

    def took(self, count: int, position: Position | None) -> bool:
        """`count` messages came, the first at `position`; say whether there is a gap before it."""
        if position is not None:
            self.told(position)
        if self._expected is not None:
            epoch, offset = self._expected
            self._expected = Position(epoch, offset + count)
        gap, self._gap = self._gap, False
        return gap

    def lost(self) -> None:
        """The connection broke.

        A subscription to the latest messages that never learned where it stood cannot ask for what
        it misses now; it says so instead.
        """
        if self._expected is None and self._start == "latest":
            self._gap = True
