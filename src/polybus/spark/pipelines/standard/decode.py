"""Decoding as Spark expressions: format, id and time of a value, and why it is quarantined.

A value that begins with `{` or `[` must be JSON. Other values are text if they are UTF-8, else
binary; a message with headers and no value is `properties`. A topic may declare more
(config.DeclaredTopic): that all its values are JSON, the columns they must have, and the paths of
id and time in them.

The expressions are SQL text: every function of PySpark is a call to the JVM, for which a
micro-batch has no time.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.types import StructType

from polybus.config import DeclaredTopic
from polybus.errors import UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.settings import PipelineSettings
from polybus.lake.table import open_table
from polybus.lake.typed import MESSAGE_COLUMNS, PREFIX
from polybus.spark.source.options import CUT_BYTES
from polybus.spark.tables import read

ID_HEADER = "message-id"
TIME_HEADER = "event-time"
FIELDS_MAX = 200
SILVER_COLUMNS = (
    *("topic", "epoch", "offset", "timestamp", "event_time", "late", "protocol", "sender", "key"),
    *("message_id", "bytes", "format", "payload", "text", "binary", "properties"),
)
SILVER = [
    "TO_JSON(payload) AS payload" if name == "payload" else f"`{name}`" for name in SILVER_COLUMNS
]
QUARANTINE_COLUMNS = (
    *("topic", "epoch", "offset", "timestamp", "protocol", "sender", "key", "value", "bytes"),
    *("cut", "headers", "reason"),
)
TEXT = "CAST(value AS STRING)"
BYTES = "COALESCE(value_bytes, 0) AS bytes"
DECLARED = "the topic is declared as JSON, but the value"
# What Python's datetime holds in every time zone, in microseconds: year 1 to 9999 less a day.
TIMES_US = (-62_135_510_400_000_000, 253_402_214_400_000_000)
NOT_JSON = "is not valid JSON, or has a duplicate key"


def columns(settings: PipelineSettings) -> list[str]:
    """Expressions that add SILVER_COLUMNS and QUARANTINE_COLUMNS to messages of our source.

    Each may use those before it. `reason` says why a message belongs in quarantine; it is null for
    all others.

    Raises:
        UsageError: `pipeline.schema`, a topic's schema is invalid.
    """
    topics = settings.topics
    limit = settings.pipeline.value_bytes_max
    declared = [literal(one.name) for one in topics if one.format == "json" or one.schema]
    is_declared = f"topic IN ({', '.join(declared)})" if declared else "false"
    begins = literal(r"^[ \t\r\n]*[\[{]")
    time = first_of(topics, lambda one: one.event_time, TIME_HEADER)
    return [
        f"{is_declared} AS is_declared",
        BYTES,
        f"bytes <= {limit} AND IS_VALID_UTF8({TEXT}) AS is_text",
        f"is_text AND (is_declared OR {TEXT} RLIKE {begins}) AS meant_as_json",
        f"IF(meant_as_json, TRY_PARSE_JSON({TEXT}), NULL) AS payload",
        f"{reason(topics, limit)} AS reason",
        f"{first_of(topics, lambda one: one.message_id, ID_HEADER)} AS message_id",
        f"{time} AS event_time_text",
        "CASE WHEN payload IS NOT NULL THEN 'json' "
        "WHEN bytes = 0 AND SIZE(headers) > 0 THEN 'properties' "
        "WHEN is_text THEN 'text' ELSE 'binary' END AS format",
        f"{time_of('event_time_text')} AS told_time",
        f"IF(UNIX_MICROS(told_time) BETWEEN {TIMES_US[0]} AND {TIMES_US[1]}, told_time, timestamp) "
        "AS event_time",
        f"IF(format = 'text', {TEXT}, NULL) AS text",
        "IF(format = 'binary', value, NULL) AS binary",
        "TRANSFORM_VALUES(headers, (name, content) -> COALESCE("
        "TRY_VALIDATE_UTF8(CAST(content AS STRING)), BASE64(content))) AS properties",
        f"event_time < timestamp - INTERVAL {settings.pipeline.watermark_s:.6f} SECOND AS late",
    ]


def quarantined(limit: int) -> list[str]:
    """Expressions for a row of quarantine, after `bytes` and `reason`.

    Of a value over the limit it has the beginning only: Parquet's writer keeps many values in the
    memory of the JVM. The log has the whole value.
    """
    is_cut = f"bytes > {max(limit, CUT_BYTES)}"
    columns = {name: name for name in QUARANTINE_COLUMNS}
    columns["value"] = f"IF({is_cut}, SUBSTRING(value, 1, {CUT_BYTES}), value) AS value"
    columns["cut"] = f"{is_cut} AS cut"
    return [*columns.values(), "CURRENT_TIMESTAMP() AS quarantined_at"]


def literal(text: str) -> str:
    """An SQL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def reason(topics: Sequence[DeclaredTopic], limit: int) -> str:
    cases = [
        f"WHEN bytes > {limit} THEN "
        f"CONCAT('the value has ', bytes, ' bytes; value-bytes-max is {limit}')",
        f"WHEN is_declared AND NOT is_text THEN '{DECLARED} is not UTF-8'",
        "WHEN meant_as_json AND payload IS NULL THEN "
        f"CONCAT(IF(is_declared, '{DECLARED}', 'begins like JSON, but'), ' {NOT_JSON}')",
    ]
    for topic in topics:
        if topic.schema is not None:
            broken = broken_fields(topic.name, topic.schema)
            cases.append(
                f"WHEN topic = {literal(topic.name)} AND {broken} <> '' "
                f"THEN CONCAT('schema: ', {broken})"
            )
    return f"CASE {' '.join(cases)} END"


