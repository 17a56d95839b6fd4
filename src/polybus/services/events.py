"""What the bus reports about itself in the system topic `$events`.

A message is one JSON object, `{"events": [{"kind": …, "time": …, …}, …]}`, with many events in
order. docs/howto/monitor.md has the fields of each kind.

Deliveries and confirmations are summed per session and topic between two messages, so that a pack
costs a few additions. All events are written in one batch a few times a second.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.errors import PolybusError

logger = logging.getLogger("polybus.events")

EVENTS_TOPIC = "$events"
PROTOCOL = "polybus"
WRITE_INTERVAL_S = 0.2
WRITE_INTERVAL_S_MAX = 5.0
# The share of the time that writing events may take. With many busy sessions they are written less
# often.
WRITE_SHARE = 0.02
EVENTS_PER_MESSAGE = 1000
PENDING_MAX = 100_000
# How many times of delivery a session remembers, to measure the time until confirmation.
MARKS_MAX = 32
TEXT_MAX = 500
LIST_MAX = 50


class ReportedPack(Protocol):
    """What events report of a pack."""

    @property
    def topic(self) -> str: ...
    @property
    def count(self) -> int: ...


class ReportedSession(Protocol):
    """What events report of a session. Sessions use events, so this module does not import them."""

    @property
    def digest(self) -> bytes: ...
    @property
    def follows(self) -> Collection[str]: ...
    @property
    def shown_to(self) -> int: ...
    @property
    def pack_count(self) -> int: ...


@dataclass(slots=True)
class Tally:
    """Deliveries and confirmations of one session since the last message.

    `runs` has the event that reports the packs delivered of each topic.
    """

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    repeated: int = 0
    confirmed: int = 0
    first: int = 0
    last: int = 0
    time_us: int = 0
    # Confirmed packs whose delivery time is known, and how long they took.
    timed: int = 0
    wait_us: int = 0
    wait_us_max: int = 0
    # (last number, time) of each delivery; kept beyond a message.
    marks: list[tuple[int, int]] = field(default_factory=list)
    pending: bool = False


class EventBook:
    """Collects events, and writes them to `$events`.

    A session that follows `$events` itself is left out: each report would cause another.
    """

    def __init__(
        self,
        bus: Bus,
        loop: asyncio.AbstractEventLoop,
        clock_us: Callable[[], int],
        *,
        enabled: bool = True,
    ) -> None:
        """`enabled=False` collects nothing."""
        self._bus = bus
        self._loop = loop
        self._clock_us = clock_us
        self._enabled = enabled
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._interval_s = WRITE_INTERVAL_S
        self._tallies: dict[ReportedSession, Tally] = {}
        self._pending: list[ReportedSession] = []
        self._events: list[dict[str, Any]] = []
        self.dropped = 0

    # Recording

    def delivered(
        self, session: ReportedSession, packs: Sequence[tuple[int, ReportedPack]]
    ) -> None:
        """Packs are delivered to a session; those up to `shown_to` not for the first time."""
        if not self._enabled or EVENTS_TOPIC in session.follows:
            return
        tally = self._touched(session)
        now_us = self._clock_us()
        for number, content in packs:
            if number <= session.shown_to:
                tally.repeated += 1
                continue
            run = tally.runs.get(content.topic)
            if run is None:
                run = tally.runs[content.topic] = _event("delivered", now_us, session)
                run |= {"topic": content.topic or None, "first": number, "last": 0}
                run |= {"count": 0, "messages": 0}
            run["last"] = number
            run["count"] += 1
            run["messages"] += content.count
        marks = tally.marks
        marks.append((packs[-1][0], now_us))
        if len(marks) > MARKS_MAX:
            del marks[0]

    def confirmed(self, session: ReportedSession, ids: Sequence[int], count: int) -> None:
        """A client confirmed packs; `count` of the numbers existed."""
        if not self._enabled or not count or EVENTS_TOPIC in session.follows:
            return
        tally = self._touched(session)
        now_us = self._clock_us()
        first, last = max(1, min(ids)), min(max(ids), session.shown_to)
        tally.first = min(first, tally.first) if tally.confirmed else first
        tally.last = max(last, tally.last)
        tally.confirmed += count
        tally.time_us = now_us
        marks = tally.marks
        shown_us = None
        for number, time_us in marks:
            if number >= last:
                shown_us = time_us
                break
        while marks and marks[0][0] <= last:
            del marks[0]
        if shown_us is not None:
            wait_us = max(0, now_us - shown_us)
            tally.timed += count
            tally.wait_us += wait_us * count
            tally.wait_us_max = max(tally.wait_us_max, wait_us)

    def opened(self, session: ReportedSession) -> None:
        self.tell("session-opened", session=session.digest.hex(), topics=list(session.follows))

    def lost(self, session: ReportedSession, topic: str, messages: int) -> None:
        digest = session.digest.hex()
        self.tell("lost", session=digest, topic=topic or None, messages=messages)

    def ended(self, session: ReportedSession, reason: str) -> None:
        """A session ends, perhaps with packs that are not confirmed."""
        tally = self._tallies.pop(session, None)
        if tally is not None and tally.pending:
            self._events += self._report(session, tally)
        waiting = session.pack_count
        self.tell("session-ended", session=session.digest.hex(), reason=reason, waiting=waiting)

    def tell(self, kind: str, **fields: Any) -> None:
        """Record a single event; beyond PENDING_MAX only count it."""
        if not self._enabled:
            return
        if len(self._events) + len(self._pending) >= PENDING_MAX:
            self.dropped += 1
            return
        self._write_soon()
        shown = {name.replace("_", "-"): _bounded(value) for name, value in fields.items()}
        self._events.append(_event(kind, self._clock_us()) | shown)

    # Reporting

    def take(self) -> list[bytes]:
        """All events since the last call, as messages."""
        events, self._events = self._events, []
        pending, self._pending = self._pending, []
        for session in pending:
            tally = self._tallies.get(session)
            if tally is not None and tally.pending:
                events += self._report(session, tally)
                if tally.marks:
                    self._tallies[session] = Tally(marks=tally.marks)
                else:
                    del self._tallies[session]
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            events.append(_event("dropped", self._clock_us()) | {"count": dropped})
        return [
            msgspec.json.encode({"events": events[start : start + EVENTS_PER_MESSAGE]})
            for start in range(0, len(events), EVENTS_PER_MESSAGE)
        ]

    def _touched(self, session: ReportedSession) -> Tally:
        """The tally of a session, marked as pending."""
        tally = self._tallies.get(session)
        if tally is None:
            tally = self._tallies[session] = Tally()
        if not tally.pending:
            self._write_soon()
            tally.pending = True
            self._pending.append(session)
        return tally

    def _report(self, session: ReportedSession, tally: Tally) -> list[dict[str, Any]]:
        waiting = session.pack_count
        report = [run | {"waiting": waiting} for run in tally.runs.values()]
        if tally.repeated:
            repeated = _event("repeated", self._clock_us(), session)
            report.append(repeated | {"count": tally.repeated})
        if tally.confirmed:
            timed = tally.timed
            confirmed = _event("confirmed", tally.time_us, session)
            confirmed |= {"first": tally.first, "last": tally.last, "count": tally.confirmed}
            confirmed["wait-ms"] = round(tally.wait_us / timed / 1000, 3) if timed else None
            confirmed["wait-ms-max"] = round(tally.wait_us_max / 1000, 3) if timed else None
            report.append(confirmed | {"waiting": waiting})
        return report

    # Writing

    def _write_soon(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._interval_s, self.write)

    def write(self) -> None:
        """Write what was collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        began_s = time.thread_time()
        messages = self.take()
        if not messages:
            return
        batch = Batch.of(EVENTS_TOPIC, messages)
        batch.protocol = PROTOCOL
        try:
            self._bus.commit([batch])
        except PolybusError as error:
            # The log has reported that it takes no writes. These events are lost.
            logger.info("%d event messages were not written: %s", len(messages), error.text)

        elapsed_s = time.thread_time() - began_s
        self._interval_s = min(max(WRITE_INTERVAL_S, elapsed_s / WRITE_SHARE), WRITE_INTERVAL_S_MAX)

    def close(self) -> None:
        """Write what is left; later events are not written."""
        self._closed = True
        if self._bus.has_topic(EVENTS_TOPIC):
            self.write()


def _event(kind: str, time_us: int, session: ReportedSession | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"kind": kind, "time": _iso(time_us)}
    return event if session is None else event | {"session": session.digest.hex()}


def _bounded(value: Any) -> Any:
    """Cut long texts and lists, so that an event stays small."""
    if isinstance(value, list):
        return value[:LIST_MAX]
    return value[:TEXT_MAX] if isinstance(value, str) else value


def _iso(time_us: int) -> str:
    seconds, micros = divmod(time_us, 1_000_000)
    return f"{_iso_second(seconds)}.{micros:06d}Z"


@functools.lru_cache(maxsize=64)
def _iso_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
