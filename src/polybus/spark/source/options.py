"""The options of `format("polybus")` as a source, with the names and meanings of the Kafka source.

`parse` checks all of them once. Mistakes are described in option_values.py; a missing choice of
topics is UsageError `spark.option-missing`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from polybus.errors import UsageError
from polybus.spark.location import BusLocation, find_location
from polybus.spark.option_values import EARLIEST, LATEST, GivenOptions, conflict, invalid
from polybus.spark.source.schema import COLUMNS

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
    "maxOffsetsPerTrigger": "only a stream has triggers",
    "minOffsetsPerTrigger": "only a stream has triggers",
    "maxTriggerDelay": "only a stream has triggers",
    "failOnDamage": "only a stream can hold a topic in place",
    "leaveOut": "only a stream keeps the offset of a topic",
}
BATCH_ONLY = {
    "endingOffsets": "a stream has no end",
    "endingTimestamp": "a stream has no end",
    "pushFilters": "Spark pushes no filters down to a stream",
}
VALUE_BYTES_MAX = 64 << 20
"""A larger value would not fit in the memory of a session of the default size."""
TRIGGER_DELAY_MS = 15 * 60 * 1000


@dataclass(frozen=True, slots=True)
class OffsetChoice:
    """Where to start or to end: at a time, or at an offset by topic (or EARLIEST, or LATEST)."""

    offset: int
    topics: Mapping[str, int]
    timestamp_us: int | None = None

    def of(self, topic: str) -> int:
        return self.topics.get(topic, self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """All options, with defaults for those that were not given."""

    location: BusLocation
    topics: tuple[str, ...]
    pattern: str | None
    starting: OffsetChoice
    ending: OffsetChoice
    is_late_start_allowed: bool
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
        """Whether the options select a topic."""
        if self.pattern is None:
            return topic in self.topics
        return re.fullmatch(self.pattern, topic) is not None

    @property
    def system(self) -> bool:
        """Whether system topics can be selected: a pattern must begin with `$` for that."""
        return self.pattern is None or self.pattern.startswith("\\$")


def given_options(options: Mapping[str, str]) -> GivenOptions:
    """The options with checked names. Raises UsageError."""
    given = GivenOptions(options, NAMES)
    given.check_apart("subscribe", "subscribePattern")
    given.check_apart("startingOffsets", "startingTimestamp")
    given.check_apart("endingOffsets", "endingTimestamp")
    return given


def parse(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """The options of a reader.

    Raises:
        UsageError: see the module docstring; `data.not-found`, there is no log to read.
    """
    given = given_options(options)
    for name, text in (BATCH_ONLY if streaming else STREAM_ONLY).items():
        if name in given:
            raise UsageError("spark.option-conflict", f"option {name}: {text}; remove the option")
    topics, pattern = _topics(given)
    lowest = given.number("minOffsetsPerTrigger")
    highest = given.number("maxOffsetsPerTrigger")
    if lowest is not None and highest is not None and lowest > highest:
        raise conflict("minOffsetsPerTrigger", "maxOffsetsPerTrigger", "the first is larger")
    if "maxTriggerDelay" in given and lowest is None:
        raise conflict("maxTriggerDelay", "minOffsetsPerTrigger", "the first needs the second")
    parsed = SourceOptions(
        location=find_location(given),
        topics=topics,
        pattern=pattern,
        starting=_starting(given, streaming=streaming),
        ending=_ending(given),
        is_late_start_allowed=_is_late_start_allowed(given),
        max_per_trigger=highest,
        min_per_trigger=lowest,
        max_delay_ms=given.duration_ms("maxTriggerDelay", TRIGGER_DELAY_MS),
        min_partitions=given.number("minPartitions"),
        max_records=given.number("maxRecordsPerPartition"),
        fail_on_data_loss=given.boolean("failOnDataLoss", True),
        fail_on_damage=given.boolean("failOnDamage", True),
        left_out=given.topics("leaveOut"),
        headers=given.boolean("includeHeaders", True),
        group=(given.get("groupId") or "").strip(),
        columns=columns_of(given),
        push_filters=given.boolean("pushFilters", False),
        value_bytes_max=given.number("maxValueBytes") or VALUE_BYTES_MAX,
    )
    for option, choice in (("startingOffsets", parsed.starting), ("endingOffsets", parsed.ending)):
        for topic in choice.topics:
            if not parsed.matches(topic):
                selecting = "subscribe" if pattern is None else "subscribePattern"
                raise conflict(option, selecting, f"the second does not select topic {topic!r}")
    return parsed


def columns_of(given: GivenOptions) -> tuple[str, ...]:
    """The columns to read, in the order of the schema."""
    if "columns" not in given:
        return COLUMNS
    wanted = {name.lower() for name in given.listed("columns")}
    unknown = sorted(wanted - set(COLUMNS))
    if unknown:
        text = f"{unknown[0]!r} is not a column; the columns are {', '.join(COLUMNS)}"
        raise invalid("columns", text)
    if not wanted:
        raise invalid("columns", "the list is empty; name at least one column")
    return tuple(name for name in COLUMNS if name in wanted)


def _topics(given: GivenOptions) -> tuple[tuple[str, ...], str | None]:
    pattern = given.get("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            text = f"{pattern!r} is not a regular expression: {error}"
            raise invalid("subscribePattern", text) from error
        return (), pattern
    if "subscribe" not in given:
        text = "no topics are selected; set option subscribe (a list with commas) or"
        raise UsageError("spark.option-missing", f"{text} subscribePattern")
    found = tuple(
        dict.fromkeys(given.topic("subscribe", name) for name in given.listed("subscribe"))
    )
    if not found:
        raise invalid("subscribe", "the list is empty; name at least one topic")
    return found, None


def _starting(given: GivenOptions, *, streaming: bool) -> OffsetChoice:
    offset, topics = given.offsets("startingOffsets", LATEST if streaming else EARLIEST)
    if not streaming and LATEST in (offset, *topics.values()):
        raise invalid("startingOffsets", "a batch that starts at latest reads nothing")
    return OffsetChoice(offset, topics, given.timestamp_us("startingTimestamp"))


def _ending(given: GivenOptions) -> OffsetChoice:
    offset, topics = given.offsets("endingOffsets", LATEST)
    if EARLIEST in (offset, *topics.values()):
        raise invalid("endingOffsets", "a batch that ends at earliest reads nothing")
    return OffsetChoice(offset, topics, given.timestamp_us("endingTimestamp"))


def _is_late_start_allowed(given: GivenOptions) -> bool:
    name = "startingOffsetsByTimestampStrategy"
    text = (given.get(name) or "error").lower()
    if text not in ("error", "latest"):
        raise invalid(name, f"{text!r} is neither error nor latest")
    return text == "latest"
