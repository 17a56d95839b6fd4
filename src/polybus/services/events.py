"""The events that the bus reports in the system topics `$events`, one for each account.

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
from typing import Any, NamedTuple

import msgspec

from polybus import names
from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.errors import PolybusError
from polybus.services.tallies import (
    EVENTS_TOPIC,
    ReportedSession,
    Tallies,
    Tally,
    events_topic,
)

logger = logging.getLogger("polybus.events")

PROTOCOL = "polybus"
UNDELIVERED = "undelivered"
WRITE_INTERVAL_S = 0.2
WRITE_INTERVAL_S_MAX = 5.0
# The share of the time that writing events may take. With many busy sessions they are written less
# often.
WRITE_SHARE = 0.02
EVENTS_PER_MESSAGE = 1000
PENDING_MAX = 100_000
TEXT_MAX = 500
LIST_MAX = 50


class UndeliveredRange(NamedTuple):
    """Messages that a subscriber did not get: of this topic, from `first` up to `stop`."""

    topic: str
    epoch: int
    first: int
    stop: int


class EventRecorder(Tallies):
    """Collects events, and writes them to `$events` of the account that they concern."""

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
        # By account.
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._count = 0
        self.dropped = 0

    # Recording

    def opened(self, session: ReportedSession) -> None:
        topics = list(session.follows)
        self._tell_of(session, "session-opened", topics=topics)

    def lost(self, session: ReportedSession, topic: str, messages: int) -> None:
        self._tell_of(session, "lost", topic=topic or None, messages=messages)

    def undelivered(
        self, account: str, what: UndeliveredRange, *, reason: str, to: str, protocol: str
    ) -> None:
        """The log has these messages, but a subscriber will not get them."""
        if what.stop > what.first and not what.topic.endswith(EVENTS_TOPIC):
            fields = {"reason": reason, "to": to, "protocol": protocol}
            self.tell(UNDELIVERED, account=account, **what._asdict(), **fields)

    def ended(self, session: ReportedSession, reason: str) -> None:
        """A session ends, perhaps with unconfirmed packs."""
        tally = self._tallies.pop(session, None)
        if tally is not None and tally.pending:
            self._add(session.account, self._report(session, tally))
        self._tell_of(session, "session-ended", reason=reason, waiting=session.pack_count)

    def _tell_of(self, session: ReportedSession, kind: str, **fields: Any) -> None:
        self.tell(kind, account=session.account, session=session.digest.hex(), **fields)

    def tell(self, kind: str, *, account: str = names.ACCOUNT, **fields: Any) -> None:
        """Record a single event; beyond PENDING_MAX only count it."""
        if not self._enabled:
            return
        if self._count + len(self._pending) >= PENDING_MAX:
            self.dropped += 1
            return
        self._write_soon()
        shown = {name.replace("_", "-"): _bounded(value) for name, value in fields.items()}
        self._add(account, [_event(kind, self._clock_us()) | shown])

    def _add(self, account: str, events: list[dict[str, Any]]) -> None:
        self._events.setdefault(events_topic(account), []).extend(events)
        self._count += len(events)

    # Reporting

    def take(self) -> dict[str, list[bytes]]:
        """All events since the last call, as messages by topic."""
        pending, self._pending = self._pending, []
        for session in pending:
            tally = self._tallies.get(session)
            if tally is not None and tally.pending:
                self._add(session.account, self._report(session, tally))
                if tally.marks:
                    self._tallies[session] = Tally(tally.marks)
                else:
                    del self._tallies[session]
        if self.dropped:
            dropped, self.dropped = self.dropped, 0
            self._add(names.ACCOUNT, [_event("dropped", self._clock_us()) | {"count": dropped}])
        by_topic, self._events, self._count = self._events, {}, 0
        return {
            topic: [
                msgspec.json.encode({"events": events[start : start + EVENTS_PER_MESSAGE]})
                for start in range(0, len(events), EVENTS_PER_MESSAGE)
            ]
            for topic, events in by_topic.items()
        }

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
        batches = []
        for topic, messages in self.take().items():
            # Drop those of an account that was deleted meanwhile. A damaged topic must not stop the
            # others.
            if self._bus.has_topic(topic) and topic not in self._bus.log.frozen:
                batch = Batch.of(topic, messages)
                batch.protocol = PROTOCOL
                batches.append(batch)
        if not batches:
            return
        try:
            self._bus.commit(batches)
        except PolybusError as error:
            # The log has reported that it takes no writes. These events are lost.
            logger.info("%d event messages were not written: %s", len(batches), error.text)

        elapsed_s = time.thread_time() - began_s
        self._interval_s = min(max(WRITE_INTERVAL_S, elapsed_s / WRITE_SHARE), WRITE_INTERVAL_S_MAX)

    def close(self) -> None:
        """Write the remaining events; later ones are not written."""
        self._closed = True
        if self._bus.has_topic(EVENTS_TOPIC):
            self.write()


def _event(kind: str, time_us: int, session: ReportedSession | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"kind": kind, "time": iso_time(time_us)}
    return event if session is None else event | {"session": session.digest.hex()}


def _bounded(value: Any) -> Any:
    """Cut long texts and lists, so that an event stays small."""
    if isinstance(value, list):
        return value[:LIST_MAX]
    return value[:TEXT_MAX] if isinstance(value, str) else value


def iso_time(time_us: int) -> str:
    seconds, micros = divmod(time_us, 1_000_000)
    return f"{_iso_second(seconds)}.{micros:06d}Z"


@functools.lru_cache(maxsize=64)
def _iso_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
