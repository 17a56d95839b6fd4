"""The options of `format("polybus")` as a source: read once, checked once, said in Kafka's words.

`parse` turns them into SourceOptions. Whatever is wrong with them is a UsageError that names the
option: an unknown name (`spark.option-unknown`, with the nearest one), a value that cannot be
(`spark.option-invalid`), two that contradict each other (`spark.option-conflict`), none where one
is needed (`spark.option-missing`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from polybus import names
from polybus.errors import UsageError
from polybus.spark.source.option_values import (
    EARLIEST,
    LATEST,
    boolean,
    conflict,
    duration_ms,
    invalid,
    number,
    offsets_of,
    timestamp_us,
    topics_of,
)
from polybus.spark.source.schema import COLUMNS
from polybus.spark.where import Where, where

NAMES = (
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "failOnDamage",
    "leaveOut",
    "includeHeaders",
    "groupId",
    "columns",
    "pushFilters",
    "maxValueBytes",
    "data",
    "url",
    "token",
)
STREAM_ONLY = {
    **dict.fromkeys(
        ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"),
        "only a stream has triggers",
    ),
    "failOnDamage": "only a stream can hold a topic in place",
    "leaveOut": "only a stream keeps its place in a topic",
}
BATCH_ONLY = {
    "endingOffsets": "a stream has no end",
    "endingTimestamp": "a stream has no end",
    "pushFilters": "Spark hands no filters to a stream",
}
CONFLICTS = (
    ("subscribe", "subscribePattern"),
    ("startingOffsets", "startingTimestamp"),
    ("endingOffsets", "endingTimestamp"),
    ("data", "url"),
)
VALUE_BYTES_MAX = 64 << 20
"""A larger value would not fit in the memory of a session of the usual size."""
TRIGGER_DELAY_MS = 15 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Position:
    """Where topics begin or end: by a time, or by an offset each; EARLIEST and LATEST are such."""

    offset: int
    topics: Mapping[str, int]
    timestamp_us: int | None = None

    def of(self, topic: str) -> int:
        return self.topics.get(topic, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """All options, with their defaults where they were not given."""

    where: Where
    topics: tuple[str, ...]
    pattern: str | None
    starting: Position
    ending: Position
    unmatched: Literal["error", "latest"]
    max_per_trigger: int | None
    min_per_trigger: int | None
    max_delay_ms: int
    min_partitions: int | None
    max_records: int | None
    fail_on_data_loss: bool
    fail_on_damage: bool
    left_out: frozenset[str]
    headers: bool
    group: str
    columns: tuple[str, ...]
    push_filters: bool
    value_bytes_max: int

    def matches(self, topic: str) -> bool:
        """Whether a topic is one of those that are read."""
        if self.pattern is None:
            return topic in self.topics
        return re.fullmatch(self.pattern, topic) is not None

    @property
    def system(self) -> bool:
        """Whether the topics may be the system's: only if the pattern says so itself."""
        return self.pattern is None or self.pattern.startswith("\\$")


