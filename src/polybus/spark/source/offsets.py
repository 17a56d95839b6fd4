"""A stream's offsets, as Spark keeps them in the checkpoint.

    {"group": "", "topics": {"orders": {"epoch": 1767225600000, "offset": 42}}}

`offset` is the next one to read. A topic that joined in a batch, or that goes on elsewhere than
where it stopped because something was lost, also has `from`: where that batch begins in it. So a
batch that is run again after a restart reads the same messages.

With the option `failOnDamage` false, `damaged` has the topics that are held in place and why:

    "damaged": {"orders": "…/history/….parquet: its checksum is wrong"}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.spark.source.losses import Losses
from polybus.spark.source.options import SourceOptions


@dataclass(frozen=True, slots=True)
class TopicOffset:
    """Where a topic's batch stops, in which epoch, and where it begins if that is not known."""

    epoch: int
    offset: int
    begin: int | None = None


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The offsets of all topics of a stream, and what is wrong with those that are damaged."""

    group: str
    topics: dict[str, TopicOffset]
    damaged: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        topics: dict[str, Any] = {}
        for topic, place in sorted(self.topics.items()):
            topics[topic] = {"epoch": place.epoch, "offset": place.offset}
            if place.begin is not None:
                topics[topic]["from"] = place.begin
        found = {"group": self.group, "topics": topics}
        return found | {"damaged": self.damaged} if self.damaged else found

    def is_at(self, other: StreamOffset) -> bool:
        """Whether the topics have the same offsets and damage, wherever the batches began."""
        return (_places(self), self.damaged) == (_places(other), other.damaged)


def _places(offset: StreamOffset) -> dict[str, tuple[int, int]]:
    return {topic: (place.epoch, place.offset) for topic, place in offset.topics.items()}


def from_json(found: Any) -> StreamOffset:
    """Raises UsageError `spark.checkpoint`: it is not an offset of ours."""
    try:
        topics = {
            str(topic): TopicOffset(int(one["epoch"]), int(one["offset"]), _begin(one.get("from")))
            for topic, one in found["topics"].items()
        }
        return StreamOffset(str(found.get("group", "")), topics, dict(found.get("damaged", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"the checkpoint's offset is none of format polybus: {str(found)[:200]}"
        raise UsageError("spark.checkpoint", text) from error


def _begin(value: Any) -> int | None:
    return None if value is None else int(value)


def resumed(
    start: StreamOffset,
    found: Mapping[str, Bounds],
    options: SourceOptions,
    losses: Losses,
    left_out: Collection[str],
) -> dict[str, TopicOffset]:
    """Where the next batch begins, in the topics of the last one and in those that joined.

    Topics of `left_out` are in no batch for now.

    Raises:
        UsageError: `spark.data-loss`, messages that were not read yet are gone.
    """
    begun = {}
    for topic, place in start.topics.items():
        if topic in left_out:
            continue
        # A topic that is no longer subscribed to was left on purpose.
        if options.matches(topic):
            going_on = resumed_in(topic, place, found.get(topic), losses)
            if going_on is not None:
                begun[topic] = going_on
    for topic, bounds in found.items():
        if topic not in start.topics:
            begun[topic] = TopicOffset(bounds.epoch, bounds.start, bounds.start)
    return begun


def resumed_in(
    topic: str, place: TopicOffset, bounds: Bounds | None, losses: Losses
) -> TopicOffset | None:
    """Where reading goes on in a topic that was read up to a place; None if it is gone."""
    if bounds is None:
        losses.note(f"topic {topic!r} was deleted; it was read up to offset {place.offset}")
        return None
    if bounds.epoch != place.epoch:
        text = f"topic {topic!r} was deleted and created again (epoch {place.epoch}, now"
        losses.note(f"{text} {bounds.epoch}); it was read up to offset {place.offset}")
        return TopicOffset(bounds.epoch, bounds.start, bounds.start)
    if not bounds.start <= place.offset <= bounds.stop:
        what = "expired" if place.offset < bounds.start else "is not in the log"
        text = f"topic {topic!r}: offset {place.offset}, where to go on, {what}; the log holds"
        losses.note(f"{text} {bounds.start} to {bounds.stop}")
        offset = max(bounds.start, min(place.offset, bounds.stop))
        return TopicOffset(bounds.epoch, offset, offset)
    return TopicOffset(place.epoch, place.offset)


def shares(available: dict[str, int], total_max: int) -> dict[str, int]:
    """How much of what each topic has is taken so that it is `total_max` together, in proportion.

    Every topic with anything gets at least one message while there is room.
    """
    total = sum(available.values())
    if total <= total_max:
        return dict(available)
    taken = {topic: count * total_max // total for topic, count in available.items()}
    left = total_max - sum(taken.values())
    for topic in sorted(available, key=lambda one: (taken[one] > 0, -available[one])):
        if left and taken[topic] < available[topic]:
            taken[topic] += 1
            left -= 1
    return taken
