"""The expectations of topics' messages, and the table `expectations` with the counts.

A condition may use the columns of silver and those of the topic's schema. Messages that are
quarantined for another reason do not count. A condition that Spark does not understand is left out,
and the flow shows why: the other topics must not wait for its correction. A topic with forbidden
messages (`expect_or_fail`) is stopped, but no other topic (stops.py).
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame

from polybus.lake.settings import PipelineSettings
from polybus.lake.table import open_table
from polybus.spark.causes import clean_cause
from polybus.spark.declared_fields import field_of, literal, schema_fields
from polybus.spark.expectations import Expectation, ExpectationCount, declared
from polybus.spark.pipelines.standard.gold import TIME, Accumulated, Groups

TABLE = "expectations"
KEYS = ("topic", "expectation", "minute")
COUNTS = ("passed", "failed")
MINUTE_US = 60_000_000
SCHEMA = pa.schema(
    {
        "topic": pa.string(),
        "expectation": pa.string(),
        "minute": TIME,
        "consequence": pa.string(),
        "passed": pa.int64(),
        "failed": pa.int64(),
        "batch": pa.int64(),
    }
)
_TOKENS = re.compile(
    r"""'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.)*"
      | (?<![.:\w]) (?P<name>`[^`]+`|[A-Za-z_]\w*) (?!\w|\s*\()""",
    re.VERBOSE,
)


def expectations(settings: PipelineSettings) -> list[Expectation]:
    """The expectations of all topics."""
    found = []
    for topic in settings.topics:
        fields = [] if topic.schema is None else schema_fields(topic.name, topic.schema)
        types = {name.lower(): field_of(name, kind) for name, kind, _ in fields}
        for one in declared(topic):
            is_counted = f"COALESCE(reason, '') IN ('', {literal(one.reason)})"
            where = f"topic = {literal(topic.name)} AND {is_counted}"
            found.append(replace(one, condition=with_fields(one.condition, types), where=where))
    return found


def with_fields(condition: str, types: Mapping[str, str]) -> str:
    """A condition with the columns of a schema as expressions over the payload."""

    def written(token: re.Match[str]) -> str:
        name = token["name"]
        return token[0] if name is None else types.get(name.strip("`").lower(), name)

    return _TOKENS.sub(written, condition)


def problem_with(one: Expectation, decoded: DataFrame) -> str | None:
    """Why Spark cannot evaluate a condition on decoded messages."""
    try:
        kind = decoded.selectExpr(f"({one.condition}) AS is_met").schema["is_met"].dataType
    except Exception as error:
        return f"topic {one.topic}: expectation {one.name!r} is left out: {clean_cause(error)}"
    if kind.simpleString() != "boolean":
        text = f"topic {one.topic}: expectation {one.name!r} is left out"
        return f"{text}: it is {kind.simpleString()}, not a condition"
    return None


def expectations_table(data: Path) -> Accumulated:
    table = open_table(data, TABLE, is_fed=True)
    return Accumulated(table, KEYS, "minute", combine=combine_counts)


def rows_of(counts: Sequence[ExpectationCount], batch_id: int) -> pa.Table:
    """Rows of the table, in the current minute."""
    minute_us = time.time_ns() // 1000 // MINUTE_US * MINUTE_US
    rows = [
        {
            "topic": one.topic,
            "expectation": one.name,
            "minute": minute_us,
            "consequence": one.consequence,
            "passed": one.passed,
            "failed": one.failed,
            "batch": batch_id,
        }
        for one in counts
        if one.passed or one.failed
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def combine_counts(rows: pa.Table) -> pa.Table:
    """One row per topic, expectation and minute."""
    how = dict.fromkeys(KEYS, "first") | {"consequence": "last", "batch": "max"}
    columns = Groups(rows, KEYS).aggregate(how | dict.fromkeys(COUNTS, "sum"))
    return pa.table(columns).select(SCHEMA.names)
