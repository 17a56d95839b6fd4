# cython: annotation_typing=False
"""Deliveries and confirmations, summed per session and topic between two messages of `$events`.

A pack costs a few additions. `events` writes the sums.

Compiled as it is (tallies.pxd), or run as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython

from polybus.names import ACCOUNT, full

EVENTS_TOPIC = "$events"
# How many times of delivery a session remembers, to measure the time until confirmation.
MARKS_MAX = 32
OWN_TOPICS_MAX = 10_000


def events_topic(account: str) -> str:
    """The topic of an account's events; those of administrators go to the bus's own."""
    return full(ACCOUNT if account.startswith("$") else account, EVENTS_TOPIC)


class ReportedPack(Protocol):
    """The fields of a pack that events report."""

    @property
    def topic(self) -> str: ...
    @property
    def count(self) -> int: ...


class ReportedSession(Protocol):
    """The fields of a session that events report. Sessions use events, so they are not imported."""

    @property
    def digest(self) -> bytes: ...
    @property
    def account(self) -> str: ...
    @property
    def follows(self) -> Collection[str]: ...
    @property
    def shown_to(self) -> int: ...
    @property
    def pack_count(self) -> int: ...


@cython.cclass
class Run:
    """Packs of one topic that were delivered since `time_us`."""

    __slots__ = ("count", "first", "last", "messages", "time_us")

    def __init__(self, first: int, time_us: int) -> None:
        self.first = first
        self.time_us = time_us
        self.last = 0
        self.count = 0
        self.messages = 0


@cython.cclass
class Tally:
    """Deliveries and confirmations of one session since the last message.

    Attributes:
        runs: the packs delivered, by topic.
        timed: confirmed packs whose delivery time is known; `wait_us` is how long they took.
        marks: (last number, time) of each delivery; kept beyond a message.
    """

    __slots__ = (
        "confirmed",
        "first",
        "last",
        "marks",
        "pending",
        "repeated",
        "runs",
        "time_us",
        "timed",
        "wait_us",
        "wait_us_max",
    )

    def __init__(self, marks: list[tuple[int, int]]) -> None:
        self.runs: dict[str, Run] = {}
        self.repeated = 0
        self.confirmed = 0
        self.first = 0
        self.last = 0
        self.time_us = 0
        self.timed = 0
        self.wait_us = 0
        self.wait_us_max = 0
        self.marks = marks
        self.pending = False


@cython.cclass
class Tallies:
    """The tallies of all sessions.

    A session that follows its own `$events` is left out: each report would cause another.
    """

    def __init__(self, clock_us: Callable[[], int], *, enabled: bool) -> None:
        self._clock_us = clock_us
        self._enabled = enabled
        self._tallies: dict[ReportedSession, Tally] = {}
        self._pending: list[ReportedSession] = []
        # Cached for each account: every pack needs it.
        self._own_topics: dict[str, str] = {}

    def delivered(
        self, session: ReportedSession, packs: Sequence[tuple[int, ReportedPack]]
    ) -> None:
        """Packs are delivered to a session; those up to `shown_to` were delivered before."""
        if not self._enabled or self._causes_itself(session):
            return
        tally = self._touched(session)
        now_us = self._clock_us()
        number = 0
        shown_to = session.shown_to
        for number, content in packs:
            if number <= shown_to:
                tally.repeated += 1
                continue
            run = tally.runs.get(content.topic)
            if run is None:
                run = tally.runs[content.topic] = Run(number, now_us)
            run.last = number
            run.count += 1
            run.messages += content.count
        marks = tally.marks
        marks.append((number, now_us))
        if len(marks) > MARKS_MAX:
            del marks[0]

    def confirmed(self, session: ReportedSession, ids: Sequence[int], count: int) -> None:
        """A client confirmed packs; `count` of the numbers existed."""
        if not self._enabled or not count or self._causes_itself(session):
            return
        tally = self._touched(session)
        now_us = self._clock_us()
        first = last = ids[0]
        for number in ids:
            first = min(first, number)
            last = max(last, number)
        first, last = max(1, first), min(last, session.shown_to)
        tally.first = min(first, tally.first) if tally.confirmed else first
        tally.last = max(last, tally.last)
        tally.confirmed += count
        tally.time_us = now_us
        marks = tally.marks
        shown_us = -1
        for number, time_us in marks:
            if number >= last:
                shown_us = time_us
                break
        while marks and marks[0][0] <= last:
            del marks[0]
        if shown_us >= 0:
            wait_us = max(0, now_us - shown_us)
            tally.timed += count
            tally.wait_us += wait_us * count
            tally.wait_us_max = max(tally.wait_us_max, wait_us)

    def _causes_itself(self, session: ReportedSession) -> bool:
        if session.account == ACCOUNT:
            return EVENTS_TOPIC in session.follows
        own = self._own_topics.get(session.account)
        if own is None:
            if len(self._own_topics) >= OWN_TOPICS_MAX:
                self._own_topics.clear()
            own = self._own_topics[session.account] = events_topic(session.account)
        return own in session.follows

    def _touched(self, session: ReportedSession) -> Tally:
        """The tally of a session, marked as pending."""
        tally = self._tallies.get(session)
        if tally is None:
            tally = self._tallies[session] = Tally([])
        if not tally.pending:
            self._write_soon()
            tally.pending = True
            self._pending.append(session)
        return tally

    def _write_soon(self) -> None:
        """Schedule a write of pending events."""
        raise NotImplementedError
