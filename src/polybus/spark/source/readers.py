"""The readers of `format("polybus")`: which messages a batch or a micro-batch reads.

A batch is planned in a worker process of its own, with the filters that Spark pushes down. Spark
applies every filter again: here it only excludes topics, offsets, files, row groups and commits
that cannot have a row that passes it.

The offsets of a stream come from the log and the checkpoint only. Its reader keeps only state that
a restart may lose: the target of `availableNow`, the time of the last batch, and what was logged.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from time import monotonic
from typing import Any

import pyarrow as pa
from msgspec.structs import replace as replaced
from pyspark.sql import datasource as ds
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from polybus.log.history.parquet import timestamp_us_of
from polybus.log.history.topic_history import ALWAYS, TimeRange
from polybus.log.interface import Bounds
from polybus.log.reading.pieces import ReadPlan
from polybus.spark.checkpoint import (
    StreamOffset,
    TopicOffset,
    changed_topics,
    from_json,
    topics_in,
)
from polybus.spark.internals import FILTER_WORKER
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.planning import partitions, read_partition
from polybus.spark.source.positions import TopicPositions, shares

_NUMBER_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Narrowed:
    """The range to read: offsets `start` to `stop`, topics that pass filters, a time range."""

    start: int = 0
    stop: int = _NUMBER_MAX
    topics: tuple[Any, ...] = ()
    times: TimeRange = ALWAYS

    def has_topic(self, topic: str) -> bool:
        return all(_may_pass(topic, one) for one in self.topics)


class PolybusReader(ds.DataSourceReader):
    """Reads the messages that the topics hold when it is planned."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._narrowed = Narrowed()

    def partitions(self) -> list[ds.InputPartition]:
        narrowed, positions = self._narrowed, TopicPositions(self._options)
        plans = []
        for topic, bounds in sorted(positions.matching(strict=True).items()):
            if not narrowed.has_topic(topic):
                continue
            start = max(positions.begin(topic, bounds), narrowed.start)
            stop = min(positions.end(topic, bounds), narrowed.stop)
            if start < stop:
                plans.append(positions.origin.plan(topic, start, stop, times=narrowed.times))
        return list(partitions(plans, self._options.min_partitions, self._options.max_records))

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options)


class FilteringReader(PolybusReader):
    """Also excludes messages by filters on offset, timestamp and topic."""

    def pushFilters(self, filters: list[ds.Filter]) -> Iterable[ds.Filter]:
        self._narrowed = narrow(filters)
        return filters


def batch_reader(options: SourceOptions) -> PolybusReader:
    """The reader for this process.

    Filters are pushed down only if the option says so. Spark 4.3 keeps the plan of a reader with
    the DataFrame: a second query over the same DataFrame, or a second use of it in one query, gets
    the filters of the last one that had any, and so returns too few rows.

    Spark refuses a reader that takes filters while spark.sql.python.filterPushdown.enabled is off,
    and a source cannot ask whether it is. But it starts the worker process that asks for
    filters only when the setting is on, so only that process makes a FilteringReader.
    """
    main: Any = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    asks = FILTER_WORKER in sys.modules or name == FILTER_WORKER
    return FilteringReader(options) if asks and options.push_filters else PolybusReader(options)


def narrow(filters: Iterable[ds.Filter]) -> Narrowed:
    """The range that the conjunction of the filters leaves to read."""
    narrowed = Narrowed()
    for one in filters:
        match getattr(one, "attribute", ()):
            case ("offset",):
                low, high = _interval(one)
                start, stop = max(narrowed.start, low), min(narrowed.stop, high + 1)
                narrowed = replace(narrowed, start=start, stop=stop)
            case ("timestamp",):
                low, high = _interval(one)
                times = narrowed.times
                times = TimeRange(max(times.since_us, low), min(times.until_us, high))
                narrowed = replace(narrowed, times=times)
            case ("topic",):
                narrowed = replace(narrowed, topics=(*narrowed.topics, one))
    return narrowed


def _interval(one: Any) -> tuple[int, int]:
    """The smallest and the largest number that can pass a filter."""
    value: Any = getattr(one, "value", None)
    values = [_integer(item) for item in (value if isinstance(one, ds.In) else (value,))]
    numbers = [number for number in values if number is not None]
    low, high = -_NUMBER_MAX - 1, _NUMBER_MAX
    if not numbers or len(numbers) < len(values):
        return low, high
    match one:
        case ds.EqualTo() | ds.EqualNullSafe() | ds.In():
            return min(numbers), max(numbers)
        case ds.GreaterThan():
            return numbers[0] + 1, high
        case ds.GreaterThanOrEqual():
            return numbers[0], high
        case ds.LessThan():
            return low, numbers[0] - 1
        case ds.LessThanOrEqual():
            return low, numbers[0]
    return low, high


