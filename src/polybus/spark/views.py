"""Topics and lake tables by name in Spark SQL.

A view is a snapshot: Spark plans it once, and it shows what the topic or the table held then. So
views are made again before a query if what they stand for has moved on. To find out takes a look at
small files; to make one takes Spark some milliseconds, so only those are made that a query names.
"""

from __future__ import annotations

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
from polybus.lake.table import LakeTable, open_table, table_names
from polybus.log.reading.reader import LogReader
from polybus.spark.bronze import data_folder, history_and_rest
from polybus.spark.native import read

Marks = dict[str, tuple[object, ...]]
"""What each view stands for: only a view whose mark has changed is made again."""


@dataclass
class _Views:
    """The views of a session, of one data folder at a time."""

    reader: LogReader
    marks: Marks = field(default_factory=dict)


_SESSIONS: WeakKeyDictionary[SparkSession, _Views] = WeakKeyDictionary()
# As on DuckDB (lake/duck.py): values come from strangers, and may be neither text nor JSON.
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
    """Make a temporary view of each topic and each lake table, under its own name.

    Names with dots or dashes need backticks in SQL. Where a topic and a table have one name, it is
    the topic's. Call it before each query, best with `only=named_in(query)`, or let `sql` do that:
    what has not changed since the last call costs next to nothing.

    Returns:
        The names of all topics and tables, whether a view was made or left as it is.
    """
    views = _views_of(spark, data_folder(data))
    reader, marks = views.reader, views.marks
    topics = reader.topics(system=True)
    tables = [name for name in table_names(reader.data) if name not in topics]
    wanted = None if only is None else set(only)
    for name in topics:
        if wanted is None or name in wanted:
            _register_topic(spark, reader, name, marks)
    for name in tables:
        if wanted is None or name in wanted:
            _register_table(spark, open_table(reader.data, name), marks)
    for gone in set(marks) - set(topics) - set(tables):
        spark.catalog.dropTempView(gone)
        del marks[gone]
    return sorted([*topics, *tables])


def _views_of(spark: SparkSession, folder: Path) -> _Views:
    views = _SESSIONS.get(spark)
    if views is None:
        for statement in _FUNCTIONS:
            spark.sql(statement)
    if views is None or views.reader.data != folder:
        # Views of another folder are not known any more: those of the same name are replaced.
        views = _SESSIONS[spark] = _Views(LogReader(folder))
    return views


def sql(spark: SparkSession, query: str, data: Path | None = None) -> DataFrame:
    """Run a query over topics and lake tables as they are now."""
    from polybus.spark.pipelines.standard.decode import register_typed

    folder = data_folder(data)
    names = named_in(query)
    register_views(spark, folder, only=names)
    register_typed(spark, folder, names)
    return spark.sql(query)


def named_in(query: str) -> set[str]:
    """Every word of a query that may name a view: more than it does, never less."""
    found = set()
    for quoted, plain in _IDENTIFIER.findall(query):
        name = quoted.replace("``", "`") if quoted else plain
        found |= {name, name.lower()}
    return found


def _register_topic(spark: SparkSession, reader: LogReader, name: str, marks: Marks) -> None:
    history, bounds = reader.history(name), reader.bounds(name)
    mark = ("topic", history.epoch, history.start, history.handed_over, bounds.stop)
    if marks.get(name) != mark:
        history_and_rest(spark, reader, name).createOrReplaceTempView(f"`{name}`")
        marks[name] = mark


def _register_table(spark: SparkSession, table: LakeTable, marks: Marks) -> None:
    mark = ("table", table.version)
    if marks.get(table.name) != mark:
        read(spark, table).createOrReplaceTempView(f"`{table.name}`")
        marks[table.name] = mark


def collect(spark: SparkSession, query: str, data: Path, *, rows_max: int) -> pa.Table:
    """At most so many rows of a query over topics and lake tables, as Arrow.

    VARIANT columns come as JSON text: Arrow has no such type.

    Raises:
        UsageError: `sql.table-unknown`; `sql.invalid`, Spark does not understand the query;
            `sql.failed` in the middle of it.
    """
    # PySpark logs every mistake in a query, with the whole stack of the JVM.
    logging.getLogger("SQLQueryContextLogger").disabled = True
    try:
        rows = sql(spark, query, data)
        variants = [one.name for one in rows.schema if isinstance(one.dataType, T.VariantType)]
        if variants:
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
