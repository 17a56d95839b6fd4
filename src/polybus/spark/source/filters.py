"""Filters that Spark pushes down: which part of the log needs no reading.

Spark applies every filter again. Here a filter only excludes topics, offsets, files, row groups
and commits that cannot have a row that passes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql import datasource as ds

from polybus.log.history.file_reader import ALWAYS, TimeRange

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBER_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Narrowed:
    """What is left to read: offsets `start` to `stop`, some topics, some times."""

    start: int = 0
    stop: int = _NUMBER_MAX
    topics: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    times: TimeRange = ALWAYS

    def has_topic(self, topic: str) -> bool:
        is_named = self.topics is None or topic in self.topics
        return is_named and all(topic.startswith(prefix) for prefix in self.prefixes)


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
                narrowed = _with_topic(narrowed, one)
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
        return (value - _EPOCH) // timedelta(microseconds=1)
    return value if type(value) is int else None


def _with_topic(now: Narrowed, one: Any) -> Narrowed:
    value = getattr(one, "value", None)
    if isinstance(one, ds.StringStartsWith) and isinstance(value, str):
        return replace(now, prefixes=(*now.prefixes, value))
    if isinstance(one, ds.EqualTo | ds.EqualNullSafe) and isinstance(value, str):
        found = frozenset((value,))
    elif isinstance(one, ds.In) and value and all(isinstance(item, str) for item in value):
        found = frozenset(value)
    else:
        return now
    return replace(now, topics=found if now.topics is None else now.topics & found)