def _integer(value: Any) -> int | None:
    """An offset, or a time in microseconds since 1970; None for anything else."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return timestamp_us_of(value)
    return value if type(value) is int else None


def _may_pass(topic: str, one: Any) -> bool:
    match one:
        case ds.EqualTo() | ds.EqualNullSafe():
            return bool(one.value == topic)
        case ds.In():
            return topic in one.value
        case ds.StringStartsWith():
            return topic.startswith(one.value)
    return True


class PolybusStreamReader(ds.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics while they grow."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._target: dict[str, Bounds] | None = None
        self._batch_at_s: float | None = None

    @cached_property
    def _positions(self) -> TopicPositions:
        # Spark sends the reader to tasks, so the log is opened on first use.
        return TopicPositions(self._options)

    def initialOffset(self) -> dict[str, Any]:
        topics = {
            topic: TopicOffset(bounds.epoch, self._positions.begin(topic, bounds))
            for topic, bounds in self._positions.matching(strict=True).items()
        }
        return StreamOffset(self._options.group, topics).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_per_trigger is not None:
            return ReadMaxRows(self._options.max_per_trigger)
        if self._options.min_per_trigger is not None:
            return ReadMinRows(self._options.min_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._positions.matching()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        positions = self._positions
        held, every = positions.held, positions.matching()
        # Most of many topics have no new messages: these cost only a comparison each.
        ends = topics_in(start)
        before = from_json(start, positions.moving(ends, every))
        moving = before.topics
        concerned = [*moving, *sorted(every.keys() - ends.keys())]
        fresh = {topic: every[topic] for topic in concerned if topic in every}
        found = held.complete(fresh, moving)
        left_out = (held.texts.keys() - found.keys()) | self._options.left_out
        begun = positions.resumed(moving, found, left_out)
        stopped = positions.rewind_stopped(begun, found)
        available = {
            topic: max(0, self._stop_of(topic, begin, found[topic]) - begin.offset)
            for topic, begin in begun.items()
        }
        available |= dict.fromkeys(stopped, 0)
        if self._waits_for_more(sum(available.values()), limit):
            return start
        if isinstance(limit, ReadMaxRows):
            available = shares(available, limit.max_rows)
        for topic, count in available.items():
            if count:
                first = begun[topic].offset
                available[topic] = held.intact_stop(topic, first, first + count) - first
        topics = {
            topic: replaced(begin, offset=begin.offset + count) if count else begin
            for topic, begin in begun.items()
            # A topic without messages joins when it has some.
            if (count := available[topic]) or topic in moving
        }
        # Topics that are left out keep their offsets.
        staying = {one: end for one, end in moving.items() if one in left_out}
        topics |= positions.kept(staying)
        if any(available.values()):
            self._batch_at_s = monotonic()
        end = StreamOffset(self._options.group, topics, held.texts, stopped)
        if end.is_at(before):
            return start
        gone = moving.keys() - topics.keys()
        return end.to_json({topic: at for topic, at in ends.items() if topic not in gone})

    def _stop_of(self, topic: str, begin: TopicOffset, bounds: Bounds) -> int:
        """Where the topic ends for now."""
        stop = bounds.stop
        if self._target is not None:
            target = self._target.get(topic)
            if target is None or target.epoch != begin.epoch:
                return begin.offset
            stop = min(target.stop, stop)
        return self._positions.held.stop(topic, stop)

    def _waits_for_more(self, rows: int, limit: ReadLimit) -> bool:
        """Whether there are too few rows for a batch, and the longest delay is not over yet."""
        lowest = self._options.min_per_trigger
        if lowest is None or isinstance(limit, ReadAllAvailable) or self._target is not None:
            return False
        if rows >= lowest or self._batch_at_s is None:
            return False
        return (monotonic() - self._batch_at_s) * 1000 < self._options.max_delay_ms

    def reportLatestOffset(self) -> dict[str, Any]:
        topics = {
            topic: {"epoch": bounds.epoch, "offset": bounds.stop}
            for topic, bounds in self._positions.matching().items()
        }
        return {"group": self._options.group, "topics": topics}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[ds.InputPartition]:
        changed, known = changed_topics(start, end), topics_in(start)
        begun = from_json(start, [topic for topic in changed if topic in known])
        ended = from_json(end, changed)
        plans = []
        left_out = self._positions.stopped(ended.topics)
        for topic, stop in ended.topics.items():
            if topic in left_out and not stop.again:
                continue
            before = begun.topics.get(topic)
            if stop.begin is not None:
                first = stop.begin
            elif before is not None and before.epoch == stop.epoch:
                first = before.offset
            else:
                first = 0
            if first < stop.offset:
                plan = self._plan(topic, stop.epoch, first, stop.offset)
                plans += [] if plan is None else [plan]
        return list(partitions(plans, self._options.min_partitions, self._options.max_records))

    def _plan(self, topic: str, epoch: int, first: int, stop: int) -> ReadPlan | None:
        """Locate a batch's messages of a topic; missing ones are data loss."""
        positions = self._positions
        bounds = positions.origin.all_bounds([topic]).get(topic)
        positions.held.check_complete(topic, bounds, TopicOffset(epoch, stop))
        begin = positions.resumed_in(topic, TopicOffset(epoch, first), bounds)
        if begin is None or bounds is None or begin.epoch != epoch:
            return None
        if stop > bounds.stop:
            text = f"topic {topic!r}: a batch ends at offset {stop}, the log at {bounds.stop}"
            positions.loss.report(text)
        stop = min(stop, bounds.stop)
        return positions.origin.plan(topic, begin.offset, stop) if begin.offset < stop else None

    def read(self, partition: ds.InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing: Spark calls it a batch late. The session's listener reports positions."""
