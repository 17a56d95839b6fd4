"""The consumers of a running bus: saved over restarts, and asked before retention removes history.

Order of writes: a report is in memory first, in state.db within SAVE_INTERVAL_S, and only then may
retention remove history below its position. A crash loses the reports since the last save: a
consumer's position is then older than the true one, and its history is still there.
"""

import asyncio
import logging

import msgspec

from polybus.errors import PolybusError, StorageError
from polybus.services.consumers.consumers import (
    Consumer,
    ConsumerFigures,
    Consumers,
    Report,
    TopicLag,
)
from polybus.services.context import Context
from polybus.services.state import StateDb

logger = logging.getLogger("polybus.consumers")

SAVE_INTERVAL_S = 1.0


class ConsumerView(ConsumerFigures, frozen=True, kw_only=True, rename="kebab"):
    """A consumer as shown to users; times are microseconds since 1970."""

    last_seen_us: int
    seen_s_ago: float
    lag: int
    data_loss: bool
    topics: list[TopicLag]


class TopicConsumer(msgspec.Struct, kw_only=True, rename="kebab"):
    """A consumer's position in one topic."""

    group: str
    offset: int
    lag: int | None
    data_loss: str


def view_of(consumer: Consumer, lags: list[TopicLag], now_us: int) -> ConsumerView:
    figures = {name: getattr(consumer, name) for name in ConsumerFigures.__struct_fields__}
    return ConsumerView(
        **figures,
        last_seen_us=consumer.seen_us,
        seen_s_ago=round(max(0, now_us - consumer.seen_us) / 1e6, 1),
        lag=sum(one.lag or 0 for one in lags),
        data_loss=any(one.data_loss for one in lags),
        topics=lags,
    )


def decode_rows(rows: dict[str, bytes]) -> list[Consumer]:
    """Decode state.db's rows; log and leave out a row that cannot be read."""
    consumers = []
    for group, note in rows.items():
        try:
            consumers.append(msgspec.json.decode(note, type=Consumer))
        except msgspec.DecodeError as error:
            logger.warning("consumer %r cannot be read and is forgotten: %s", group, error)
    return consumers


class ConsumerBook:
    """Takes reports, saves them, and tells retention which offsets consumers still need."""

    def __init__(self, context: Context, state: StateDb) -> None:
        self._log = context.log
        self._loop = context.loop
        self._events = context.events
        self._state = state
        self._clock_us = context.clock_us
        self._retention = context.config.retention
        limits = context.config.limits
        self._consumers = Consumers(
            clock_us=context.clock_us,
            consumers_max=limits.consumers_max,
            topics_max=limits.topics_per_request_max,
        )
        self._is_restored = False
        self._changed: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Restore the consumers. Raises StorageError."""
        self._consumers.restore(decode_rows(await self._state.read_consumers()))
        self._is_restored = True

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._saving is not None:
            await self._saving
        await self._save()

    def report(self, group: str, report: Report) -> None:
        """Raises UsageError `consumer.invalid`, `consumer.too-many`."""
        consumer = self._consumers.report(group, report)
        if report.last_error:
            self._events.tell("consumer-failed", group=group, error=consumer.last_error)
        self._change(group)

    def forget(self, group: str) -> None:
        """Raises UsageError `consumer.unknown`."""
        self._consumers.forget(group)
        self._change(group)

    def views(self) -> list[ConsumerView]:
        now_us = self._clock_us()
        bounds = self._log.bounds
        return [
            view_of(one, self._consumers.lags(one, bounds), now_us) for one in self._consumers.all()
        ]

    def of_topic(self, topic: str) -> list[TopicConsumer]:
        found = self._consumers.of_topic(topic, self._log.bounds)
        return [
            TopicConsumer(group=group, offset=one.offset, lag=one.lag, data_loss=one.data_loss)
            for group, one in found.items()
        ]

    def lags(self) -> dict[str, int]:
        """The largest lag of any consumer, by topic."""
        largest: dict[str, int] = {}
        for consumer in self.views():
            for one in consumer.topics:
                largest[one.topic] = max(one.lag or 0, largest.get(one.topic, 0))
        return largest

    def held_from(self, topic: str) -> int | None:
        """The first offset that retention must keep; None if no consumer needs any. Thread-safe."""
        if not self._retention.hold_for_consumers:
            return None
        if not self._is_restored:
            return 0
        try:
            epoch = self._log.bounds(topic).epoch
        except PolybusError:
            return None
        seen_after_us = self._clock_us() - int(self._retention.hold_age_s * 1_000_000)
        return self._consumers.held_from(topic, epoch, seen_after_us=seen_after_us)

    def _change(self, group: str) -> None:
        self._changed.add(group)
        if self._timer is None:
            self._timer = self._loop.call_later(SAVE_INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._saving is None or self._saving.done():
            self._saving = self._loop.create_task(self._save())
        else:
            self._timer = self._loop.call_later(SAVE_INTERVAL_S, self._on_timer)

    async def _save(self) -> None:
        changed, self._changed = self._changed, set()
        if not changed:
            return
        kept = self._consumers.snapshot()
        rows = [
            (group, msgspec.json.encode(kept[group])) for group in sorted(changed & kept.keys())
        ]
        try:
            await self._state.save_consumers(rows, sorted(changed - kept.keys()))
        except StorageError as error:
            logger.warning("consumers could not be saved: %s", error.text)
            # Saved again with the next report.
            self._changed |= changed
        else:
            self._consumers.saved(kept)
