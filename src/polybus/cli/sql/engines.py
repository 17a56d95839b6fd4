"""Decides which engine runs a statement: DuckDB in this process, or Spark."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

from polybus.cli.common.output import say
from polybus.errors import PolybusError, StorageError, UsageError

SPARK_ROWS_MAX = 1_000_000
"""A result of Spark is completely in memory."""
# Syntax that Spark has and DuckDB does not. Spark's functions are looked up in PySpark.
_SPARK_SYNTAX = re.compile(
    r"""\blateral\s+view\b | \b(distribute|cluster|sort)\s+by\b | \bleft\s+(anti|semi)\s+join\b
      | \br(like|egexp)\b | <=> | \|> | \bstack\s*\( | \bnamed_struct\s*\( | \bdiv\b
      | \bexplain\s+(extended|codegen|cost|formatted)\b | \btablesample\s*\(""",
    re.VERBOSE | re.IGNORECASE,
)
_TEXTS = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`(?:[^`]|``)*`|--[^\n]*|/\*.*?\*/", re.DOTALL
)
_NO_FUNCTION = re.compile(r"Function with name \"?(\w+)|argument types '(\w+)\(")
_SHOW_TABLES = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)


@dataclass
class SqlResult:
    """The rows of a statement. `more` is true if Spark left rows out."""

    engine: str
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    more: bool = False


@contextmanager
def executed(sql: str, data: Path, engine: str, *, rows_max: int | None) -> Iterator[SqlResult]:
    """Run a statement; its rows can be read until the block ends.

    `auto` tries DuckDB. A statement that DuckDB refuses goes to the Spark session of the running
    pipeline. Without a pipeline, Spark is started only for a statement with Spark's own syntax or
    functions; any other is an error, and Spark is not started.
    """
    if _SHOW_TABLES.fullmatch(sql):
        yield _tables(data)
        return
    if engine != "spark":
        with ExitStack() as stack:
            try:
                result = _by_duckdb(sql, data, stack)
            except UsageError as error:
                if engine == "duckdb" or not _may_be_sparks(error):
                    raise
                reason = error
            else:
                yield result
                return
        if not _is_spark_here():
            raise reason
        from polybus.spark.pipelines.running import service

        if service.running(data) is None and not is_sparks(sql, reason):
            hint = "if this is SQL of Spark, --engine spark starts Spark for it"
            raise UsageError(reason.code, f"{reason.text}\n{hint}")
        say(f"DuckDB cannot run this ({reason.text.splitlines()[0]}); asking Spark")
    yield _by_spark(sql, data, rows_max=rows_max)


def _by_duckdb(sql: str, data: Path, stack: ExitStack) -> SqlResult:
    from polybus.lake import duck

    schema, batches = stack.enter_context(duck.Engine(data)).stream(sql)
    return SqlResult("duckdb", schema, batches)


def _may_be_sparks(error: UsageError) -> bool:
    # Spark would not find an unknown column either, and takes long to start.
    is_column = "Referenced column" in error.text or "does not have a column" in error.text
    return error.code == "sql.engine-missing" or error.code == "sql.invalid" and not is_column


def _by_spark(sql: str, data: Path, *, rows_max: int | None) -> SqlResult:
    from polybus.spark.pipelines.running import service

    most = min(rows_max or SPARK_ROWS_MAX, SPARK_ROWS_MAX)
    note = service.running(data)
    if note is not None:
        table, answer = service.query(note, sql, rows_max=most)
        name, more = "spark (the running pipeline's)", bool(answer.get("truncated"))
        return SqlResult(name, table.schema, iter(table.to_batches()), more)
    say("starting Spark; this takes some seconds")
    from polybus.spark.session import session
    from polybus.spark.views import collect

    table = collect(session(data=data, app="polybus-sql"), sql, data, rows_max=most + 1)
    batches = iter(table.slice(0, most).to_batches())
    return SqlResult("spark (started for this)", table.schema, batches, table.num_rows > most)


def is_sparks(sql: str, reason: PolybusError) -> bool:
    """Whether a statement that DuckDB refused has syntax or a function of Spark."""
    if reason.code == "sql.engine-missing":
        return True
    bare = _TEXTS.sub("''", sql)
    if _SPARK_SYNTAX.search(bare):
        return True
    from pyspark.sql import functions

    missing = _NO_FUNCTION.search(reason.text)
    called = [missing[1] or missing[2]] if missing else []
    return any(name.lower() in functions.__all__ for name in called)


def _is_spark_here() -> bool:
    return find_spec("pyspark") is not None


def _tables(data: Path) -> SqlResult:
    """The result of SHOW TABLES, the same for both engines: topics, lake tables and views."""
    from polybus.lake.table import open_table, table_names
    from polybus.lake.typed import view_names
    from polybus.log.opening import open_reader

    reader = open_reader(data)
    found: list[dict[str, Any]] = []
    for topic in reader.topics(system=True):
        bounds = reader.bounds(topic)
        found.append({"name": topic, "kind": "topic", "rows": bounds.stop - bounds.start})
    for name in table_names(data):
        rows = None
        # The number of rows of a damaged table is not known.
        with suppress(StorageError):
            rows = open_table(data, name).rows
        found.append({"name": name, "kind": "table", "rows": rows})
    # The number of rows of a view would take a query.
    found += [{"name": name, "kind": "view", "rows": None} for name in view_names(data)]
    schema = pa.schema([("name", pa.string()), ("kind", pa.string()), ("rows", pa.int64())])
    table = pa.Table.from_pylist(found, schema)
    return SqlResult("no engine", schema, iter(table.to_batches()))
