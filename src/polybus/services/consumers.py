"""Consumers: programs outside the bus that read topics and report their positions.

A consumer is identified by its group's name. A report replaces the previous one. The bus adds the
lag, and whether messages were lost. Retention keeps history that a consumer still needs.

Order of writes: a report is in memory first, then in state.db; then it is answered, and retention
may remove history below its position. A crash loses reports that had no answer: a consumer's
position is then older than the true one, and its history still exists.

In a cluster all nodes share the consumers in place of state.db: the last report in the cluster's
order counts.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from polybus import names
from polybus.config import BusRetention, Limits, age_us
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import Bounds
from polybus.services.cluster_table import ClusterEntry
from polybus.services.context import Context
from polybus.services.state import SqlStatement, StateDb, changing_stopped_bus
from polybus.services.state_rows import of_stopped_bus, summed
from polybus.structs import decode

logger = logging.getLogger("polybus.consumers")

GROUP_CHARACTERS_MAX = 255
ERROR_CHARACTERS_MAX = 2000
POSITIONS_MAX = 50_000
"""Positions of all consumers together."""
KIND = "consumer"
READ = "SELECT name, note FROM consumers"
INSERT = "INSERT OR REPLACE INTO consumers VALUES (?, ?, ?)"
DELETE = "DELETE FROM consumers WHERE name = ?"

Text = Annotated[str, msgspec.Meta(max_length=255)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Figure = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
BoundsOf = Callable[[str], Bounds]


class ConsumerPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The next message that a consumer will read of a topic."""

    epoch: Count
    offset: Count


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """What a consumer reports; a field that is left out keeps its value."""

    kind: Text | None = None
    query_id: Text | None = None
    run_id: Text | None = None
    positions: dict[str, ConsumerPosition] | None = None
    rows_per_s: Figure | None = None
    batch_ms: Figure | None = None
    last_error: str | None = None
    stopped: dict[str, str] | None = None


class ConsumerOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a consumer, its limit, and the topics where retention ignores the consumer."""

    account: str = names.ACCOUNT
    consumers_max: int | None = None
    guest_in: frozenset[str] = frozenset()


DEFAULT = ConsumerOwner()


class ConsumerFigures(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The saved and displayed figures of a consumer.

    `failed`: its last report was an error. `stopped`: topics that it currently does not read, and
    why.
    """

    group: str
    kind: str = ""
    query_id: str = ""
    run_id: str = ""
    rows_per_s: float = 0.0
    batch_ms: float = 0.0
    last_error: str = ""
    last_error_us: int = 0
    failed: bool = False
    stopped: dict[str, str] = {}


class Consumer(ConsumerFigures, frozen=True, kw_only=True, rename="kebab"):
    """A consumer as saved. Retention does not wait for it in topics where it is a `guest`."""

    positions: dict[str, ConsumerPosition] = {}
    guest: tuple[str, ...] = ()
    seen_us: int = 0


