"""SQL over topics and lake tables with DuckDB, without a JVM, a server or a copy.

DuckDB reads a topic's Parquet history itself and gets the journal part as a stream of Arrow
batches. The hand-over offset of one manifest separates the two, and the end is fixed when a
statement begins. So each message appears once, even if the statement reads the topic several times.
A topic in Kafka has no files: all of it is such a stream, from the brokers.

Only the tables that a statement names are registered. DuckDB may read the files of these tables and
nothing else, and uses at most MEMORY_MAX.
"""

import contextlib
import difflib
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.lake.described import SCHEMAS, described
from polybus.lake.fields import arrow_schema, is_json
from polybus.lake.sql.casts import CAST_MACROS, with_casts_called
from polybus.lake.sql.json_paths.dialects import ALIAS_HINT, CAST_HINT, MACROS, shown_names
from polybus.lake.sql.json_paths.rewriting import for_duckdb
from polybus.lake.sql.names import Named, named_in, with_offset_quoted, without_explain
from polybus.lake.sql.text import (
    MARK,
    description_in,
    version_in,
    with_descriptions_named,
    with_dots_quoted,
    with_versions_named,
)
from polybus.lake.table import LakeTable, open_table, table_names
from polybus.lake.table_state import TableState
from polybus.lake.typed import typed_select, view_names, view_schema
from polybus.log.columns import SCHEMA
from polybus.log.layout import topic_folder
from polybus.log.opening import open_reader
from polybus.names import is_reserved
from polybus.processes import new_scratch, remove_scratch

MEMORY_MAX = "1GiB"
SPILL_MAX = "16GiB"
FRESH_ROWS = 8192
"""Rows of a batch from the journal: a few vectors of DuckDB. Joining more costs a copy."""
COLUMNS = (
    *("topic", "partition", "offset", "timestamp", "key", "value", "headers"),
    *("protocol", "sender", "epoch", "date"),
)
STORED = ("offset", "timestamp", "key", "value", "headers", "protocol", "sender")
# DuckDB's json() converts a BLOB to its escaped text, and decode() fails on a value that is not
# UTF-8. Values come from any client, so neither must fail.
_MACROS = f"""{CAST_MACROS}{MACROS}
CREATE MACRO text(value) AS try_cast_text(value);
CREATE MACRO json(value) AS try_cast_json(value);
"""
DATE = 'CAST(make_timestamp(epoch_us("timestamp")) AS DATE)'
_DUCK_TYPES = {"long": "BIGINT", "short": "SMALLINT", "byte": "TINYINT", "timestamp": "TIMESTAMPTZ"}
_SYSTEM = ("information_schema", "pg_catalog")
_OF_PIPELINE = re.compile(
    r"silver([._].*)?|quarantine|traffic|top_senders|deliveries|expectations|alerts"
)
_PINNED = Path("/proc/self/fd")


