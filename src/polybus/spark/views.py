"""Topics as tables, and topics and lake tables by name in Spark SQL.

A topic as a table is the log itself and not a copy of it. Spark's own Parquet reader reads the
history files of one manifest, as far as history.py says, and our source the rest. Retention may
remove a file before it is read. Then the query fails with the name of the file, and works again
with a new table. Such a table has the columns of the source and `date`, the day of the message in
UTC. History has a folder for each day, so `WHERE date = '2026-01-31'` opens no file of another day.
Conditions on `offset` and `timestamp` skip what the statistics of the files exclude.

A view is a snapshot: Spark plans it once, and it shows what the topic or the table held then. So a
view is created again before a query if its topic or table has changed. That check reads only small
files. Spark needs some milliseconds for a view, so only those that a query names are created.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.lake.described import SCHEMAS, described
from polybus.lake.duck import unknown_table
from polybus.lake.sql.text import (
    MARK,
    description_in,
    version_in,
    with_descriptions_named,
    with_dots_quoted,
    with_versions_named,
)
from polybus.lake.table import LakeTable, open_table, table_names
from polybus.lake.typed import MESSAGE_COLUMNS, PREFIX, view_schema
from polybus.log.history.manifest import Manifest
from polybus.log.layout import topic_folder
from polybus.log.opening import open_reader
from polybus.log.reading.offset_reader import OffsetReader
from polybus.spark.declared_fields import field_of, literal, schema_fields
from polybus.spark.history import SOURCE, native_files, read_history
from polybus.spark.internals import context_logger
from polybus.spark.location import find_location
from polybus.spark.tables import read
from polybus.spark.variants import hint_for, with_paths

_ATTEMPTS_MAX = 3
DAY_US = 86_400_000_000
# The views of each session: the folder that they show, and the state of each topic or table.
SessionViews = tuple[Path, OffsetReader, dict[str, tuple[object, ...]]]
_SESSIONS: WeakKeyDictionary[SparkSession, SessionViews] = WeakKeyDictionary()
# As in DuckDB (lake/duck.py). A value may be neither text nor JSON.
_FUNCTIONS = (
    "CREATE OR REPLACE TEMPORARY FUNCTION text(value BINARY) RETURNS STRING "
    "RETURN try_validate_utf8(CAST(value AS STRING))",
    "CREATE OR REPLACE TEMPORARY FUNCTION json(value BINARY) RETURNS VARIANT "
    "RETURN try_parse_json(try_validate_utf8(CAST(value AS STRING)))",
)
_IDENTIFIER = re.compile(r"`((?:[^`]|``)+)`|([^\W\d][\w.$-]*)")


def table(
    spark: SparkSession, topic: str, data: Path | None = None, url: str | None = None
) -> DataFrame:
    """All messages of a topic, each once.

    The table has the messages at the time of the call, or a moment later. Call it again for
    newer messages. Without `data` (the data folder) and `url`, the log is located as by the source.
    With `url` all messages come over HTTP.

    Raises:
        UsageError: `topic.unknown`, `data.not-found`.
        StorageError: `log.damaged` if a file that the manifest names does not exist.
    """
    name = names.canonical(topic)
    if url is not None:
        return _source(spark, name, {"url": url})
    return history_and_rest(spark, data_folder(data), name)


def history_and_rest(
    spark: SparkSession, data: Path, topic: str, reader: OffsetReader | None = None
) -> DataFrame:
    """A topic by one snapshot of its manifest, and the messages after it; raises as `table`."""
    reader = reader or open_reader(data)
    for _ in range(_ATTEMPTS_MAX):
        history = reader.history(topic)
        try:
            return _of_snapshot(spark, topic, history, data)
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            # Retention has just removed it: the next manifest does not name it.
            missing = str(error.getMessageParameters().get("path"))
    text = f"topic {topic!r}: the manifest names {missing}, which does not exist"
    raise StorageError("log.damaged", text)


def _of_snapshot(spark: SparkSession, topic: str, history: Manifest, data: Path) -> DataFrame:
    files = native_files(history, topic_folder(data, topic))
    if not files:
        return _source(spark, topic, {"data": str(data)})
    starting = json.dumps({topic: files[-1].last + 1})
    rest = _source(spark, topic, {"data": str(data), "startingOffsets": starting})
    return read_history(spark, data, topic, history.epoch, files).unionAll(rest)


def data_folder(data: Path | None) -> Path:
    """The given data folder, or the one that the source locates. Raises `data.not-found`."""
    return find_location({}).data if data is None else Path(data)


def _source(spark: SparkSession, topic: str, options: dict[str, str]) -> DataFrame:
    rows = spark.read.format(SOURCE).options(subscribe=topic, **options).load()
    # The day in UTC, as in the folders of history, whatever the session's time zone is.
    days = F.expr(f"CAST(unix_micros(timestamp) DIV {DAY_US} AS INT)")
    return rows.withColumn("date", F.date_from_unix_date(days))


def register_views(
    spark: SparkSession, data: Path | None = None, *, only: Iterable[str] | None = None
) -> list[str]:
    """Create a temporary view of each topic and each lake table, under its own name.

    Names with dots or dashes need backticks in SQL. If a topic and a table have the same name, the
    view shows the topic, and `tables.NAME` the table. Call this before each query, best with
    `only=named_in(query)`, or use `sql`. Unchanged views cost almost nothing.

    Returns:
        The names of all topics and tables, including those without a view.
    """
    folder, reader, states = _views_of(spark, data_folder(data))
    topics, tables = reader.topics(system=True), table_names(folder)
    wanted = None if only is None else set(only)
    marked = {
        MARK + name: name for name in tables if name in topics or MARK + name in (wanted or ())
    }
    known = sorted({*topics, *tables, *marked})
    for name in known if wanted is None else sorted(wanted.intersection(known)):
        is_table = name in marked or name not in topics
        lake = open_table(folder, marked.get(name, name)) if is_table else None
        if states.get(name) != (state := _state_of(reader, name, lake)):
            rows = read(spark, lake) if lake else history_and_rest(spark, folder, name, reader)
            rows.createOrReplaceTempView(f"`{name}`")
            states[name] = state
    for deleted in states.keys() - set(known):
        spark.catalog.dropTempView(deleted)
        del states[deleted]
    return known


def _state_of(reader: OffsetReader, name: str, lake: LakeTable | None) -> tuple[object, ...]:
    if lake is not None:
        return "table", lake.version
    history, bounds = reader.history(name), reader.bounds(name)
    return "topic", history.epoch, history.start, history.handed_over, bounds.stop


def _views_of(spark: SparkSession, folder: Path) -> SessionViews:
    if spark not in _SESSIONS:
        for statement in _FUNCTIONS:
            spark.sql(statement)
    if spark not in _SESSIONS or _SESSIONS[spark][0] != folder:
        # Views of another folder are forgotten: new ones replace those of the same name.
        _SESSIONS[spark] = (folder, open_reader(folder), {})
    return _SESSIONS[spark]


def sql(spark: SparkSession, query: str, data: Path | None = None) -> DataFrame:
    """Run a query over the current topics and lake tables."""
    folder = data_folder(data)
    text = with_versions_named(with_descriptions_named(query, "`"), "`")
    words = named_in(text)
    known = register_views(spark, folder, only=words)
    register_versions(spark, folder, text)
    typed = register_typed(spark, folder, words)
    return with_paths(text, lambda one: spark.sql(with_dots_quoted(one, {*known, *typed})))


def register_versions(spark: SparkSession, data: Path, query: str) -> None:
    """Create a view of each version and each description of a table that has such a name."""
    for name in re.findall(r"`((?:[^`]|``)+@[vthd](?:[^`]|``)+)`", query):
        table, kind = description_in(name.replace("``", "`"))
        table, at = version_in(table)
        if not kind and at is None:
            continue
        lake = open_table(data, table.lower(), at=at)
        if not lake.exists:
            raise unknown_table(name, table_names(data))
        if kind:
            found = pa.Table.from_batches(described(lake, kind), SCHEMAS[kind])
            rows = spark.createDataFrame(found)
        else:
            rows = read(spark, lake)
        rows.createOrReplaceTempView(f"`{name}`")


def register_typed(spark: SparkSession, data: Path, words: Iterable[str]) -> list[str]:
    """Create and return the views `silver.<topic>` among `words`, if a topic declares a schema.

    Silver stores values as JSON, so that a declared schema can change without changing the table.
    A view has the declared columns with their types, and all else in the struct `_message`.

    Raises:
        UsageError: `pipeline.schema`, a schema is invalid.
    """
    made: list[str] = []
    for name in sorted({word.lower() for word in words if word.startswith(PREFIX)}):
        found, silver = view_schema(data, name), open_table(data, "silver")
        if found is None or not silver.exists:
            continue
        topic, schema = found
        about = ", ".join(f"`{column}`" for column in MESSAGE_COLUMNS)
        rows = read(spark, silver).where(f"topic = {literal(topic)}")
        columns = [
            f"{field_of(field, kind)} AS `{field}`"
            for field, kind, _ in schema_fields(topic, schema)
        ]
        typed = rows.selectExpr(*columns, f"STRUCT({about}) AS _message")
        typed.createOrReplaceTempView(f"`{name}`")
        made.append(name)
    return made


def named_in(query: str) -> set[str]:
    """All words of a query that may name a view."""
    found = set()
    for quoted, plain in _IDENTIFIER.findall(query):
        name = quoted.replace("``", "`") if quoted else plain
        found |= {name, name.lower()}
    return found


def collect(spark: SparkSession, query: str, data: Path, *, rows_max: int) -> pa.Table:
    """Up to `rows_max` rows of a query over topics and lake tables, as Arrow.

    VARIANT columns become JSON text: Arrow has no such type.

    Raises:
        UsageError: `sql.table-unknown`; `sql.invalid`, Spark does not understand the query;
            `sql.failed`, it fails while it runs.
    """
    # PySpark logs every mistake in a query with the whole stack of the JVM.
    context_logger().disabled = True
    try:
        rows = sql(spark, query, data)
        titles = rows.columns
        # Two columns may have the same name: `payload:order.id`, `payload:customer.id`.
        rows = rows.toDF(*map(str, range(len(titles))))
        variants = [one.name for one in rows.schema if isinstance(one.dataType, T.VariantType)]
        rows = rows.withColumns({name: F.to_json(rows[name]) for name in variants})
    except (AnalysisException, ParseException) as error:
        if error.getCondition() == "TABLE_OR_VIEW_NOT_FOUND":
            name = str(error.getMessageParameters().get("relationName", "")).replace("`", "")
            known = [*open_reader(data).topics(system=True), *table_names(data)]
            raise unknown_table(name, known) from error
        raise UsageError("sql.invalid", f"{str(error).strip()}{hint_for(error)}") from error
    try:
        return rows.limit(rows_max).toArrow().rename_columns(titles)
    except PySparkException as error:
        raise UsageError("sql.failed", str(error).strip()) from error
