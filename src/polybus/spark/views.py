"""Topics as tables, and topics and lake tables by name in Spark SQL.

A topic as a table is the log itself and not a copy of it. Spark's own Parquet reader reads the
history files of one manifest. Newer messages, and files that may still be merged into larger ones,
come through our source. Both parts meet at the same offset, so each message appears once, even
while the bus hands over its journal: files that are read natively are never replaced. Retention may
remove one before it is read. Then the query fails with the name of the file, and works again with a
new table. Such a table has the columns of the source and `date`, the day of the message in UTC.
History has a folder for each day, so `WHERE date = '2026-01-31'` opens no file of another day.
Conditions on `offset` and `timestamp` skip what the statistics of the files exclude.

A view is a snapshot: Spark plans it once, and it shows what the topic or the table held then. So a
view is created again before a query if its topic or table has changed. That check reads only small
files. Spark needs some milliseconds for a view, so only those that a query names are created.
"""

import json
import logging
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
from polybus.lake.duck import unknown_table
from polybus.lake.sql_text import version_in, with_dots_quoted, with_versions_named
from polybus.lake.table import LakeTable, open_table, table_names
from polybus.log.history.manifest import HISTORY, Manifest
from polybus.log.layout import topic_folder
from polybus.log.reading.reader import LogReader
from polybus.spark.location import find_location
from polybus.spark.source.options import COLUMNS, spark_schema
from polybus.spark.tables import read, read_files

