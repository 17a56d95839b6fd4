"""Which topics are read, and where each begins and ends.

The options decide where a query begins, the offset in the checkpoint where a stream resumes, and
the bounds of the log what of that still exists. Missing messages are data loss.
"""

import logging
from collections.abc import Collection, Mapping

from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.spark.option_values import EARLIEST, LATEST
from polybus.spark.origin import open_origin
from polybus.spark.source.damage import HeldTopics
from polybus.spark.source.offsets import StreamOffset, TopicOffset
from polybus.spark.source.options import SourceOptions

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


class TopicPositions:
    """The topics that the options of a reader select, in the log that they locate."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.origin = open_origin(options.location)
        self.loss = DataLoss(fail=options.fail_on_data_loss)
        self.held = HeldTopics(self.origin, fail=options.fail_on_damage)

    def matching(self, *, strict: bool = False) -> dict[str, Bounds]:
        """The bounds of the topics that are selected, exist and are not held.

        Topics of `leaveOut` are not even looked at: they may be damaged.

        Raises:
            UsageError: with `strict`: `topic.unknown`, a topic that is named does not exist.
            StorageError: `log.damaged`.
        """
        options = self.options
        selected: Collection[str] = options.topics
        if options.pattern is not None:
            every = self.origin.topics(system=options.system)
            selected = [topic for topic in every if options.matches(topic)]
        selected = [topic for topic in selected if topic not in options.left_out]
        bounds = self.held.bounds(selected)
        missing = [one for one in selected if one not in bounds and one not in self.held.texts]
        if missing and strict and options.pattern is None:
            text = f"option subscribe: topic {missing[0]!r} does not exist in {options.location}"
            raise UsageError("topic.unknown", f"{text}; polybus topics list shows all topics")
        return bounds

    def begin(self, topic: str, bounds: Bounds) -> int:
        """The first offset to read, by the options.

        Raises:
            UsageError: `spark.timestamp-unmatched`, no message is that late; `spark.data-loss`.
        """
        options = self.options
        if options.starting_us is None:
            return self._within("startingOffsets", options.starting.of(topic), topic, bounds)
        offset = self.origin.offset_at(topic, options.starting_us)
        if offset >= bounds.stop and not options.is_late_start_allowed:
            text = f"option startingTimestamp: topic {topic!r} has no message at or after that time"
            advice = "set startingOffsetsByTimestampStrategy to latest to begin at the end"
            raise UsageError("spark.timestamp-unmatched", f"{text}; {advice}")
        return min(offset, bounds.stop)

    def end(self, topic: str, bounds: Bounds) -> int:
        """The offset to stop before, by the options. Raises UsageError `spark.data-loss`."""
        options = self.options
        if options.ending_us is not None:
            return min(self.origin.offset_at(topic, options.ending_us), bounds.stop)
        return self._within("endingOffsets", options.ending.of(topic), topic, bounds)

    def _within(self, option: str, offset: int, topic: str, bounds: Bounds) -> int:
        if offset in (EARLIEST, LATEST):
            return bounds.start if offset == EARLIEST else bounds.stop
        if not bounds.start <= offset <= bounds.stop:
            text = f"option {option}: offset {offset} of topic {topic!r} is not in the log, which"
            self.loss.note(f"{text} holds {bounds.start} to {bounds.stop}")
        return max(bounds.start, min(offset, bounds.stop))

    def resumed(
        self, start: StreamOffset, found: Mapping[str, Bounds], left_out: Collection[str]
    ) -> dict[str, TopicOffset]:
        """Where the next batch begins, in the topics of the last one and in those that joined.

        Topics of `left_out` are in no batch for now.

        Raises:
            UsageError: `spark.data-loss`, messages that were not read yet no longer exist.
        """
        begun = {}
        for topic, end in start.topics.items():
            # A topic that is no longer selected was left on purpose.
            if topic not in left_out and self.options.matches(topic):
                begin = self.resumed_in(topic, end, found.get(topic))
                if begin is not None:
                    begun[topic] = begin
        for topic, bounds in found.items():
            if topic not in start.topics:
                begun[topic] = TopicOffset(bounds.epoch, bounds.start, bounds.start)
        return begun

    def resumed_in(self, topic: str, end: TopicOffset, bounds: Bounds | None) -> TopicOffset | None:
        """Where reading goes on in a topic that was read up to `end`; None if it was deleted."""
        if bounds is None:
            self.loss.note(f"topic {topic!r} was deleted; it was read up to offset {end.offset}")
            return None
        if bounds.epoch != end.epoch:
            text = f"topic {topic!r} was deleted and created again (epoch {end.epoch}, now"
            self.loss.note(f"{text} {bounds.epoch}); it was read up to offset {end.offset}")
            return TopicOffset(bounds.epoch, bounds.start, bounds.start)
        if not bounds.start <= end.offset <= bounds.stop:
            what = "has expired" if end.offset < bounds.start else "is not in the log"
            text = f"topic {topic!r}: the next offset to read, {end.offset}, {what}; the log holds"
            self.loss.note(f"{text} {bounds.start} to {bounds.stop}")
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