def parse(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """The options of a reader.

    Raises:
        UsageError: see the module; `data.not-found`, there is nothing to read from.
    """
    given = checked(options)
    for name, text in (BATCH_ONLY if streaming else STREAM_ONLY).items():
        if name in given:
            raise UsageError("spark.option-conflict", f"option {name}: {text}; leave it out")
    topics, pattern = _topics(given)
    lowest = number(given, "minOffsetsPerTrigger")
    highest = number(given, "maxOffsetsPerTrigger")
    if lowest is not None and highest is not None and lowest > highest:
        raise conflict("minOffsetsPerTrigger", "maxOffsetsPerTrigger", "the first is larger")
    if "maxTriggerDelay" in given and lowest is None:
        raise conflict("maxTriggerDelay", "minOffsetsPerTrigger", "it means nothing without")
    parsed = SourceOptions(
        where=where(given),
        topics=topics,
        pattern=pattern,
        starting=_starting(given, streaming=streaming),
        ending=_ending(given),
        unmatched=_strategy(given),
        max_per_trigger=highest,
        min_per_trigger=lowest,
        max_delay_ms=duration_ms(given, "maxTriggerDelay", TRIGGER_DELAY_MS),
        min_partitions=number(given, "minPartitions"),
        max_records=number(given, "maxRecordsPerPartition"),
        fail_on_data_loss=boolean(given, "failOnDataLoss", True),
        fail_on_damage=boolean(given, "failOnDamage", True),
        left_out=topics_of(given, "leaveOut"),
        headers=boolean(given, "includeHeaders", True),
        group=given.get("groupId", "").strip(),
        columns=columns_of(given),
        push_filters=boolean(given, "pushFilters", False),
        value_bytes_max=number(given, "maxValueBytes") or VALUE_BYTES_MAX,
    )
    for option, position in (
        ("startingOffsets", parsed.starting),
        ("endingOffsets", parsed.ending),
    ):
        strange = [topic for topic in position.topics if not parsed.matches(topic)]
        if strange:
            chosen = "subscribe" if pattern is None else "subscribePattern"
            raise conflict(option, chosen, f"topic {strange[0]!r} is only in the first")
    return parsed


def checked(options: Mapping[str, str]) -> dict[str, str]:
    """The options by their proper names; Spark does not tell capitals from small letters."""
    proper = {name.lower(): name for name in NAMES}
    given = {}
    for name, value in options.items():
        known = proper.get(name.lower())
        if known is None:
            near = difflib.get_close_matches(name.lower(), proper, 1, cutoff=0.5)
            hint = f"did you mean {proper[near[0]]}? " if near else ""
            if name.lower() == "path":
                hint = "a data folder is named with option data. "
            text = f"option {name} is unknown; {hint}There are: {', '.join(NAMES)}"
            raise UsageError("spark.option-unknown", text)
        given[known] = str(value)
    for one, other in CONFLICTS:
        if one in given and other in given:
            raise conflict(one, other, "give one of the two")
    return given


def columns_of(given: Mapping[str, str]) -> tuple[str, ...]:
    """The columns to read, in our order."""
    text = given.get("columns")
    if text is None:
        return COLUMNS
    wanted = {name.lower() for name in _listed(text)}
    strange = sorted(wanted - set(COLUMNS))
    if strange:
        raise invalid("columns", f"{strange[0]!r} is no column; they are {', '.join(COLUMNS)}")
    if not wanted:
        raise invalid("columns", "it names no column")
    return tuple(name for name in COLUMNS if name in wanted)


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _topics(given: Mapping[str, str]) -> tuple[tuple[str, ...], str | None]:
    pattern = given.get("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            text = f"{pattern!r} is no regular expression: {error}"
            raise invalid("subscribePattern", text) from error
        return (), pattern
    listed = given.get("subscribe")
    if listed is None:
        said = "say which topics to read: option subscribe (a list with commas) or subscribePattern"
        raise UsageError("spark.option-missing", said)
    found = tuple(dict.fromkeys(names.canonical(one) for one in _listed(listed)))
    if not found:
        raise invalid("subscribe", "it names no topic")
    return found, None


def _starting(given: Mapping[str, str], *, streaming: bool) -> Position:
    time_us = timestamp_us(given, "startingTimestamp")
    default = LATEST if streaming else EARLIEST
    position = offsets_of(given, "startingOffsets", default)
    if not streaming and LATEST in (position[0], *position[1].values()):
        raise invalid("startingOffsets", "a batch that starts at latest reads nothing")
    return Position(*position, time_us)


def _ending(given: Mapping[str, str]) -> Position:
    position = offsets_of(given, "endingOffsets", LATEST)
    if EARLIEST in (position[0], *position[1].values()):
        raise invalid("endingOffsets", "a batch that ends at earliest reads nothing")
    return Position(*position, timestamp_us(given, "endingTimestamp"))


def _strategy(given: Mapping[str, str]) -> Literal["error", "latest"]:
    text = given.get("startingOffsetsByTimestampStrategy", "error").lower()
    if text == "error":
        return "error"
    if text == "latest":
        return "latest"
    raise invalid("startingOffsetsByTimestampStrategy", f"it is error or latest, not {text!r}")
