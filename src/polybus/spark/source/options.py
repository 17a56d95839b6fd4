"""The options of `format("polybus")` as a source, with the names and meanings of the Kafka source.

`parse` checks all of them once. Mistakes are described in option_values.py; a missing choice of
topics is UsageError `spark.option-missing`.

The columns of a message have types in Spark and in Arrow. Spark refuses a record batch whose schema
is not exactly its own: this order, 32-bit binary and string, everything nullable, microseconds in
UTC.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import types as T

from polybus.errors import UsageError
from polybus.spark import option_values as values
from polybus.spark.internals import arrow_schema_of
from polybus.spark.location import BusLocation, find_location
from polybus.spark.option_values import EARLIEST, LATEST, OffsetChoice, conflict, invalid, option

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = {
    "topic": T.StringType(),
    "partition": T.IntegerType(),
    "offset": T.LongType(),
    "timestamp": T.TimestampType(),
    "key": T.BinaryType(),
    "value": T.BinaryType(),
    "headers": T.MapType(T.StringType(), T.BinaryType()),
    "protocol": T.StringType(),
    "sender": T.StringType(),
    "epoch": T.LongType(),
    "value_bytes": T.LongType(),
    "reference": T.StructType(
        [
            T.StructField("id", T.StringType()),
            T.StructField("size", T.LongType()),
            T.StructField("sha256", T.StringType()),
            T.StructField("type", T.StringType()),
        ]
    ),
}
VALUE_BYTES = "value_bytes"
"""The size of the value in the log, which shows whether a value was cut. Only the option `columns`
selects it: the other columns are those of Kafka's source and a few more of the log."""
REFERENCE = "reference"
"""The reference to a large payload, which `blob` reads. It is selected in the same way."""
COLUMNS = tuple(name for name in _COLUMNS if name not in (VALUE_BYTES, REFERENCE))
CONSTANT = ("topic", "partition", "epoch")
"""The columns that have one value for all rows of a topic, and are not read from the log."""
PARTITION = 0
"""A topic has one order of messages, so it has one partition."""
VALUE_BYTES_MAX = 64 << 20
"""A larger value would not fit in the memory of a session of the default size."""
CUT_BYTES = 1024
"""The remaining bytes of a cut value; a smaller one is never cut, whatever the limit."""
TRIGGER_DELAY_MS = 15 * 60 * 1000
_TRIGGERS = {"stream_only": "only a stream has triggers"}
_HOLDS = {"stream_only": "only a stream can hold a topic in place"}
_KEEPS = {"stream_only": "only a stream keeps the offset of a topic"}
_NO_END = {"batch_only": "a stream has no end"}
_FILTERS = {"batch_only": "Spark pushes no filters down to a stream"}
_APART = (
    ("subscribe", "subscribePattern"),
    ("startingOffsets", "startingTimestamp"),
    ("endingOffsets", "endingTimestamp"),
)


def spark_schema(columns: Sequence[str] = COLUMNS) -> T.StructType:
    return T.StructType([T.StructField(name, _COLUMNS[name], True) for name in columns])


def arrow_schema(columns: Sequence[str] = COLUMNS) -> "pa.Schema":
    return arrow_schema_of(spark_schema(columns))


def _topics(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(values.topic_name, values.listed(text))))


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    return text


def _is_latest(text: str) -> bool:
    if text.lower() not in ("error", "latest"):
        raise ValueError(f"{text.lower()!r} is neither error nor latest")
    return text.lower() == "latest"