def broken_fields(topic: str, schema: str) -> str:
    """What is wrong with the fields of a value; empty if they match the schema."""
    begins = literal(r"^[ \t\r\n]*[{]")
    texts = [f"IF({TEXT} RLIKE {begins}, NULL, 'not an object')"]
    for name, kind, is_required in schema_fields(topic, schema):
        found = field_of(name, kind)
        if is_required:
            text = literal(f"{name} is missing or not of type {kind}")
            texts.append(f"IF({found} IS NULL, {text}, NULL)")
        else:
            there = field_of(name, "variant")
            is_there = f"{there} IS NOT NULL AND NOT IS_VARIANT_NULL({there})"
            text = literal(f"{name} is not of type {kind}")
            texts.append(f"IF({is_there} AND {found} IS NULL, {text}, NULL)")
    return f"CONCAT_WS('; ', {', '.join(texts)})"


def field_of(name: str, kind: str) -> str:
    """A field of a JSON value; null if it is missing or not of the type."""
    path = literal(f"$['{name}']")
    return f"TRY_VARIANT_GET(payload, {path}, {literal(kind)})"


def schema_fields(topic: str, schema: str) -> list[tuple[str, str, bool]]:
    """Name, type and whether it is required, for each column of a declared schema.

    Raises:
        UsageError: `pipeline.schema`.
    """
    where = f"topics: {topic}: schema {schema[:200]!r}"
    try:
        parsed = StructType.fromDDL(schema)
    except Exception as error:
        text = f"{where} is not a list of Spark columns: {str(error).splitlines()[0]}"
        raise UsageError("pipeline.schema", text) from error
    fields = [(one.name, one.dataType.simpleString(), not one.nullable) for one in parsed.fields]
    if len(fields) > FIELDS_MAX:
        raise UsageError("pipeline.schema", f"{where} has more than {FIELDS_MAX} columns")
    for name, _, _ in fields:
        if not set(name).isdisjoint("'\"\\`"):
            raise UsageError("pipeline.schema", f"{where}: the name {name} contains a quote")
    return fields


def first_of(
    topics: Sequence[DeclaredTopic], path_of: Callable[[DeclaredTopic], str | None], header: str
) -> str:
    """The text at a topic's declared path, else that of the header."""
    from_header = f"TRY_VALIDATE_UTF8(CAST(TRY_ELEMENT_AT(headers, {literal(header)}) AS STRING))"
    cases = [
        f"WHEN topic = {literal(topic.name)} "
        f"THEN TRY_VARIANT_GET(payload, {literal(path)}, 'string')"
        for topic in topics
        if (path := path_of(topic)) is not None
    ]
    return f"COALESCE(CASE {' '.join(cases)} END, {from_header})" if cases else from_header


def time_of(text: str) -> str:
    """A time: ISO 8601, or seconds, milliseconds or microseconds since 1970, by magnitude."""
    number = f"TRY_CAST({text} AS DOUBLE)"
    unit = f"CASE WHEN {number} < 1e11 THEN 1e6 WHEN {number} < 1e14 THEN 1e3 ELSE 1 END"
    since_1970 = f"TIMESTAMP_MICROS(TRY_CAST({number} * {unit} AS BIGINT))"
    return f"IF({number} BETWEEN 0 AND 2e17, {since_1970}, TRY_CAST({text} AS TIMESTAMP))"


def register_typed(spark: Any, data: Path, names: Collection[str]) -> list[str]:
    """Create and return the views `silver.<topic>` among `names`, if a topic declares a schema.

    Silver stores values as JSON, so that a declared schema can change without changing the table.
    A view has the declared columns with their types, and all else in the struct `_message`.

    Raises:
        UsageError: `pipeline.schema`, a schema is invalid.
    """
    if not any(name.startswith(PREFIX) for name in names):
        return []
    made = []
    silver = open_table(data, "silver")
    for topic in pipeline_settings.read(data).topics:
        name = PREFIX + topic.name
        if topic.schema is not None and name in names and silver.exists:
            about = ", ".join(f"`{column}`" for column in MESSAGE_COLUMNS)
            rows = read(spark, silver).where(f"topic = {literal(topic.name)}")
            columns = [
                f"{field_of(field, kind)} AS `{field}`"
                for field, kind, _ in schema_fields(topic.name, topic.schema)
            ]
            typed = rows.selectExpr(*columns, f"STRUCT({about}) AS _message")
            typed.createOrReplaceTempView(f"`{name}`")
            made.append(name)
    return made