_ATTEMPTS_MAX = 3
DAY_US = 86_400_000_000
_STORED = [name for name in COLUMNS if name not in ("partition", "epoch")]
# The views of each session: the folder that they show, and the state of each topic or table.
SessionViews = tuple[LogReader, dict[str, tuple[object, ...]]]
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

    The table has what the topic held when this was called, or a moment later. Call it again for
    newer messages. Without `data` (the data folder) and `url`, the log is located as by the source.
    With `url` all messages come over HTTP.

    Raises:
        UsageError: `topic.unknown`, `data.not-found`.
        StorageError: `log.damaged`, a file that the manifest names does not exist.
    """
    name = names.canonical(topic)
    if url is not None:
        return _source(spark, name, {"url": url})
    return history_and_rest(spark, LogReader(data_folder(data)), name)


def history_and_rest(spark: SparkSession, reader: LogReader, topic: str) -> DataFrame:
    """A topic by one snapshot of its manifest, and the messages after it; raises as `table`."""
    for _ in range(_ATTEMPTS_MAX):
        history = reader.history(topic)
        try:
            return _of_snapshot(spark, topic, history, reader.data)
        except AnalysisException as error:
            if error.getCondition() != "PATH_NOT_FOUND":
                raise
            # Retention has just removed it: the next manifest does not name it.
            missing = str(error.getMessageParameters().get("path"))
    text = f"topic {topic!r}: the manifest names {missing}, which does not exist"
    raise StorageError("log.damaged", text)


def _of_snapshot(spark: SparkSession, topic: str, history: Manifest, data: Path) -> DataFrame:
    settled = history.settled_files
    if not settled:
        return _source(spark, topic, {"data": str(data)})
    starting = json.dumps({topic: settled[-1].last + 1})
    rest = _source(spark, topic, {"data": str(data), "startingOffsets": starting})
    folder = topic_folder(data, topic).absolute()
    schema = spark_schema(_STORED).add("date", "date")
    rows = read_files(spark, schema, folder / HISTORY, [folder / file.path for file in settled])
    constants = {"partition": F.lit(0), "epoch": F.lit(history.epoch).cast("long")}
    return rows.withColumns(constants).select(*COLUMNS, "date").unionAll(rest)


def data_folder(data: Path | None) -> Path:
    """The given data folder, or the one that the source locates. Raises `data.not-found`."""
    return find_location({}).data if data is None else Path(data)


def _source(spark: SparkSession, topic: str, options: dict[str, str]) -> DataFrame:
    rows = spark.read.format("polybus").options(subscribe=topic, **options).load()
    # The day in UTC, as in the folders of history, whatever the session's time zone is.
    days = F.expr(f"CAST(unix_micros(timestamp) DIV {DAY_US} AS INT)")
    return rows.withColumn("date", F.date_from_unix_date(days))


def register_views(
    spark: SparkSession, data: Path | None = None, *, only: Iterable[str] | None = None
) -> list[str]:
    """Create a temporary view of each topic and each lake table, under its own name.

    Names with dots or dashes need backticks in SQL. If a topic and a table have the same name, the
    view shows the topic. Call this before each query, best with `only=named_in(query)`, or use
    `sql`. Unchanged views cost almost nothing.

    Returns:
        The names of all topics and tables, including those without a view.
    """
    reader, states = _views_of(spark, data_folder(data))
    topics = reader.topics(system=True)
    known = sorted({*topics, *table_names(reader.data)})
    for name in known if only is None else sorted(set(known) & set(only)):
        lake = None if name in topics else open_table(reader.data, name)
        if states.get(name) != (state := _state_of(reader, name, lake)):
            rows = read(spark, lake) if lake else history_and_rest(spark, reader, name)
            rows.createOrReplaceTempView(f"`{name}`")
            states[name] = state
    for deleted in states.keys() - set(known):
        spark.catalog.dropTempView(deleted)
        del states[deleted]
    return known


def _state_of(reader: LogReader, name: str, lake: LakeTable | None) -> tuple[object, ...]:
    if lake is not None:
        return "table", lake.version
    history, bounds = reader.history(name), reader.bounds(name)
    return "topic", history.epoch, history.start, history.handed_over, bounds.stop


def _views_of(spark: SparkSession, folder: Path) -> tuple[LogReader, dict[str, tuple[object, ...]]]:
    if spark not in _SESSIONS:
        for statement in _FUNCTIONS:
            spark.sql(statement)
    if spark not in _SESSIONS or _SESSIONS[spark][0].data != folder:
        # Views of another folder are forgotten: new ones replace those of the same name.
        _SESSIONS[spark] = (LogReader(folder), {})
    return _SESSIONS[spark]


def sql(spark: SparkSession, query: str, data: Path | None = None) -> DataFrame:
    """Run a query over the current topics and lake tables."""
    from polybus.spark.pipelines.standard.decode import register_typed

    folder = data_folder(data)
    text = with_versions_named(query, "`")
    words = named_in(text)
    known = register_views(spark, folder, only=words)
    register_versions(spark, folder, text)
    typed = register_typed(spark, folder, words)
    return spark.sql(with_dots_quoted(text, {*known, *typed}))


def register_versions(spark: SparkSession, data: Path, query: str) -> None:
    """Create a view of each version of a table that `with_versions_named` has named."""
    for name in re.findall(r"`((?:[^`]|``)+@[vt](?:[^`]|``)+)`", query):
        table, at = version_in(name.replace("``", "`"))
        if at is not None:
            lake = open_table(data, table.lower(), at=at)
            if not lake.exists:
                raise unknown_table(f"{table} with versions", table_names(data))
            read(spark, lake).createOrReplaceTempView(f"`{name}`")


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
    logging.getLogger("SQLQueryContextLogger").disabled = True
    try:
        rows = sql(spark, query, data)
        variants = [one.name for one in rows.schema if isinstance(one.dataType, T.VariantType)]
        rows = rows.withColumns({name: F.to_json(rows[name]) for name in variants})
    except (AnalysisException, ParseException) as error:
        if error.getCondition() == "TABLE_OR_VIEW_NOT_FOUND":
            name = str(error.getMessageParameters().get("relationName", "")).replace("`", "")
            known = [*LogReader(data).topics(system=True), *table_names(data)]
            raise unknown_table(name, known) from error
        raise UsageError("sql.invalid", str(error).strip()) from error
    try:
        return rows.limit(rows_max).toArrow()
    except PySparkException as error:
        raise UsageError("sql.failed", str(error).strip()) from error
