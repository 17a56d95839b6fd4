"""Consumers: programs outside the bus that read topics and report their positions.

A consumer is identified by its group's name. A report replaces the one before. The bus adds the
lag, and whether messages were lost. No clock, disk or connection is known here.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from polybus import names
from polybus.errors import PolybusError, UsageError
from polybus.log.interface import Bounds

GROUP_CHARACTERS_MAX = 255
ERROR_CHARACTERS_MAX = 2000
POSITIONS_MAX = 50_000
"""Of all consumers together."""
Text = Annotated[str, msgspec.Meta(max_length=255)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Figure = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


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


class ConsumerFigures(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What is saved and shown of a consumer. `failed`: its last report was an error."""

    group: str
    kind: str = ""
    query_id: str = ""
    run_id: str = ""
    rows_per_s: float = 0.0
    batch_ms: float = 0.0
    last_error: str = ""
    last_error_us: int = 0
    failed: bool = False


class Consumer(ConsumerFigures, frozen=True, kw_only=True, rename="kebab"):
    """A consumer as saved."""

    positions: dict[str, ConsumerPosition] = {}
    seen_us: int = 0


class TopicLag(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A consumer's lag in a topic.

    `lag` counts the messages it has still to read; None if the topic does not exist or is damaged.
    `data_loss` says why it will miss messages: `epoch` (the topic was recreated), `expired` (its
    next messages were removed), `ahead` (the topic ends before its position), `topic` (the topic
    does not exist) or `damaged`.
    """

    topic: str
    epoch: int
    offset: int
    lag: int | None
    data_loss: str = ""
    lost: int = 0


BoundsOf = Callable[[str], Bounds]


def lag_of(topic: str, position: ConsumerPosition, bounds_of: BoundsOf) -> TopicLag:
    """Compare a position with what the topic holds."""
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
    return TopicLag(
        topic=topic,
        epoch=position.epoch,
        offset=position.offset,
        lag=lag,
        data_loss=loss,
        lost=lost,
    )


class Consumers:
    """All consumers by group. One thread changes them; `held_from` is thread-safe."""

    def __init__(self, *, clock_us: Callable[[], int], consumers_max: int, topics_max: int) -> None:
        self._clock_us = clock_us
        self._consumers_max = consumers_max
        self._topics_max = topics_max
        # Replaced, never mutated: retention reads them on its own thread. `_saved` is on disk.
        self._consumers: Mapping[str, Consumer] = {}
        self._saved: Mapping[str, Consumer] = {}

    def __len__(self) -> int:
        return len(self._consumers)

    def all(self) -> list[Consumer]:
        return sorted(self._consumers.values(), key=lambda one: one.group)

    def restore(self, consumers: list[Consumer]) -> None:
        self._consumers = self._saved = {one.group: one for one in consumers}

    def saved(self, consumers: Mapping[str, Consumer]) -> None:
        """These are on disk, and no others."""
        self._saved = consumers

    def snapshot(self) -> Mapping[str, Consumer]:
        """All consumers by group, as they are now."""
        return self._consumers

    def report(self, group: str, report: Report) -> Consumer:
        """Apply a report and return the consumer's new state.

        Raises:
            UsageError: `consumer.invalid` or `consumer.too-many`.
        """
        before = self._consumers.get(group)
        if before is None:
            if not group or len(group) > GROUP_CHARACTERS_MAX or not group.isprintable():
                text = f"a group is 1 to {GROUP_CHARACTERS_MAX} printable characters"
                raise UsageError("consumer.invalid", text)
            if len(self._consumers) >= self._consumers_max:
                text = f"there are {self._consumers_max} consumers (limits.consumers-max)"
                raise UsageError("consumer.too-many", text)
            before = Consumer(group=group)
        if report.positions is not None:
            self._check_positions(before, report.positions)
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
        if report.positions is not None:
            changes["positions"] = {topic.lower(): at for topic, at in report.positions.items()}
        consumer = msgspec.structs.replace(before, **changes)
        self._consumers = {**self._consumers, group: consumer}
        return consumer

    def _check_positions(self, before: Consumer, positions: Mapping[str, ConsumerPosition]) -> None:
        if len(positions) > self._topics_max:
            limit = "limits.topics-per-request-max"
            text = f"group {before.group}: over {self._topics_max} topics ({limit})"
            raise UsageError("consumer.invalid", text)
        for topic in positions:
            if len(topic.encode(errors="replace")) > names.TOPIC_BYTES_MAX:
                text = f"group {before.group}: {topic[:40]!r}… is too long for a topic's name"
                raise UsageError("consumer.invalid", text)
        others = sum(len(one.positions) for one in self._consumers.values())
        if others - len(before.positions) + len(positions) > POSITIONS_MAX:
            text = f"all consumers together have over {POSITIONS_MAX} positions"
            raise UsageError("consumer.too-many", f"{text}; remove those that no longer exist")

    def forget(self, group: str) -> None:
        """Raises UsageError `consumer.unknown`."""
        if group not in self._consumers:
            raise UsageError("consumer.unknown", f"there is no consumer {group[:80]!r}")
        self._consumers = {name: one for name, one in self._consumers.items() if name != group}

    def lags(self, consumer: Consumer, bounds_of: BoundsOf) -> list[TopicLag]:
        return [lag_of(topic, at, bounds_of) for topic, at in sorted(consumer.positions.items())]

    def of_topic(self, topic: str, bounds_of: BoundsOf) -> dict[str, TopicLag]:
        """Every consumer's lag in one topic, by group."""
        found = self._consumers.items()
        return {
            group: lag_of(topic, one.positions[topic], bounds_of)
            for group, one in sorted(found)
            if topic in one.positions
        }

    def held_from(self, topic: str, epoch: int, *, seen_after_us: int) -> int | None:
        """The first offset that any consumer seen since then still needs; None if none does.

        A position counts when it is on disk: until then the one before it does too.
        """
        needed = [
            at.offset
            for one in (*self._consumers.values(), *self._saved.values())
            if one.seen_us >= seen_after_us
            and (at := one.positions.get(topic)) is not None
            and at.epoch == epoch
        ]
        return min(needed, default=None)