class TopicLag(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A consumer's lag in a topic.

    `lag` counts the messages that it has yet to read; None if the topic does not exist or is
    damaged. `data_loss` says why it will miss messages: `epoch` (the topic was recreated),
    `expired` (its next messages were removed), `ahead` (the topic ends before its position),
    `topic` (the topic does not exist) or `damaged`. `lag_s` is the age of the first message that it
    has yet to read, if it was looked up.
    """

    topic: str
    epoch: int
    offset: int
    lag: int | None
    data_loss: str = ""
    lost: int = 0
    lag_s: float | None = None


class ConsumerView(ConsumerFigures, frozen=True, kw_only=True, rename="kebab"):
    """A consumer as shown to users; times are microseconds since 1970."""

    last_seen_us: int
    seen_s_ago: float
    lag: int
    data_loss: bool
    topics: list[TopicLag]
    lag_s: float | None = None


class TopicConsumer(msgspec.Struct, kw_only=True, rename="kebab"):
    """A consumer's position in one topic."""

    group: str
    offset: int
    lag: int | None
    data_loss: str


def lag_of(topic: str, position: ConsumerPosition, bounds_of: BoundsOf) -> TopicLag:
    """Compare a position with the bounds of the topic."""
    lag: int | None
    lost = 0
    try:
        bounds = bounds_of(topic)
    except PolybusError as error:
        lag, loss = None, "topic" if error.code == "topic.unknown" else "damaged"
    else:
        lag, loss = bounds.stop - bounds.start, ""
        if position.epoch != bounds.epoch:
            loss = "epoch"
        elif position.offset < bounds.start:
            loss, lost = "expired", bounds.start - position.offset
        elif position.offset > bounds.stop:
            lag, loss = 0, "ahead"
        else:
            lag = bounds.stop - position.offset
    at = msgspec.structs.asdict(position)
    return TopicLag(topic=topic, **at, lag=lag, data_loss=loss, lost=lost)


class Consumers:
    """All consumers by group. One thread changes them; `needed_from` is thread-safe."""

    def __init__(self, bounds_of: BoundsOf, clock_us: Callable[[], int], limits: Limits) -> None:
        self._bounds_of = bounds_of
        self._clock_us = clock_us
        self._limits = limits
        # Replaced, never mutated: retention reads them on its own thread. `_saved` is on disk.
        self._consumers: Mapping[str, Consumer] = {}
        self._saved: Mapping[str, Consumer] = {}
        # The lowest position of these consumers, by topic and epoch.
        self._lowest: tuple[Mapping[str, Consumer], dict[str, dict[int, ConsumerPosition]]]
        self._lowest = (self._consumers, {})

    def restore(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Restore the rows of state.db; log and skip an unreadable row."""
        restored = {}
        for group, note in rows:
            try:
                restored[group] = decode(note, Consumer)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("consumer %r cannot be read and is forgotten: %s", group, error)
        self._consumers = self._saved = restored

    def report(self, group: str, report: Report, owner: ConsumerOwner = DEFAULT) -> Consumer:
        """Apply a report of an owner's consumer and return its new state.

        Raises:
            UsageError: `consumer.invalid` or `consumer.too-many`.
        """
        before = self._consumers.get(group)
        if before is None:
            if not group or len(group) > GROUP_CHARACTERS_MAX or not group.isprintable():
                text = f"a group must have 1 to {GROUP_CHARACTERS_MAX} printable characters"
                raise UsageError("consumer.invalid", text)
            self._check_room(owner)
            before = Consumer(group=group)
        now_us = self._clock_us()
        changes: dict[str, Any] = {
            name: value
            for name in report.__struct_fields__
            if (value := getattr(report, name)) is not None
        }
        changes |= {"seen_us": now_us, "failed": bool(report.last_error)}
        if report.last_error:
            changes["last_error"] = report.last_error[:ERROR_CHARACTERS_MAX]
            changes["last_error_us"] = now_us
        if report.stopped is not None:
            self._check_topics(before, report.stopped)
            texts = report.stopped.items()
            changes["stopped"] = {topic: why[:ERROR_CHARACTERS_MAX] for topic, why in texts}
        if report.positions is not None:
            self._check_positions(before, report.positions, owner)
            changes["positions"] = {topic.lower(): at for topic, at in report.positions.items()}
            changes["guest"] = tuple(one for one in changes["positions"] if one in owner.guest_in)
        consumer: Consumer = msgspec.structs.replace(before, **changes)
        self._consumers = {**self._consumers, group: consumer}
        return consumer

    def _check_room(self, owner: ConsumerOwner) -> None:
        if len(self._consumers) >= self._limits.consumers_max:
            limit = f"{self._limits.consumers_max} consumers (limits.consumers-max)"
            raise UsageError("consumer.too-many", f"the bus is at its limit of {limit}")
        if owner.consumers_max is not None and len(self._of(owner)) >= owner.consumers_max:
            limit = f"{owner.consumers_max} consumers (account-consumers-max)"
            raise UsageError("consumer.too-many", f"your account is at its limit of {limit}")

    def _of(self, owner: ConsumerOwner) -> list[Consumer]:
        prefix = names.full(owner.account, "")
        return [one for group, one in self._consumers.items() if group.startswith(prefix)]

    def _check_topics(self, before: Consumer, topics: Collection[str]) -> None:
        """The number of topics has no limit of its own: a pipeline reads every topic of the bus."""
        if len(topics) > POSITIONS_MAX:
            text = f"group {before.group} names more than {POSITIONS_MAX} topics"
            raise UsageError("consumer.too-many", text)
        for topic in topics:
            if len(topic.encode(errors="replace")) > names.TOPIC_BYTES_MAX:
                text = f"group {before.group}: {topic[:40]!r}… is too long for a topic's name"
                raise UsageError("consumer.invalid", text)

    def _check_positions(
        self, before: Consumer, positions: Mapping[str, ConsumerPosition], owner: ConsumerOwner
    ) -> None:
        self._check_topics(before, positions)
        others = sum(len(one.positions) for one in self._consumers.values())
        if others - len(before.positions) + len(positions) > POSITIONS_MAX:
            text = f"all consumers together have over {POSITIONS_MAX} positions"
            raise UsageError("consumer.too-many", f"{text}; remove those that no longer exist")
        if owner.consumers_max is not None:
            share = POSITIONS_MAX * owner.consumers_max // self._limits.consumers_max
            own = sum(len(one.positions) for one in self._of(owner))
            if own - len(before.positions) + len(positions) > share:
                text = f"the consumers of your account have over {share} positions"
                raise UsageError("consumer.too-many", f"{text} (account-consumers-max)")

    def forget(self, group: str) -> None:
        """Raises UsageError `consumer.unknown`."""
        if group not in self._consumers:
            raise unknown_consumer(group)
        self._consumers = {name: one for name, one in self._consumers.items() if name != group}

    def stopped(self) -> list[tuple[str, str, str]]:
        """Group, topic and reason for each topic that a consumer currently does not read."""
        return [
            (group, topic, reason)
            for group, one in sorted(self._consumers.items())
            for topic, reason in sorted(one.stopped.items())
        ]

    def positions(self, group: str) -> Collection[str]:
        """The topics in which a group has positions; empty if the group does not exist."""
        found = self._consumers.get(group)
        return () if found is None else found.positions

    def groups(self) -> list[str]:
        return list(self._consumers)

    def views(self) -> list[ConsumerView]:
        """All consumers with their lags, sorted."""
        now_us = self._clock_us()
        views = []
        for _, consumer in sorted(self._consumers.items()):
            lags = [
                lag_of(topic, at, self._bounds_of)
                for topic, at in sorted(consumer.positions.items())
            ]
            view = ConsumerView(
                **{name: getattr(consumer, name) for name in ConsumerFigures.__struct_fields__},
                last_seen_us=consumer.seen_us,
                seen_s_ago=round(max(0, now_us - consumer.seen_us) / 1e6, 1),
                lag=sum(one.lag or 0 for one in lags),
                data_loss=any(one.data_loss for one in lags),
                topics=lags,
            )
            views.append(view)
        return views

    def of_topic(self, topic: str) -> list[TopicConsumer]:
        """Every consumer's position and lag in one topic."""
        found = []
        for group, one in sorted(self._consumers.items()):
            if topic in one.positions:
                at = lag_of(topic, one.positions[topic], self._bounds_of)
                consumer = TopicConsumer(
                    group=group, offset=at.offset, lag=at.lag, data_loss=at.data_loss
                )
                found.append(consumer)
        return found

    def lags(self) -> dict[str, int]:
        """The largest lag of any consumer, by topic.

        Spark requests it with the bounds of all topics, many times a second: so consumers are only
        read after a report, and then each topic costs one comparison.
        """
        consumers, lowest = self._lowest
        if consumers is not self._consumers:
            lowest = {}
            for consumer in self._consumers.values():
                for topic, at in consumer.positions.items():
                    found = lowest.setdefault(topic, {})
                    if at.epoch not in found or at.offset < found[at.epoch].offset:
                        found[at.epoch] = at
            self._lowest = (self._consumers, lowest)
        return {
            topic: max(lag_of(topic, at, self._bounds_of).lag or 0 for at in found.values())
            for topic, found in lowest.items()
        }

    def needed_from(self, topic: str, epoch: int, *, seen_after_us: int) -> int | None:
        """The first offset that any consumer seen since then still needs; None if none does.

        A position counts when it is on disk: until then the previous one counts too.
        """
        needed = [
            at.offset
            for one in (*self._consumers.values(), *self._saved.values())
            if one.seen_us >= seen_after_us
            and topic not in one.guest
            and (at := one.positions.get(topic)) is not None
            and at.epoch == epoch
        ]
        return min(needed, default=None)


class ConsumerRegistry(Consumers):
    """The consumers of a running bus: saved in state.db; retention holds messages for them."""

    def __init__(self, context: Context, state: StateDb) -> None:
        super().__init__(context.log.bounds, context.clock_us, context.config.limits)
        self._events = context.events
        self._state = state
        self._table = context.cluster_table
        self.retention = context.config.retention
        self._is_restored = False
        self._began_us, self._began_s = context.clock_us(), time.monotonic()
        self._changed: set[str] = set()
        self._saving = asyncio.Lock()

    def set_retention(self, retention: BusRetention) -> None:
        """Apply new settings for holding messages."""
        self.retention = retention

    async def start(self) -> None:
        """Restore the consumers. Raises StorageError."""
        if self._table is None:
            self.restore(await self._state.read(READ))
        else:
            self._table.watch(KIND, self._on_entry)
        self._is_restored = True

    def _on_entry(self, entry: ClusterEntry) -> None:
        """A report, or the end of a consumer, at any node."""
        found = read_entry(entry.name, entry.value)
        others = {name: one for name, one in self._saved.items() if name != entry.name}
        self._saved = others if found is None else {**others, entry.name: found}
        if entry.name not in self._changed:
            # A newer report has arrived at this node, and will be shared.
            others = {name: one for name, one in self._consumers.items() if name != entry.name}
            self._consumers = others if found is None else {**others, entry.name: found}

    async def close(self) -> None:
        try:
            await self.save()
        except StorageError as error:
            logger.warning("consumers could not be saved: %s", error.text)

    def report(self, group: str, report: Report, owner: ConsumerOwner = DEFAULT) -> Consumer:
        known = self._consumers.get(group)
        consumer = super().report(group, report, owner)
        about = {"account": owner.account, "group": group}
        if report.last_error:
            self._events.tell("consumer-failed", error=consumer.last_error, **about)
        for topic, reason in consumer.stopped.items():
            if known is None or known.stopped.get(topic) != reason:
                self._events.tell("consumer-stopped", topic=topic, reason=reason, **about)
        self._changed.add(group)
        return consumer

    def forget(self, group: str) -> None:
        # If it could not be deleted from disk, it may be forgotten again.
        if group in self._consumers or group not in self._saved:
            super().forget(group)
        self._changed.add(group)

    def _has_lost_some(self, after_us: int) -> bool:
        """Whether damage has lost a position since then: it is unknown what may be removed."""
        return any(
            damage.kind in ("", "consumer")
            and damage.name not in self._consumers
            and damage.time_s * 1_000_000 > after_us
            for damage in self._state.damages
        )

    async def save(self) -> None:
        """Wait until every report so far is on disk.

        Raises:
            StorageError: they are not; the next save tries again.
        """
        # A save writes all changes, so callers that waited for it have nothing left to save.
        async with self._saving:
            changed, self._changed = self._changed, set()
            if not changed:
                return
            kept = self._consumers
            try:
                if self._table is None:
                    await asyncio.shield(self._state.write(_statements(changed, kept)))
                    self._saved = kept
                else:
                    await asyncio.shield(self._table.write(_entries(changed, kept)))
            except BaseException:
                self._changed |= changed
                raise

    def held_from(self, topic: str) -> int | None:
        """The first offset that retention must keep; None if no consumer needs any. Thread-safe."""
        if not self.retention.hold_for_consumers:
            return None
        if not self._is_restored:
            return 0
        try:
            epoch = self._bounds_of(topic).epoch
        except PolybusError:
            return None
        # At most as fast as real time: a clock that jumps forward must not release messages.
        passed_us = int((time.monotonic() - self._began_s) * 1_000_000)
        now_us = min(self._clock_us(), self._began_us + passed_us)
        seen_after_us = now_us - age_us(self.retention.hold_age_s)
        if self._has_lost_some(seen_after_us):
            return 0
        return self.needed_from(topic, epoch, seen_after_us=seen_after_us)


def _statements(changed: set[str], kept: Mapping[str, Consumer]) -> list[SqlStatement]:
    known = changed & kept.keys()
    rows = [summed(group, msgspec.json.encode(kept[group])) for group in known]
    return [(INSERT, rows), (DELETE, [(group,) for group in changed - kept.keys()])]


def read_entry(name: str, value: bytes) -> Consumer | None:
    """A consumer of a cluster; None if it has ended. Raises msgspec.MsgspecError."""
    found: Consumer | None = decode(value, Consumer | None)
    return found


def _entries(changed: set[str], kept: Mapping[str, Consumer]) -> list[ClusterEntry]:
    return [ClusterEntry(KIND, name, msgspec.json.encode(kept.get(name))) for name in changed]


def saved_consumers(data: Path, bounds_of: BoundsOf, clock_us: Callable[[], int]) -> Consumers:
    """The consumers of a stopped bus. Raises StorageError."""
    consumers = Consumers(bounds_of, clock_us, Limits())
    with of_stopped_bus(data) as db:
        consumers.restore(db.execute(READ) if db is not None else ())
    return consumers


def forget_saved(data: Path, group: str, *, fsync: bool = True) -> None:
    """Forget a consumer of a stopped bus. Raises UsageError `consumer.unknown`; StorageError."""
    with changing_stopped_bus(data, fsync=fsync) as db:
        if db is None or not db.execute(DELETE, (group,)).rowcount:
            raise unknown_consumer(group)


def unknown_consumer(group: str) -> UsageError:
    return UsageError("consumer.unknown", f"there is no consumer {group[:80]!r}")
