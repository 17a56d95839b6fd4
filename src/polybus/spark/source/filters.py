"""Filters that Spark hands down: what of the log need not be looked at.

Spark applies all of them again: a filter here only says which topics, offsets, files, row groups
and commits cannot have a row that meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from polybus.log.history.file_reader import ALWAYS, TimeRange

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class Narrowed:
    """What is left to read: offsets `start` to `stop`, some topics, some times."""

    start: int = 0
    stop: int = _OFFSET_MAX
    topics: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    times: TimeRange = ALWAYS

    def has_topic(self, topic: str) -> bool:
        named = self.topics is None or topic in self.topics
        return named and all(topic.startswith(prefix) for prefix in self.prefixes)


def narrow(filters: Iterable[Filter]) -> Narrowed:
    """What the filters, all of them together, leave to read."""
    narrowed = Narrowed()
    for one in filters:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        rule = _RULES.get(attribute[0]) if len(attribute) == 1 else None
        if rule is not None:
            narrowed = rule(narrowed, one)
    return narrowed


def _offset(now: Narrowed, one: Any) -> Narrowed:
    value = getattr(one, "value", None)
    if isinstance(one, In) and value and all(type(item) is int for item in value):
        return _between(now, min(value), max(value) + 1)
    if type(value) is not int:
        return now
    match one:
        case EqualTo() | EqualNullSafe():
            return _between(now, value, value + 1)
        case GreaterThan():
            return _between(now, value + 1, _OFFSET_MAX)
        case GreaterThanOrEqual():
            return _between(now, value, _OFFSET_MAX)
        case LessThan():
            return _between(now, 0, value)
        case LessThanOrEqual():
            return _between(now, 0, value + 1)
    return now


def _between(now: Narrowed, start: int, stop: int) -> Narrowed:
    return replace(now, start=max(now.start, start), stop=min(now.stop, stop))


def _topic(now: Narrowed, one: Any) -> Narrowed:
    value = getattr(one, "value", None)
    if isinstance(one, StringStartsWith) and isinstance(value, str):
        return replace(now, prefixes=(*now.prefixes, value))
    if isinstance(one, EqualTo | EqualNullSafe) and isinstance(value, str):
        found = frozenset((value,))
    elif isinstance(one, In) and value and all(isinstance(item, str) for item in value):
        found = frozenset(value)
    else:
        return now
    return replace(now, topics=found if now.topics is None else now.topics & found)


def _timestamp(now: Narrowed, one: Any) -> Narrowed:
    value = getattr(one, "value", None)
    if not isinstance(value, datetime) or value.tzinfo is None:
        return now
    moment_us = (value - _EPOCH) // timedelta(microseconds=1)
    low, high = now.times.since_us, now.times.until_us
    match one:
        case EqualTo() | EqualNullSafe():
            low, high = max(low, moment_us), min(high, moment_us)
        case GreaterThan() | GreaterThanOrEqual():
            low = max(low, moment_us)
        case LessThan() | LessThanOrEqual():
            high = min(high, moment_us)
    return replace(now, times=TimeRange(low, high))


_RULES: dict[str, Callable[[Narrowed, Any], Narrowed]] = {
    "offset": _offset,
    "topic": _topic,
    "timestamp": _timestamp,
}
