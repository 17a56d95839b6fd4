"""Decoding as Spark expressions: format, id and time of a value, and why it is quarantined.

A value that begins with `{` or `[` must be JSON. Other values are text if they are UTF-8, else
binary; a message with headers and no value is `properties`. A topic may declare more
(config.DeclaredTopic): that all its values are JSON, the columns they must have, and the paths of
id and time in them.

The expressions are SQL text: every function of PySpark is a call to the JVM, for which a
micro-batch has no time.
"""

from collections.abc import Callable, Sequence

from polybus.config import DeclaredTopic
from polybus.lake.settings import PipelineSettings
from polybus.spark.declared_fields import field_of, literal, schema_fields
from polybus.spark.expectations import Expectation
from polybus.spark.source.options import CUT_BYTES

ID_HEADER = "message-id"
TIME_HEADER = "event-time"
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
# The range of Python's datetime in every time zone, in microseconds: year 1 to 9999 less a day.
TIMES_US = (-62_135_510_400_000_000, 253_402_214_400_000_000)
IS_OBJECT = TEXT + r" RLIKE '^[ \\t\\r\\n]*[{]'"
NOT_JSON = "is not valid JSON, or has a duplicate key"


def columns(settings: PipelineSettings, expected: Sequence[Expectation] = ()) -> list[str]:
    """Expressions that add SILVER_COLUMNS and QUARANTINE_COLUMNS to messages of our source.

    Each may use those before it. `reason` says why a message belongs in quarantine; it is null for
    all others. Of the expectations, only those whose messages are dropped matter here.

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
        f"{reason(topics, limit, expected)} AS reason",
    ]


def quarantined(limit: int) -> list[str]:
    """Expressions for a row of quarantine, after `bytes` and `reason`.

    For a value over the limit it has only the beginning, because Parquet's writer keeps many values
    in the memory of the JVM. The log has the whole value.
    """
    is_cut = f"bytes > {max(limit, CUT_BYTES)}"
    columns = {name: name for name in QUARANTINE_COLUMNS}
    columns["value"] = f"IF({is_cut}, SUBSTRING(value, 1, {CUT_BYTES}), value) AS value"
    columns["cut"] = f"{is_cut} AS cut"
    return [*columns.values(), "CURRENT_TIMESTAMP() AS quarantined_at"]


def reason(
    topics: Sequence[DeclaredTopic], limit: int, expected: Sequence[Expectation] = ()
) -> str:
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
    for one in expected:
        if one.consequence == "expect_or_drop":
            is_broken = f"topic = {literal(one.topic)} AND NOT {one.is_met}"
            cases.append(f"WHEN {is_broken} THEN {literal(one.reason)}")
    return f"CASE {' '.join(cases)} END"


def broken_fields(topic: str, schema: str, is_object: str = IS_OBJECT) -> str:
    """The mismatches between the fields of a value and the schema; empty if they match."""
    texts = [f"IF({is_object}, NULL, 'not an object')"]
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


def first_of(
    topics: Sequence[DeclaredTopic], path_of: Callable[[DeclaredTopic], str | None], header: str
) -> str:
    """The text at a topic's declared path, or else that of the header."""
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