class Engine:
    """DuckDB on a data folder: a context manager, for one thread."""

    def __init__(self, data: Path) -> None:
        """Open the folder.

        Raises:
            UsageError: `data.not-found`; `sql.engine-missing`, DuckDB is not installed.
        """
        self.data = data
        self._reader = open_reader(data)
        self._reading = threading.Lock()
        self._topics = frozenset(self._reader.topics(system=True))
        try:
            import duckdb
        except ImportError as error:
            raise UsageError("sql.engine-missing", "DuckDB is not installed") from error
        self._duckdb: Any = duckdb
        self._spill = new_scratch("sql")
        # Streams and files that the last statement opened.
        self._opened = contextlib.ExitStack()
        self._connection: Any = None
        self._failure: PolybusError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        remove_scratch(self._spill)

    def query(self, sql: str) -> Any:
        """Run one statement on the current topics and tables; return DuckDB's result.

        Raises:
            UsageError: `sql.invalid` (with the position in the text), `sql.table-unknown`,
                `sql.statement` (not a single statement that only reads).
            StorageError: `log.damaged`, `lake.damaged` or `sql.unreadable` name a file.
        """
        return self._attempt(self._duck_text(sql), lambda text: self._connection.execute(text))

    def stream(self, sql: str, *, batch_rows: int = 2048) -> tuple[pa.Schema, Iterator[Any]]:
        """As `query`, but return the columns and an iterator of record batches."""

        def run(text: str) -> Any:
            try:
                return self._connection.sql(text).to_arrow_reader(batch_rows)
            except self._duckdb.BinderException:
                self._connection.execute(text)  # Fails likewise, with the position in the text.
                raise

        reader = self._attempt(self._duck_text(sql), run)
        names = shown_names(reader.schema.names)
        fields = zip(reader.schema, names, strict=True)
        schema = pa.schema([field.with_name(name) for field, name in fields])
        return schema, self._batches_of(reader, names)

    def _attempt(self, text: str, run: Callable[[str], Any]) -> Any:
        """Register the tables of the statement, and run it."""
        with self._explained():
            self._open()
            named = self._named(text)
            try:
                self._register_all(named)
                return run(text)
            except self._duckdb.BinderException:
                if named.everything:
                    raise
            # The statement may need a column that its text does not name.
            self._open()
            self._register_all(named._replace(everything=True))
            return run(text)

    def _batches_of(self, reader: Any, names: list[str]) -> Iterator[Any]:
        with self._explained():
            for batch in reader:
                yield batch.rename_columns(names)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate errors of DuckDB."""
        duckdb = self._duckdb
        self._failure = None
        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if self._failure is not None:
                # DuckDB was reading our stream and only reports that it failed.
                raise self._failure from error
            if isinstance(error, duckdb.OutOfMemoryException):
                text = f"the statement needs more than {MEMORY_MAX} of memory: {_one_line(error)}"
                raise UsageError("sql.failed", text) from error
            if isinstance(
                error, duckdb.ParserException | duckdb.BinderException | duckdb.CatalogException
            ):
                hint = ALIAS_HINT if _is_base_unknown(str(error)) else ""
                raise UsageError("sql.invalid", f"{str(error).strip()}{hint}") from error
            is_invalid = isinstance(error, duckdb.InvalidInputException) and "file" in str(error)
            if isinstance(error, duckdb.IOException) or is_invalid:
                raise StorageError("sql.unreadable", _one_line(error)) from error
            hint = CAST_HINT if "Malformed JSON" in str(error) else ""
            raise UsageError("sql.failed", f"{str(error).strip()}{hint}") from error

    def _register_all(self, named: Named) -> None:
        paths: list[str] = []
        for parts in named.tables:
            paths += self._register(parts, named)
        self._connection.execute(f"SET allowed_paths = {_listed(paths)}")
        for setting in ("enable_external_access = false", "lock_configuration = true"):
            self._connection.execute(f"SET {setting}")

    def _open(self) -> None:
        """Open a connection without tables, because registered tables are snapshots."""
        self._opened.close()
        settings = {
            "memory_limit": MEMORY_MAX,
            "temp_directory": str(self._spill),
            "max_temp_directory_size": SPILL_MAX,
            "autoinstall_known_extensions": False,
            "python_enable_replacements": False,
            # As Spark does, so that a statement has the same result.
            "default_null_order": "nulls_first_on_asc_last_on_desc",
        }
        connection = self._duckdb.connect(":memory:", config=settings)
        self._connection = self._opened.enter_context(contextlib.closing(connection))
        self._connection.execute(_MACROS)
        with contextlib.suppress(self._duckdb.Error):
            self._connection.execute("SET TimeZone = 'UTC'")

    def _named(self, text: str) -> Named:
        """The names in the statement. Raises UsageError `sql.invalid`, `sql.statement`."""
        statements = self._connection.extract_statements(text)
        kinds = [str(statement.type).rpartition(".")[2] for statement in statements]
        if len(kinds) != 1:
            raise UsageError("sql.statement", f"expected one statement, got {len(kinds)}")
        if kinds[0] not in ("SELECT", "EXPLAIN"):
            raise UsageError("sql.statement", f"{kinds[0]} is not supported: use SELECT")
        text = without_explain(text) if kinds[0] == "EXPLAIN" else text
        found = self._connection.execute("SELECT json_serialize_sql(?)", [text]).fetchall()
        return named_in(json.loads(found[0][0]))

    def _register(self, parts: tuple[str, ...], named: Named) -> list[str]:
        """Create a view of a topic or a table; return the files it reads."""
        if parts[0].lower() in _SYSTEM:
            return []
        name = ".".join(parts)
        topic = name.lower()
        table = self._table(parts)
        if topic in self._topics and not (topic.startswith(MARK) and table):
            query, paths = self._topic_query(topic, named)
        elif table is not None:
            kind = description_in(name)[1]
            query, paths = self._description(table, kind) if kind else self._table_query(table)
        elif (typed := self._typed_query(name)) is not None:
            query, paths = typed
        else:
            raise unknown_table(name, self._known())
        if len(parts) > 2:
            text = f'{name}: put a name with more than two parts in quotes: "{name}"'
            raise UsageError("sql.invalid", text)
        if len(parts) == 2:
            self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(parts[0])}")
        view = ".".join(map(quoted, parts))
        self._connection.execute(f"CREATE OR REPLACE VIEW {view} AS {query}")
        return paths

    def _duck_text(self, sql: str) -> str:
        """A statement with what DuckDB lacks, rewritten. A name of DuckDB has up to two dots."""
        if sql.count(".") > 1:
            marked = {MARK + name for name in table_names(self.data)}
            known = {name.lower() for name in self._known() | marked}
            sql = with_dots_quoted(sql, known, '"', dots_min=2)
        sql = with_versions_named(with_descriptions_named(sql, '"'), '"')
        return with_offset_quoted(with_casts_called(for_duckdb(sql)))

    def _known(self) -> set[str]:
        """The names that a statement may use, for the error about an unknown one."""
        return {*self._topics, *table_names(self.data), *view_names(self.data)}

    def _table(self, parts: Sequence[str]) -> LakeTable | None:
        known = {name.lower(): name for name in table_names(self.data)}
        name, at = version_in(description_in(".".join(parts))[0])
        found = known.get(name.lower().removeprefix(MARK))
        return None if found is None else open_table(self.data, found, at=at)

    def _typed_query(self, name: str) -> tuple[str, list[str]] | None:
        """The view `silver.<topic>` of a topic that declares a schema."""
        silver, found = open_table(self.data, "silver"), view_schema(self.data, name)
        if found is None or not silver.exists:
            return None
        query, paths = self._table_query(silver)
        where = f"WHERE topic = {_text(found[0])}"
        return f"SELECT {typed_select(*found)} FROM ({query}) {where}", paths

    def _topic_query(self, topic: str, named: Named) -> tuple[str, list[str]]:
        history = self._reader.history(topic)
        stop = max(self._reader.bounds(topic).stop, history.handed_over)
        folder = topic_folder(self.data, topic).absolute()
        settled = [str(folder / file.path) for file in history.settled_files]
        pinned = ""
        if len(settled) < len(history.files):
            # The hand-over may replace the last file while we read; an open file stays readable.
            pinned = self._pin(folder / history.files[-1].path)
        columns = columns_of(named)
        parts = []
        made = self._made(topic, history.epoch)
        if settled:
            source = f"read_parquet({_listed(settled)}, hive_partitioning = true, "
            parts.append(select(columns, made, source + "hive_types = {'date': DATE})"))
        made["date"] = DATE
        if pinned:
            source = f"read_parquet({_text(pinned)}, hive_partitioning = false)"
            parts.append(select(columns, made, source))
        if history.handed_over < stop or not parts:
            needed = {*columns, "timestamp"} if "date" in columns else {*columns}
            stored = [name for name in STORED if name in needed]
            stored = stored or ["offset"]
            schema = pa.schema([SCHEMA.field(name) for name in stored])
            bounds = (history.handed_over, stop)
            fresh = Fresh(
                schema, partial(self._noted, partial(self._batches, topic, bounds, stored))
            )
            view = f"__fresh_{topic}"
            self._connection.register(view, fresh)
            parts.append(select(columns, made, quoted(view)))
        return " UNION ALL ".join(parts), [*settled, *([pinned] if pinned else [])]

    def _made(self, topic: str, epoch: int) -> dict[str, str]:
        """The columns of a topic that are not stored in files."""
        return {"topic": _text(topic), "partition": "0", "epoch": f"{epoch}::BIGINT"}

    def _pin(self, path: Path) -> str:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            text = f"{path}: {error.strerror}; if a hand-over replaced it, run the statement again"
            raise StorageError("sql.unreadable", text) from error
        self._opened.callback(os.close, descriptor)
        return str(_PINNED / str(descriptor)) if _PINNED.is_dir() else str(path)

    def _table_query(self, table: LakeTable) -> tuple[str, list[str]]:
        """All columns of the table, also those that no file has."""
        state = table.state
        view = f"__empty_{table.name}"
        self._connection.register(view, arrow_schema(state.fields).empty_table())
        query = f"SELECT * FROM {quoted(view)}"
        paths = [str(table.path / path) for path in state.files]
        missing = [path for path in paths if not os.path.exists(path)]
        if missing:
            raise StorageError("lake.damaged", f"table {table.name}: {missing[0]} is missing")
        if paths:
            options = f"hive_partitioning = {bool(state.partition_by)}, union_by_name = true"
            if state.partition_by:
                options += f", hive_types = {_hive_types(state)}"
            source = f"read_parquet({_listed(paths)}, {options})"
            query += f" UNION ALL BY NAME SELECT * FROM {source}"
        parsed = ", ".join(
            f"{name}::JSON AS {name}"
            for name in (quoted(field["name"]) for field in state.fields if is_json(field))
        )
        return f"SELECT *{f' REPLACE ({parsed})' if parsed else ''} FROM ({query})", paths

    def _description(self, table: LakeTable, kind: str) -> tuple[str, list[str]]:
        view = f"__{kind}_{table.name}"
        rows = partial(self._noted, partial(described, table, kind))
        self._connection.register(view, Fresh(SCHEMAS[kind], rows))
        return f"SELECT * FROM {quoted(view)}", []

    def _batches(self, topic: str, bounds: tuple[int, int], columns: list[str]) -> Iterator[Any]:
        """Messages that are not in files yet. DuckDB may read streams in several threads."""
        with self._reading:
            found = self._reader.read(topic, *bounds, columns=columns, rows_max=FRESH_ROWS)
        while True:
            with self._reading:
                batch = next(found, None)
            if batch is None:
                return
            yield batch

    def _noted(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Batches for DuckDB, which would not tell why they end too early."""
        try:
            yield from batches()
        except PolybusError as error:
            self._failure = error
            raise


