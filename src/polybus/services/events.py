"""What the bus reports about itself in the system topic `$events`.

A message is one JSON object, `{"events": [{"kind": …, "time": …, …}, …]}`, with many events in
order. docs/howto/monitor.md has the fields of each kind.

Deliveries and confirmations are summed between two messages (tallies). All events are written in
one batch a few times a second.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.errors import PolybusError
from polybus.services.tallies import EVENTS_TOPIC, ReportedSession, Tallies, Tally

logger = logging.getLogger("polybus.events")

PROTOCOL = "polybus"
WRITE_INTERVAL_S = 0.2
WRITE_INTERVAL_S_MAX = 5.0
# The share of the time that writing events may take. With many busy sessions they are written less
# often.
WRITE_SHARE = 0.02
EVENTS_PER_MESSAGE = 1000
PENDING_MAX = 100_000
TEXT_MAX = 500
LIST_MAX = 50


class EventBook(Tallies):
    """Collects events, and writes them to `$events`."""

    def __init__(
        self,
        bus: Bus,
        loop: asyncio.AbstractEventLoop,
        clock_us: Callable[[], int],
        *,
        enabled: bool = True,
    ) -> None:
        """`enabled=False` collects nothing."""
        super().__init__(clock_us, enabled=enabled)
        self._bus = bus
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._interval_s = WRITE_INTERVAL_S
        self._events: list[dict[str, Any]] = []
        self.dropped = 0

    # Recording

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
                    self._tallies[session] = Tally(tally.marks)
                else:
                    del self._tallies[session]
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            events.append(_event("dropped", self._clock_us()) | {"count": dropped})
        return [
            msgspec.json.encode({"events": events[start : start + EVENTS_PER_MESSAGE]})
            for start in range(0, len(events), EVENTS_PER_MESSAGE)
        ]

    def _report(self, session: ReportedSession, tally: Tally) -> list[dict[str, Any]]:
        waiting = session.pack_count
        report = []
        for topic, run in tally.runs.items():
            delivered = _event("delivered", run.time_us, session)
            delivered |= {"topic": topic or None, "first": run.first, "last": run.last}
            delivered |= {"count": run.count, "messages": run.messages}
            report.append(delivered | {"waiting": waiting})
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
