"""`spark.read`, `spark.readStream`, `spark.table` and `spark.sql` inside a pipeline's functions.

A pipeline's names are not tables of Spark's catalog: they are datasets of the same pipeline, lake
tables and topics. Spark's own runner resolves names on its server while it runs the user's
functions. Here the session's methods ask the resolver of the function that runs (`using`). Outside
of such functions they behave as Spark's own.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from pyspark.errors import AnalysisException

from polybus.errors import UsageError
from polybus.lake.sql.text import with_versions_named
from polybus.spark import internals
from polybus.spark.location import BusLocation
from polybus.spark.variants import with_paths

FORMAT = "polybus"
TABLES = "delta"
"""The format with which a name in `readStream` always means a lake table."""
# SQL strings, quoted names and comments: nothing inside them is a word of the statement.
OPAQUE = r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/"
_STREAM = re.compile(
    rf"(?P<opaque>{OPAQUE})"
    r"|\bSTREAM\s*(?:\(\s*(?P<inner>(?:`[^`]+`|[\w$.-]+))\s*\)|\s(?P<bare>(?:`[^`]+`|[A-Za-z_][\w.]*)))",
    re.IGNORECASE | re.DOTALL,
)
STREAM_MARK = "@stream"
"""The suffix of the temporary view that stands for a stream in a statement."""
_NAMES_IN_A_QUERY_MAX = 100
_INSTALLED: set[type] = set()
# The active session is global, and a session's views are shared by its threads. So the functions of
# one pipeline run at a time; they only describe work, which is quick.
_ACTIVE = threading.RLock()


_REMOTE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


LoadFrame = Callable[[dict[str, Any]], Any]


@dataclass(slots=True)
class Resolver:
    """Resolves names. This one is for code outside a pipeline's functions."""

    bus: BusLocation

    def stream(self, name: str, options: dict[str, Any], *, is_table: bool = False) -> Any:
        """The stream of that name, of a table if it must be one; None leaves it to Spark."""
        return None

    def batch(self, name: str, options: dict[str, Any]) -> Any:
        """The current rows of that name; None leaves the name to Spark."""
        return None

    def source(self, given: dict[str, Any], load: LoadFrame, *, streaming: bool) -> Any:
        """The result of `format("polybus")`; `load` takes options to add to those given."""
        return load(self.bus.missing_options(given))


_resolver: ContextVar[Resolver | None] = ContextVar("polybus-pipeline-names", default=None)


@contextmanager
def using(resolver: Resolver) -> Iterator[None]:
    """Resolve names with `resolver`, in this thread, until the end of the block."""
    token = _resolver.set(resolver)
    try:
        yield
    finally:
        _resolver.reset(token)


@contextmanager
def active(spark: Any) -> Iterator[None]:
    """Make `spark` the active session until the end of the block."""
    with _ACTIVE:
        before = type(spark).getActiveSession()
        internals.activate(spark)
        try:
            yield
        finally:
            if before is not None:
                internals.activate(before)


# Stands for Spark's own reader, batch or stream, classic or Connect, which ours is mixed into.
_SparkReader: Any = object


class _Reader(_SparkReader):
    """Adds our names to Spark's reader, and remembers the options."""

    _streaming = False

    def __init__(self, spark: Any, resolver: Resolver) -> None:
        super().__init__(spark)
        self._resolver = resolver
        self._given: dict[str, Any] = {}
        self._source: str | None = None

    def format(self, source: str) -> Any:
        self._source = source
        return super().format(source)

    def option(self, key: str, value: Any) -> Any:
        self._given[key] = value
        return super().option(key, value)

    def options(self, **options: Any) -> Any:
        self._given.update(options)
        return super().options(**options)

    def load(
        self, path: Any = None, format: str | None = None, schema: Any = None, **options: Any
    ) -> Any:
        def load(added: dict[str, Any]) -> Any:
            return sparks_load(path, format, schema, **{**options, **added})

        sparks_load = super().load
        if (format or self._source) != FORMAT:
            return load({})
        given = {**self._given, **options}
        return self._resolver.source(given, load, streaming=self._streaming)

    def table(self, name: str, *more: Any, **options: Any) -> Any:
        given = {**self._given, **options}
        if self._streaming:
            found = self._resolver.stream(name, given, is_table=self._source == TABLES)
        else:
            found = self._resolver.batch(name, given)
        return super().table(name, *more, **options) if found is None else found