@dataclass(frozen=True)
class Fresh:
    """Rows of a topic for DuckDB; each scan requests its own stream."""

    schema: pa.Schema
    batches: Callable[[], Iterator[Any]]

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self.schema, self.batches())
        return reader.__arrow_c_stream__()


def _hive_types(state: TableState) -> str:
    """The types of the columns in folder names, which DuckDB would guess."""
    types = {field["name"]: field["type"] for field in state.fields}
    pairs = [
        f"{_text(name)}: {_DUCK_TYPES.get(types[name], types[name])}" for name in state.partition_by
    ]
    return "{" + ", ".join(pairs) + "}"


def unknown_table(name: str, known: Collection[str]) -> UsageError:
    """The error of a statement that names `name`, which may be a version of a table."""
    name, kind = description_in(name)
    name, at = version_in(name)
    has_versions = bool(kind) or at is not None
    # Topics of the system last: a statement seldom means them.
    listed = sorted(
        (one for one in known if one != name.lower()), key=lambda one: (is_reserved(one), one)
    )
    near = difflib.get_close_matches(name.lower(), listed, n=3, cutoff=0.5)
    some = ", ".join(listed[:10]) or "none yet"
    more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {some}{more}"
    is_view = has_versions and "." in name
    if _OF_PIPELINE.fullmatch(name.lower().removeprefix(MARK)) and not is_view:
        hint = f"polybus up makes it when its pipeline has decoded messages; {hint}"
    text = f"there is no topic or table {name}"
    if has_versions:
        text = f"there is no lake table {name}, and a topic or view has no versions"
    return UsageError("sql.table-unknown", f"{text}; {hint}")


def columns_of(named: Named) -> list[str]:
    """The columns of a topic that a statement may need."""
    found = [name for name in COLUMNS if named.everything or name in named.words]
    return found or ["offset"]


def select(columns: Sequence[str], made: dict[str, str], source: str) -> str:
    chosen = ", ".join(
        f"{made[name]} AS {quoted(name)}" if name in made else quoted(name) for name in columns
    )
    return f"SELECT {chosen} FROM {source}"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _listed(paths: Sequence[str]) -> str:
    return "[" + ", ".join(map(_text, paths)) + "]"


def _is_base_unknown(error: str) -> bool:
    """Whether the error is about a path without a column before its colon."""
    message, _, line = error.partition("LINE")
    found = re.search(r'"([^"]+)" not found', message)
    return (
        found is not None and re.search(rf"json_part\w*\({re.escape(found[1])},", line) is not None
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
