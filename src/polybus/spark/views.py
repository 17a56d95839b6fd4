"""Topics and lake tables by name in Spark SQL.

A view is a snapshot: Spark plans it once, and it shows what the topic or the table held then. So a
view is created again before a query if its topic or table has changed. That check reads only small
files. Spark needs some milliseconds for a view, so only those that a query names are created.
"""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from polybus.errors import UsageError
from polybus.lake.duck import unknown_table
from polybus.lake.table import open_table, table_names
from polybus.log.reading.reader import LogReader
from polybus.spark.bronze import data_folder, history_and_rest
from polybus.spark.tables import read


@dataclass
class SessionViews:
    """The views of a session over one data folder.

    `states` has the state of the topic or table that each view shows.
    """

    reader: LogReader
    states: dict[str, tuple[object, ...]] = field(default_factory=dict)


_SESSIONS: WeakKeyDictionary[SparkSession, SessionViews] = WeakKeyDictionary()
# As in DuckDB (lake/duck.py). A value may be neither text nor JSON.
_FUNCTIONS = (
    "CREATE OR REPLACE TEMPORARY FUNCTION text(value BINARY) RETURNS STRING "
    "RETURN try_validate_utf8(CAST(value AS STRING))",
    "CREATE OR REPLACE TEMPORARY FUNCTION json(value BINARY) RETURNS VARIANT "
    "RETURN try_parse_json(try_validate_utf8(CAST(value AS STRING)))",
)
_IDENTIFIER = re.compile(r"`((?:[^`]|``)+)`|([^\W\d][\w.$-]*)")


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
    views = _views_of(spark, data_folder(data))
    reader, states = views.reader, views.states
    topics = reader.topics(system=True)
    names = sorted({*topics, *table_names(reader.data)})
    wanted = set(names) if only is None else set(only)
    for name in names:
        if name in wanted:
            _register(spark, views, name, is_topic=name in topics)
    for deleted in states.keys() - set(names):
        spark.catalog.dropTempView(deleted)
        del states[deleted]
    return names


def _views_of(spark: SparkSession, folder: Path) -> SessionViews:
    views = _SESSIONS.get(spark)
    if views is None:
        for statement in _FUNCTIONS:
            spark.sql(statement)
    if views is None or views.reader.data != folder:
        # Views of another folder are forgotten: new ones replace those of the same name.
        views = _SESSIONS[spark] = SessionViews(LogReader(folder))
    return views


def _register(spark: SparkSession, views: SessionViews, name: str, *, is_topic: bool) -> None:
    reader = views.reader
    state: tuple[object, ...]
    if is_topic:
        history, bounds = reader.history(name), reader.bounds(name)
        state = ("topic", history.epoch, history.start, history.handed_over, bounds.stop)
    else:
        table = open_table(reader.data, name)
        state = ("table", table.version)
    if views.states.get(name) != state:
        rows = history_and_rest(spark, reader, name) if is_topic else read(spark, table)
        rows.createOrReplaceTempView(f"`{name}`")
        views.states[name] = state


def sql(spark: SparkSession, query: str, data: Path | None = None) -> DataFrame:
    """Run a query over the current topics and lake tables."""
    from polybus.spark.pipelines.standard.decode import register_typed

    folder = data_folder(data)
    names = named_in(query)
    register_views(spark, folder, only=names)
    register_typed(spark, folder, names)
    return spark.sql(query)


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
