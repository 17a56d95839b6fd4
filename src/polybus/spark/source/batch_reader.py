"""`spark.read.format("polybus")`: plans in a worker process of its own, reads in the tasks.

Spark applies every filter again that it pushes down. Here a filter only excludes topics, offsets,
files, row groups and commits that cannot have a row that passes it.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import datasource as ds

from polybus.log.history.parquet import timestamp_us_of
from polybus.log.history.topic_history import ALWAYS, TimeRange
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.planning import partitions, read_partition
from polybus.spark.source.positions import TopicPositions

_FILTER_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
_NUMBER_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Narrowed:
    """What is left to read: offsets `start` to `stop`, topics that pass filters, some times."""

    start: int = 0
    stop: int = _NUMBER_MAX
    topics: tuple[Any, ...] = ()
    times: TimeRange = ALWAYS

    def has_topic(self, topic: str) -> bool:
        return all(_may_pass(topic, one) for one in self.topics)


class PolybusReader(ds.DataSourceReader):
    """Reads what the topics hold when it is planned."""

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
    """Also leaves out what filters on offset, timestamp and topic exclude."""

    def pushFilters(self, filters: list[ds.Filter]) -> Iterable[ds.Filter]:
        self._narrowed = narrow(filters)
        return filters


def batch_reader(options: SourceOptions) -> PolybusReader:
    """The reader for this process.

    Filters are pushed down only if the option says so. Spark 4.3 keeps the plan of a reader with
    the DataFrame: a second query over the same DataFrame, or a second use of it in one query, gets
    the filters of the last one that had any, and so returns too few rows.

    Spark refuses a reader that takes filters while spark.sql.python.filterPushdown.enabled is off,
    and does not tell a source whether it is. But it starts the worker process that asks for
    filters only when the setting is on, so only that process makes a FilteringReader.
    """
    main: Any = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    asks = _FILTER_WORKER in sys.modules or name == _FILTER_WORKER
    return FilteringReader(options) if asks and options.push_filters else PolybusReader(options)


def narrow(filters: Iterable[ds.Filter]) -> Narrowed:
    """What the conjunction of the filters leaves to read."""
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
