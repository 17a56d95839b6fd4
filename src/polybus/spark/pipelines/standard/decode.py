"""Messages decoded, as Spark expressions: what a value is, its id, its time, what is wrong with it.

A value that begins with `{` or `[` is meant to be JSON. Other values are text if they are UTF-8,
else binary; a message of headers alone is `properties`. A topic may declare more (config.Topic):
that all its values are JSON, the columns they must have, and where id and time are in them.

The expressions are SQL text because a micro-batch has no time to build them piece by piece: each
function of PySpark's is a call to the JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from polybus.config import Topic
from polybus.errors import UsageError
from polybus.lake.settings import PipelineSettings

ID_HEADER = "message-id"
TIME_HEADER = "event-time"
FIELDS_MAX = 200
SILVER_COLUMNS = (
    *("topic", "epoch", "offset", "timestamp", "event_time", "late", "protocol", "sender", "key"),
    *("message_id", "bytes", "format", "payload", "text", "binary", "properties"),
)
QUARANTINE_COLUMNS = (
    *("topic", "epoch", "offset", "timestamp", "protocol", "sender", "key", "value", "headers"),
    "reason",
)
TEXT = "CAST(value AS STRING)"
NOT_JSON = "is not JSON, or has a key twice"


class Decoder:
    """The expressions for one set of settings.

    Raises:
        UsageError: `pipeline.schema`, a topic's schema is none.
    """

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings = settings
        self._columns = columns(settings)

    def __call__(self, frame: DataFrame) -> DataFrame:
        """Messages of our source with SILVER_COLUMNS and QUARANTINE_COLUMNS.

        `reason` says why a message belongs in quarantine; it is null for all others.
        """
        return frame.selectExpr("*", *self._columns)


def columns(settings: PipelineSettings) -> list[str]:
    """The new columns; each may name those before it."""
    topics = settings.topics
    limit = settings.pipeline.value_bytes_max
    declared = [literal(one.name) for one in topics if one.format == "json" or one.schema]
    is_declared = f"topic IN ({', '.join(declared)})" if declared else "false"
    begins = literal(r"^[ \t\r\n]*[\[{]")
    time = first_of(topics, lambda one: one.event_time, TIME_HEADER)
    return [
        f"{is_declared} AS is_declared",
        "COALESCE(OCTET_LENGTH(value), 0) AS bytes",
        f"bytes <= {limit} AND IS_VALID_UTF8({TEXT}) AS is_text",
        f"is_text AND (is_declared OR {TEXT} RLIKE {begins}) AS meant_as_json",
        f"IF(meant_as_json, TRY_PARSE_JSON({TEXT}), NULL) AS payload",
        f"{reason(topics, limit)} AS reason",
        f"{first_of(topics, lambda one: one.message_id, ID_HEADER)} AS message_id",
        f"{time} AS event_time_text",
        "CASE WHEN payload IS NOT NULL THEN 'json' "
        "WHEN bytes = 0 AND SIZE(headers) > 0 THEN 'properties' "
        "WHEN is_text THEN 'text' ELSE 'binary' END AS format",
        f"COALESCE({time_of('event_time_text')}, timestamp) AS event_time",
        f"IF(format = 'text', {TEXT}, NULL) AS text",
        "IF(format = 'binary', value, NULL) AS binary",
        "TRANSFORM_VALUES(headers, (name, content) -> COALESCE("
        "TRY_VALIDATE_UTF8(CAST(content AS STRING)), BASE64(content))) AS properties",
        f"event_time < timestamp - INTERVAL {settings.pipeline.watermark_s:.6f} SECOND AS late",
    ]


def literal(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def reason(topics: Sequence[Topic], limit: int) -> str:
    cases = [
        f"WHEN bytes > {limit} THEN "
        f"CONCAT('the value has ', bytes, ' bytes; value-bytes-max is {limit}')",
        "WHEN is_declared AND NOT is_text THEN 'the topic is declared as JSON; this is no UTF-8'",
        "WHEN meant_as_json AND payload IS NULL THEN "
        f"CONCAT(IF(is_declared, 'the topic is declared as JSON; this ', 'begins like JSON and '), "
        f"'{NOT_JSON}')",
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
    """What is wrong with the fields of a value, in one text; empty if nothing is."""
    begins = literal(r"^[ \t\r\n]*[{]")
    texts = [f"IF({TEXT} RLIKE {begins}, NULL, 'not an object')"]
    for name, kind, is_required in schema_fields(topic, schema):
        path = literal(f"$['{name}']")
        found = f"TRY_VARIANT_GET(payload, {path}, {literal(kind)})"
        if is_required:
            text = literal(f"{name} is missing or no {kind}")
            texts.append(f"IF({found} IS NULL, {text}, NULL)")
        else:
            there = f"TRY_VARIANT_GET(payload, {path}, 'variant')"
            is_there = f"{there} IS NOT NULL AND NOT IS_VARIANT_NULL({there})"
            text = literal(f"{name} is no {kind}")
            texts.append(f"IF({is_there} AND {found} IS NULL, {text}, NULL)")
    return f"CONCAT_WS('; ', {', '.join(texts)})"


def schema_fields(topic: str, schema: str) -> list[tuple[str, str, bool]]:
    """Name, type and whether it must be there, of each column of a declared schema.

    Raises:
        UsageError: `pipeline.schema`.
    """
    where = f"topics: {topic}: schema {schema[:200]!r}"
    try:
        parsed = StructType.fromDDL(schema)
    except Exception as error:
        text = f"{where} is not columns as Spark writes them: {str(error).splitlines()[0]}"
        raise UsageError("pipeline.schema", text) from error
    fields = [(one.name, one.dataType.simpleString(), not one.nullable) for one in parsed.fields]
    if len(fields) > FIELDS_MAX:
        raise UsageError("pipeline.schema", f"{where} has over {FIELDS_MAX} columns")
    for name, _, _ in fields:
        if not set(name).isdisjoint("'\"\\`"):
            raise UsageError("pipeline.schema", f"{where}: the name {name} has a quote in it")
    return fields


def first_of(topics: Sequence[Topic], path_of: Callable[[Topic], str | None], header: str) -> str:
    """The text at a topic's declared path, else the header's."""
    from_header = f"TRY_VALIDATE_UTF8(CAST(TRY_ELEMENT_AT(headers, {literal(header)}) AS STRING))"
    cases = [
        f"WHEN topic = {literal(topic.name)} "
        f"THEN TRY_VARIANT_GET(payload, {literal(path)}, 'string')"
        for topic in topics
        if (path := path_of(topic)) is not None
    ]
    return f"COALESCE(CASE {' '.join(cases)} END, {from_header})" if cases else from_header


def time_of(text: str) -> str:
    """A time: ISO, or seconds, milliseconds or microseconds since 1970, told by their size."""
    number = f"TRY_CAST({text} AS DOUBLE)"
    unit = f"CASE WHEN {number} < 1e11 THEN 1e6 WHEN {number} < 1e14 THEN 1e3 ELSE 1 END"
    since_1970 = f"TIMESTAMP_MICROS(TRY_CAST({number} * {unit} AS BIGINT))"
    return f"IF({number} BETWEEN 0 AND 2e17, {since_1970}, TRY_CAST({text} AS TIMESTAMP))"
