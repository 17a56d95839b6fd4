"""Which topics are read, and where each begins and ends.

The options decide where a query begins, the offset in the checkpoint where a stream resumes, and
the bounds of the log what of that still exists. Missing messages are data loss.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.spark.option_values import EARLIEST, LATEST
from polybus.spark.origin import Origin
from polybus.spark.source.damage import HeldTopics
from polybus.spark.source.offsets import StreamOffset, TopicOffset
from polybus.spark.source.options import OffsetChoice, SourceOptions

logger = logging.getLogger("polybus.spark")
_LOGGED_MAX = 1000


class DataLoss:
    """What happens when messages are missing: an error, or a warning in the log, once each."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._logged: set[str] = set()

    def note(self, text: str) -> None:
        """Raises UsageError `spark.data-loss` unless the option failOnDataLoss is false."""
        if self._fail:
            advice = "set failOnDataLoss to false to continue with the messages that exist"
            raise UsageError("spark.data-loss", f"{text}; {advice}, or start a new checkpoint")
        if text not in self._logged and len(self._logged) < _LOGGED_MAX:
            self._logged.add(text)
            logger.warning("data loss: %s", text)

    def note_error(self, error: UsageError) -> None:
        self.note(error.text)


def matching(
    options: SourceOptions, origin: Origin, *, strict: bool, held: HeldTopics | None = None
) -> dict[str, Bounds]:
    """The bounds of the topics that the options select and that exist.

    Topics of `leaveOut` are not even looked at: they may be damaged. With `held`, damaged topics
    are left to it; without, they are an error.

    Raises:
        UsageError: with `strict`: `topic.unknown`, a topic that is named does not exist.
        StorageError: `log.damaged`.
    """
    bounds_of = origin.all_bounds if held is None else held.bounds
    selected: Collection[str] = options.topics
    if options.pattern is not None:
        selected = [one for one in origin.topics(system=options.system) if options.matches(one)]
    selected = [topic for topic in selected if topic not in options.left_out]
    bounds = bounds_of(selected)
    if strict and options.pattern is None:
        known = bounds.keys() | (set() if held is None else set(held.texts))
        missing = [topic for topic in selected if topic not in known]
        if missing:
            text = f"option subscribe: topic {missing[0]!r} does not exist in {options.location}"
            raise UsageError("topic.unknown", f"{text}; polybus topics list shows all topics")
    return bounds


@dataclass(frozen=True)
class ChosenOffsets:
    """Where the options say that a topic begins and ends."""

    options: SourceOptions
    origin: Origin
    loss: DataLoss

    def begin(self, topic: str, bounds: Bounds) -> int:
        """The first offset to read.

        Raises:
            UsageError: `spark.timestamp-unmatched`, no message is that late; `spark.data-loss`.
        """
        starting = self.options.starting
        offset = self._resolve("startingOffsets", starting, topic, bounds)
        is_late = starting.timestamp_us is not None and offset >= bounds.stop
        if is_late and not self.options.is_late_start_allowed:
            text = f"option startingTimestamp: topic {topic!r} has no message at or after that time"
            advice = "set startingOffsetsByTimestampStrategy to latest to begin at the end"
            raise UsageError("spark.timestamp-unmatched", f"{text}; {advice}")
        return offset

    def end(self, topic: str, bounds: Bounds) -> int:
        """The offset to stop before. Raises UsageError `spark.data-loss`."""
        return self._resolve("endingOffsets", self.options.ending, topic, bounds)

    def _resolve(self, option: str, choice: OffsetChoice, topic: str, bounds: Bounds) -> int:
        if choice.timestamp_us is not None:
            return min(self.origin.offset_at(topic, choice.timestamp_us), bounds.stop)
        offset = choice.of(topic)
        if offset in (EARLIEST, LATEST):
            return bounds.start if offset == EARLIEST else bounds.stop
        if not bounds.start <= offset <= bounds.stop:
            text = f"option {option}: offset {offset} of topic {topic!r} is not in the log, which"
            self.loss.note(f"{text} holds {bounds.start} to {bounds.stop}")
        return max(bounds.start, min(offset, bounds.stop))


def resumed(
    start: StreamOffset,
    found: Mapping[str, Bounds],
    options: SourceOptions,
    loss: DataLoss,
    left_out: Collection[str],
) -> dict[str, TopicOffset]:
    """Where the next batch begins, in the topics of the last one and in those that joined.

    Topics of `left_out` are in no batch for now.

    Raises:
        UsageError: `spark.data-loss`, messages that were not read yet no longer exist.
    """
    begun = {}
    for topic, end in start.topics.items():
        # A topic that is no longer selected was left on purpose.
        if topic not in left_out and options.matches(topic):
            begin = resumed_in(topic, end, found.get(topic), loss)
            if begin is not None:
                begun[topic] = begin
    for topic, bounds in found.items():
        if topic not in start.topics:
            begun[topic] = TopicOffset(bounds.epoch, bounds.start, bounds.start)
    return begun


def resumed_in(
    topic: str, end: TopicOffset, bounds: Bounds | None, loss: DataLoss
) -> TopicOffset | None:
    """Where reading goes on in a topic that was read up to `end`; None if it was deleted."""
    if bounds is None:
        loss.note(f"topic {topic!r} was deleted; it was read up to offset {end.offset}")
        return None
    if bounds.epoch != end.epoch:
        text = f"topic {topic!r} was deleted and created again (epoch {end.epoch}, now"
        loss.note(f"{text} {bounds.epoch}); it was read up to offset {end.offset}")
        return TopicOffset(bounds.epoch, bounds.start, bounds.start)
    if not bounds.start <= end.offset <= bounds.stop:
        what = "has expired" if end.offset < bounds.start else "is not in the log"
        text = f"topic {topic!r}: the next offset to read, {end.offset}, {what}; the log holds"
        loss.note(f"{text} {bounds.start} to {bounds.stop}")
        offset = max(bounds.start, min(end.offset, bounds.stop))
        return TopicOffset(bounds.epoch, offset, offset)
    return TopicOffset(end.epoch, end.offset)


def shares(available: dict[str, int], total_max: int) -> dict[str, int]:
    """How many messages to take of each topic: in proportion, `total_max` in all.

    A topic with messages gets at least one while there is room.
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
