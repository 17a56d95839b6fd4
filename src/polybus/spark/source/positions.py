"""Which topics are read, and where each begins and ends.

The options decide where a query begins; the offset in the checkpoint decides where a stream
resumes; the bounds of the log show which messages still exist. Missing messages are data loss.

Damaged topics are found before a batch is planned, and held in place while the others continue. The
end offset of a batch is final once Spark has written it to its checkpoint: the batch runs again
with it until it succeeds. So with `failOnDamage` false the reader verifies a range before it plans
it: it reads the offsets of the range, which compares all checksums, and plans up to the damage.
The topic keeps that offset until the file is restored. Damage that occurs after the plan fails the
batch until the file is restored, because a batch that ran once must not change.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from polybus.errors import StorageError, UsageError
from polybus.lake import stopped as stopped_topics
from polybus.lake.stopped import StoppedTopic
from polybus.log.interface import Bounds
from polybus.log.reading.offset_reader import OffsetReader, next_offset
from polybus.spark.checkpoint import TopicOffset
from polybus.spark.option_values import EARLIEST, LATEST
from polybus.spark.origin import BATCH_BYTES_MAX, open_origin
from polybus.spark.source.options import SourceOptions

logger = logging.getLogger("polybus.spark")
_LOGGED_MAX = 1000
CODES = ("log.damaged", "log.frozen")
RECHECK_S = 10.0
"""How long a damaged topic is not checked again: each check reads the damaged range."""
CHECK_ROWS = 500
"""The precision of locating damage: up to this many intact messages before it are held too."""


class DataLoss:
    """Handles missing messages: an error, or a warning in the log, once each."""

    def __init__(self, *, fail: bool) -> None:
        self._fail = fail
        self._logged: set[str] = set()

    def report(self, text: str) -> None:
        """Raises UsageError `spark.data-loss` unless the option failOnDataLoss is false."""
        if self._fail:
            advice = "set failOnDataLoss to false to continue with the messages that exist"
            raise UsageError("spark.data-loss", f"{text}; {advice}, or start a new checkpoint")
        if text not in self._logged and len(self._logged) < _LOGGED_MAX:
            self._logged.add(text)
            logger.warning("data loss: %s", text)


@dataclass(frozen=True, slots=True)
class TopicDamage:
    """The damage of a topic; `offset` is where it is held, None if its bounds are unknown."""

    text: str
    offset: int | None
    found_at_s: float

    def is_recent(self) -> bool:
        return monotonic() - self.found_at_s < RECHECK_S


class HeldTopics:
    """The damaged topics of a stream. They are found again after a restart, so none are stored.

    With `fail` no topic is held: damage is raised.
    """

    def __init__(self, origin: OffsetReader, *, fail: bool) -> None:
        self._origin = origin
        self._fail = fail
        self._damages: dict[str, TopicDamage] = {}
        self._short: dict[str, str] = {}

    @property
    def texts(self) -> dict[str, str]:
        """The damage, by topic."""
        damages = {topic: damage.text for topic, damage in self._damages.items()}
        return dict(sorted((self._short | damages).items()))

    def bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """The bounds of the topics whose bounds can be read."""
        selected = list(topics)
        asked = selected
        if self._damages:
            asked = [topic for topic in selected if not self._has_unknown_bounds(topic)]
        try:
            found = self._origin.all_bounds(asked)
        except StorageError as error:
            self._check_is_damage(error)
            found = {}
            for topic in asked:
                try:
                    found |= self._origin.all_bounds([topic])
                except StorageError as damage:
                    self._hold(topic, damage, None)
        for topic, known in list(self._damages.items()):
            # Its bounds can be read again, or it was deleted.
            if (known.offset is None) == (topic in found) or topic not in selected:
                del self._damages[topic]
        return found

    def complete(
        self, found: Mapping[str, Bounds], ends: Mapping[str, TopicOffset]
    ) -> dict[str, Bounds]:
        """Leave out the topics that end before an already read offset: a file of them is missing.

        If reading went back to their end, it would repeat messages once the file is restored.
        """
        short = {}
        for topic, end in ends.items():
            if text := self._missing(topic, found.get(topic), end):
                short[topic] = text
        for topic in short.keys() - self._short.keys():
            logger.warning("topic %r is held in place: log.damaged: %s", topic, short[topic])
        self._short = short
        return {topic: bounds for topic, bounds in found.items() if topic not in short}

    def stop(self, topic: str, stop: int) -> int:
        """The stop offset of a topic, or the offset where it is known to be held."""
        damage = self._damages.get(topic)
        if damage is None or damage.offset is None or not damage.is_recent():
            return stop
        return min(stop, damage.offset)

    def intact_stop(self, topic: str, first: int, stop: int) -> int:
        """Verify a range; return the offset before which every message can be read."""
        if self._fail:
            return stop
        if self.stop(topic, stop) <= first:
            return first
        offset = first
        try:
            plan = self._origin.plan(topic, first, stop)
            for rows in self._origin.read_plan(
                plan, columns=("offset",), rows_max=CHECK_ROWS, bytes_max=BATCH_BYTES_MAX
            ):
                offset = next_offset(rows)
        except StorageError as error:
            self._hold(topic, error, offset)
            return offset
        except UsageError:
            # Expired or deleted just now, which is data loss and not damage.
            pass
        self._damages.pop(topic, None)
        return stop

    def has_all(self, topic: str, bounds: Bounds, first: int, end: TopicOffset) -> bool:
        """Whether the messages of a planned batch can be read."""
        if self._missing(topic, bounds, end):
            return False
        return first >= end.offset or self.intact_stop(topic, first, end.offset) >= end.offset

    def _has_unknown_bounds(self, topic: str) -> bool:
        damage = self._damages.get(topic)
        return damage is not None and damage.offset is None and damage.is_recent()

    def check_complete(self, topic: str, bounds: Bounds | None, end: TopicOffset) -> None:
        """Raises StorageError `log.damaged` if a file is missing: a batch that ran once waits for
        it.
        """
        if text := self._missing(topic, bounds, end):
            raise StorageError("log.damaged", text)

    def _missing(self, topic: str, bounds: Bounds | None, end: TopicOffset) -> str:
        """The missing messages of a topic that ends before a durable offset, which is damage."""
        if self._fail or bounds is None or bounds.epoch != end.epoch or bounds.stop >= end.offset:
            return ""
        text = f"topic {topic!r}: messages before offset {end.offset} are missing from the log"
        return f"{text}; run polybus verify"

    def _hold(self, topic: str, error: StorageError, offset: int | None) -> None:
        self._check_is_damage(error)
        known = self._damages.get(topic)
        text = error.text
        if known is not None and known.offset == offset:
            # The text names the requested range: keep it, or each check would look like new damage.
            text = known.text
        else:
            logger.warning("topic %r is held in place: %s: %s", topic, error.code, text)
        self._damages[topic] = TopicDamage(text, offset, monotonic())

    def _check_is_damage(self, error: StorageError) -> None:
        if self._fail or error.code not in CODES:
            raise error


class TopicPositions:
    """The topics that the options of a reader select, in the log that they locate."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.origin = open_origin(options.location)
        self.loss = DataLoss(fail=options.fail_on_data_loss)
        self.held = HeldTopics(self.origin, fail=options.fail_on_damage)
        self._every: list[str] = []
        self._selected: list[str] = []
        """Those that the pattern matches."""

    def matching(self, *, strict: bool = False) -> dict[str, Bounds]:
        """The bounds of the topics that are selected, exist and are not held.

        Topics of `leaveOut` are not read at all: they may be damaged.

        Raises:
            UsageError: with `strict`: `topic.unknown`, a topic that is named does not exist.
            StorageError: `log.damaged`.
        """
        options = self.options
        selected: Collection[str] = options.topics
        if options.pattern is not None:
            every = self.origin.topics(system=options.system)
            if every != self._every:
                self._every = every
                self._selected = list(filter(re.compile(options.pattern).fullmatch, every))
            selected = self._selected
        if options.left_out:
            selected = [topic for topic in selected if topic not in options.left_out]
        bounds = self.held.bounds(selected)
        if strict and options.pattern is None:
            missing = [one for one in selected if one not in {**bounds, **self.held.texts}]
            if missing:
                text = f"option subscribe: topic {missing[0]!r} does not exist in"
                text = f"{text} {options.location}; polybus topics list shows all topics"
                raise UsageError("topic.unknown", text)
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
            self.loss.report(f"{text} holds {bounds.start} to {bounds.stop}")
        return max(bounds.start, min(offset, bounds.stop))

    def moving(self, ends: Mapping[str, Any], found: Mapping[str, Bounds]) -> list[str]:
        """The topics of an offset in JSON that were not read to their end."""
        noted = self._noted()
        return [
            topic
            for topic, end in ends.items()
            if (bounds := found.get(topic)) is None
            or end != {"epoch": bounds.epoch, "offset": bounds.stop}
            or topic in noted
        ]

    def resumed(
        self,
        ends: Mapping[str, TopicOffset],
        found: Mapping[str, Bounds],
        left_out: Collection[str],
    ) -> dict[str, TopicOffset]:
        """Where the next batch begins, in the topics of the last one and in those that joined.

        Topics of `left_out` are in no batch for now.

        Raises:
            UsageError: `spark.data-loss`, messages that were not read yet no longer exist.
        """
        begun = {}
        for topic, end in ends.items():
            # A topic that is no longer selected was left on purpose.
            if topic not in left_out and (topic in found or self.options.matches(topic)):
                begin = self.resumed_in(topic, end, found.get(topic))
                if begin is not None:
                    begun[topic] = begin
        for topic, bounds in found.items():
            if topic not in ends:
                begun[topic] = TopicOffset(bounds.epoch, bounds.start, bounds.start)
        return begun

    def stopped(self, ends: Mapping[str, TopicOffset]) -> dict[str, StoppedTopic]:
        """The topics that a batch of the standard pipeline has left out."""
        return {
            topic: one
            for topic, one in self._noted().items()
            if topic in ends and ends[topic].epoch == one.epoch
        }

    def _noted(self) -> Mapping[str, StoppedTopic]:
        folder = self.options.stopped_in
        return {} if folder is None else stopped_topics.read(folder)

    def kept(self, ends: Mapping[str, TopicOffset]) -> dict[str, TopicOffset]:
        """The offsets of topics that a plan leaves out: unchanged, or rewound."""
        back = {
            topic: TopicOffset(one.epoch, one.offset, one.offset, again=True)
            for topic, one in self.stopped(ends).items()
        }
        return {topic: TopicOffset(end.epoch, end.offset) for topic, end in ends.items()} | back

    def rewind_stopped(
        self, begun: dict[str, TopicOffset], found: Mapping[str, Bounds]
    ) -> dict[str, str]:
        """Rewind topics that the standard pipeline has stopped to where they continue.

        Returns those that are still stopped, each with what to do.
        """
        folder = self.options.stopped_in
        if folder is None:
            return {}
        stopped = self.stopped(begun)
        for topic, one in stopped.items():
            offset = max(one.offset, found[topic].start)
            begun[topic] = TopicOffset(one.epoch, offset, offset, again=True)
        return stopped_topics.still_stopped(folder, stopped)

    def resumed_in(self, topic: str, end: TopicOffset, bounds: Bounds | None) -> TopicOffset | None:
        """Where reading continues in a topic that was read up to `end`; None if it was deleted."""
        if bounds is None:
            self.loss.report(f"topic {topic!r} was deleted; it was read up to offset {end.offset}")
            return None
        if bounds.epoch != end.epoch:
            text = f"topic {topic!r} was deleted and created again (epoch {end.epoch}, now"
            self.loss.report(f"{text} {bounds.epoch}); it was read up to offset {end.offset}")
            return TopicOffset(bounds.epoch, bounds.start, bounds.start)
        if not bounds.start <= end.offset <= bounds.stop:
            what = "has expired" if end.offset < bounds.start else "is not in the log"
            text = f"topic {topic!r}: the next offset to read, {end.offset}, {what}; the log holds"
            self.loss.report(f"{text} {bounds.start} to {bounds.stop}")
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