def install(session_type: Any) -> None:
    """Make the sessions of this type resolve our names; idempotent."""
    if session_type in _INSTALLED:
        return
    for name, streaming in (("read", False), ("readStream", True)):
        spark_property = getattr(session_type, name)
        setattr(session_type, name, _reader_property(spark_property, streaming=streaming))
    sparks_table, sparks_sql = session_type.table, session_type.sql

    def table(self: Any, tableName: str) -> Any:
        resolver = _resolver.get()
        found = None if resolver is None else resolver.batch(tableName, {})
        return sparks_table(self, tableName) if found is None else found

    def sql(self: Any, sqlQuery: str, args: Any = None, **kwargs: Any) -> Any:
        resolver = _resolver.get()
        if resolver is None:
            return sparks_sql(self, sqlQuery, args, **kwargs)

        def run(query: str) -> Any:
            text = with_stream_names(with_versions_named(query, "`"))
            if internals.is_connect(self):
                return _resolved_remotely(self, resolver, text)
            return _resolved(self, resolver, lambda: sparks_sql(self, text, args, **kwargs))

        with _quiet():
            return with_paths(sqlQuery, run)

    session_type.table, session_type.sql = table, sql
    _INSTALLED.add(session_type)


def _reader_property(spark: Any, *, streaming: bool) -> property:
    made: dict[type, type] = {}

    def read(self: Any) -> Any:
        plain = spark.fget(self)
        resolver = _resolver.get()
        if resolver is None:
            return plain
        kind = type(plain)
        if kind not in made:
            name = f"Pipeline{kind.__name__}"
            made[kind] = type(name, (_Reader, kind), {"_streaming": streaming})
        return made[kind](self, resolver)

    return property(read, doc=spark.__doc__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Spark's log of unknown names: that is how the inputs of a query are found."""
    log = internals.context_logger()
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _resolved(spark: Any, resolver: Resolver, query: Callable[[], Any]) -> Any:
    """Analyse a query; names that Spark does not know become temporary views meanwhile."""
    known: list[str] = []
    try:
        while True:
            try:
                return query()
            except AnalysisException as error:
                name = missing_relation(error)
                if name is None or name in known or len(known) >= _NAMES_IN_A_QUERY_MAX:
                    raise
                frame = _frame_of(resolver, name)
                if frame is None:
                    raise
                frame.createOrReplaceTempView(f"`{name}`")
                known.append(name)
    finally:
        for name in known:
            spark.catalog.dropTempView(name)


@dataclass(slots=True)
class _RemoteNames:
    """The names of ours in each query of a session, and all of them."""

    in_query: dict[str, tuple[str, ...]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)


def _resolved_remotely(spark: Any, resolver: Resolver, text: str) -> Any:
    """As `_resolved`, for Spark Connect: the plan of the query carries those of the names.

    A server analyses a plan again whenever it is used, and the views that it makes for that stay.
    So a query must always carry its names, and they are resolved while no flow runs.
    """
    names = _REMOTE.setdefault(spark, _RemoteNames())
    if text not in names.in_query:
        for name in names.known:
            spark.catalog.dropTempView(name)
    carried = {name: _frame_of(resolver, name) for name in names.in_query.get(text, ())}
    while True:
        frame = internals.remote_query(spark, text, carried)
        try:
            frame.schema  # noqa: B018
            break
        except AnalysisException as error:
            name = missing_relation(error) or ""
            if not name or name in carried or len(carried) >= _NAMES_IN_A_QUERY_MAX:
                raise
            found = _frame_of(resolver, name)
            if found is None:
                raise
            carried[name] = found
    names.in_query[text] = tuple(carried)
    names.known |= carried.keys()
    return frame


def _frame_of(resolver: Resolver, name: str) -> Any:
    find = resolver.stream if name.endswith(STREAM_MARK) else resolver.batch
    return find(name.removesuffix(STREAM_MARK), {})


def with_stream_names(text: str) -> str:
    """Mark streams: a statement may read one name as a stream and as a table.

    `STREAM(orders)` becomes ``STREAM(`orders@stream`)``.
    """

    def renamed(match: re.Match[str]) -> str:
        if match.group("opaque"):
            return match.group()
        name = (match.group("inner") or match.group("bare")).strip("`")
        return f"STREAM(`{name}{STREAM_MARK}`)"

    return _STREAM.sub(renamed, text)


def relation_of(quoted: str) -> str:
    """The plain name in Spark's `` `a`.`b` ``."""
    return ".".join(part.strip("`") for part in re.findall(r"`[^`]*`|[^.`]+", quoted))


def missing_relation(error: Exception) -> str | None:
    """The name in Spark's "table or view not found"; None for any other error."""
    if not isinstance(error, AnalysisException):
        return None
    if error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
        return None
    return relation_of(error.getMessageParameters()["relationName"])


def unknown_relation(name: str) -> UsageError:
    """The error for a name that is neither ours nor in Spark's catalog."""
    hint = f"; a name with dots needs backticks in SQL: `{name}`" if "." in name else ""
    text = f"no dataset of the pipeline, lake table or topic is named {name}{hint}"
    return UsageError("pipeline.unknown-input", text)