def _columns(text: str) -> tuple[str, ...]:
    """The columns to read, in the order of the schema."""
    wanted = {name.lower() for name in values.listed(text)}
    unknown = sorted(wanted - set(_COLUMNS))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not a column; the columns are {', '.join(_COLUMNS)}")
    return tuple(name for name in _COLUMNS if name in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """All options, with defaults for those that were not given."""

    location: BusLocation
    topics: tuple[str, ...] = option("subscribe", _topics, ())
    pattern: str | None = option("subscribePattern", _pattern, None)
    starting: OffsetChoice = option("startingOffsets", values.offsets, OffsetChoice())
    ending: OffsetChoice = option("endingOffsets", values.offsets, OffsetChoice(), **_NO_END)
    starting_us: int | None = option("startingTimestamp", values.timestamp_us, None)
    ending_us: int | None = option("endingTimestamp", values.timestamp_us, None, **_NO_END)
    is_late_start_allowed: bool = option("startingOffsetsByTimestampStrategy", _is_latest, False)
    max_per_trigger: int | None = option("maxOffsetsPerTrigger", values.number, None, **_TRIGGERS)
    min_per_trigger: int | None = option("minOffsetsPerTrigger", values.number, None, **_TRIGGERS)
    max_delay_ms: int = option("maxTriggerDelay", values.duration_ms, TRIGGER_DELAY_MS, **_TRIGGERS)
    min_partitions: int | None = option("minPartitions", values.number, None)
    max_records: int | None = option("maxRecordsPerPartition", values.number, None)
    fail_on_data_loss: bool = option("failOnDataLoss", values.boolean, True)
    fail_on_damage: bool = option("failOnDamage", values.boolean, True, **_HOLDS)
    stopped_in: Path | None = option("stoppedIn", Path, None, **_HOLDS)
    left_out: frozenset[str] = option("leaveOut", values.topic_set, frozenset(), **_KEEPS)
    headers: bool = option("includeHeaders", values.boolean, True)
    group: str = option("groupId", str.strip, "")
    columns: tuple[str, ...] = option("columns", _columns, COLUMNS)
    push_filters: bool = option("pushFilters", values.boolean, False, **_FILTERS)
    value_bytes_max: int = option("maxValueBytes", values.number, VALUE_BYTES_MAX)
    fail_on_large_value: bool = option("failOnLargeValue", values.boolean, True)

    def matches(self, topic: str) -> bool:
        """Whether the options select a topic."""
        if self.pattern is None:
            return topic in self.topics
        return re.fullmatch(self.pattern, topic) is not None

    @property
    def system(self) -> bool:
        """Whether system topics can be selected: a pattern must begin with `$` for that."""
        return self.pattern is None or self.pattern.startswith("\\$")


def given_columns(options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of a reader. Raises UsageError for most mistakes in the options."""
    given = values.given_options(SourceOptions, options, apart=_APART)
    return tuple(values.checked_values(SourceOptions, given).get("columns", COLUMNS))


def parse(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """The options of a reader.

    Raises:
        UsageError: see the module docstring; `data.not-found` if there is no log to read.
    """
    given = values.given_options(SourceOptions, options, apart=_APART)
    unfit = "batch_only" if streaming else "stream_only"
    for one in values.options_of(SourceOptions):
        name, why = one.metadata["name"], one.metadata.get(unfit)
        if why and name in given:
            raise UsageError("spark.option-conflict", f"option {name}: {why}; remove the option")
    if not given.keys() & {"subscribe", "subscribePattern"}:
        text = "no topics are selected; set option subscribe (a comma-separated list) or"
        raise UsageError("spark.option-missing", f"{text} subscribePattern")
    checked = values.checked_values(SourceOptions, given)
    if not streaming:
        starting = checked.get("starting", OffsetChoice())
        checked["starting"] = replace(starting, others=starting.others or EARLIEST)
    parsed = SourceOptions(location=find_location(given), **checked)
    lowest, highest = parsed.min_per_trigger, parsed.max_per_trigger
    if lowest is not None and highest is not None and lowest > highest:
        raise conflict("minOffsetsPerTrigger", "maxOffsetsPerTrigger", "the first is larger")
    if "maxTriggerDelay" in given and lowest is None:
        raise conflict("maxTriggerDelay", "minOffsetsPerTrigger", "the first needs the second")
    if not streaming and LATEST in parsed.starting:
        raise invalid(
            "startingOffsets", "a batch that starts at latest reads nothing; use earliest"
        )
    if EARLIEST in parsed.ending:
        raise invalid("endingOffsets", "a batch that ends at earliest reads nothing; use latest")
    for name, choice in (("startingOffsets", parsed.starting), ("endingOffsets", parsed.ending)):
        for topic in choice.topics:
            if not parsed.matches(topic):
                selecting = "subscribe" if parsed.pattern is None else "subscribePattern"
                raise conflict(name, selecting, f"the second does not select topic {topic!r}")
    return parsed
