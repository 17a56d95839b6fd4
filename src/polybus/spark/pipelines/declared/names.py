"""Resolves names in a pipeline: its own datasets, then lake tables, then topics.

A stream of a streaming table of the same pipeline is replaced by the queries that fill the table.
Both flows then read the topics, neither waits for files of the other, and each has its own
checkpoint.

A stream of any other lake table, or with `format("delta")` of one of the same pipeline, has the
rows that are added to the table. It and a table that is joined with a stream are read in the format
`polybus-table` (lake_source.py); everything else reads tables natively.
"""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import reduce
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from polybus.errors import PolybusError, UsageError
from polybus.lake.delta_actions import has_feed
from polybus.lake.dimension import DELETED, SEQUENCE
from polybus.lake.fields import parsed_fields
from polybus.lake.sql.text import time_in, version_in
from polybus.lake.table import LakeTable, open_table, table_names
from polybus.lake.table_state import TableState
from polybus.spark.causes import clean_cause
from polybus.spark.expectations import Expectation, enforced, observed
from polybus.spark.internals import (
    STATE_STORE,
    MaterializedView,
    Sink,
    StreamingTable,
    TemporaryView,
)
from polybus.spark.internals import Flow as Query
from polybus.spark.lake_source import TABLE_FORMAT, LakeTableSource, checked_options
from polybus.spark.location import BusLocation
from polybus.spark.origin import open_origin
from polybus.spark.pipelines.declared import readers
from polybus.spark.pipelines.declared.cdc import CHANGES_PER_BATCH_MAX, RESERVED
from polybus.spark.pipelines.declared.registry import (
    DeclaredPipeline,
    PipelineError,
    located,
    place_of,
)

# RocksDB's files are saved by a call that requires Hadoop's checksummed file system, and our
# sessions use the raw one. Uncached, so that only the flow that needs it gets it.
_ROCKSDB_FILES = {
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """An input of a query: a `dataset` of its pipeline, a lake `table` or a `topic`."""

    kind: str
    name: str
    streaming: bool


@dataclasses.dataclass(frozen=True, slots=True)
class FreshRows:
    """The files of a table with new rows, up to a version."""

    table: str
    state: TableState
    files: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Analysed:
    """A query's DataFrame, resolved but not run, and all its inputs, also through views."""

    frame: Any
    inputs: frozenset[Input]
    read: dict[Input, int] = dataclasses.field(default_factory=dict)
    """The version of each table whose rows the frame has."""
    observed: dict[str, list[Expectation]] = dataclasses.field(default_factory=dict)
    """The expectations of temporary views that a stream counts, by the name of the figures."""


class Names:
    """The names of one pipeline, on its own session."""

    def __init__(self, spark: Any, pipeline: DeclaredPipeline, bus: BusLocation) -> None:
        self.spark = spark
        self.pipeline = pipeline
        self.bus = bus
        self._settings = threading.RLock()
        self.streams: dict[tuple[tuple[str, str], ...], Any] = {}
        self.schemas: dict[str, StructType] = {}
        self._topics: set[str] | None = None
        spark.dataSource.register(LakeTableSource)

    def analyse(
        self, query: Query, *, run: bool = False, fresh: FreshRows | None = None
    ) -> Analysed:
        """Call a query's function. Without `run`, the tables that it reads are empty.

        With `fresh` it reads only some rows of a table.

        Raises:
            PipelineError: the problem, with file and line.
        """
        with readers.active(self.spark), self.settings_of(query):
            self._topics = None
            call = _Call(self.bus, self, query, run, fresh)
            frame = call.frame_of(query)
            return Analysed(frame, frozenset(call.inputs), call.read, call.observed)

    @contextmanager
    def settings_of(self, query: Query) -> Iterator[None]:
        """Apply the settings of the pipeline and a query to the session, one thread at a time."""
        conf = {**self.pipeline.conf, **query.spark_conf}
        if conf.get(STATE_STORE, "").endswith("RocksDBStateStoreProvider"):
            conf |= _ROCKSDB_FILES
        with self._settings:
            before = {name: self.spark.conf.get(name, None) for name in conf}
            for name, value in conf.items():
                self.spark.conf.set(name, value)
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is None:
                        self.spark.conf.unset(name)
                    else:
                        self.spark.conf.set(name, value)

    def is_streaming(self, query: Query) -> bool:
        """Whether the query's output takes a stream."""
        return not isinstance(self.pipeline.outputs[query.target], MaterializedView)

    def table(self, output: str) -> LakeTable:
        """The table of an output; one whose rows change has a change data feed."""
        is_fed = output in self.pipeline.rules
        is_fed |= isinstance(self.pipeline.outputs.get(output), MaterializedView)
        return open_table(self.bus.data, self.pipeline.table_name(output), is_fed=is_fed)

    def topics(self) -> set[str]:
        if self._topics is None:
            self._topics = set(open_origin(self.bus).topics(system=True))
        return self._topics


@dataclasses.dataclass(slots=True)
class _Call(readers.Resolver):
    """The call of one function, within the calls of the functions that need it (`stack`)."""

    names: Names
    root: Query
    run: bool
    fresh: FreshRows | None = None
    inputs: set[Input] = dataclasses.field(default_factory=set)
    read: dict[Input, int] = dataclasses.field(default_factory=dict)
    observed: dict[str, list[Expectation]] = dataclasses.field(default_factory=dict)
    stack: tuple[str, ...] = ()

    def frame_of(self, query: Query) -> Any:
        if query.name in self.stack:
            path = " → ".join([*self.stack[self.stack.index(query.name) :], query.name])
            text = f"{query.name} depends on itself: {path}"
            raise PipelineError("pipeline.cycle", text, **place_of(query))
        call = dataclasses.replace(self, stack=(*self.stack, query.name))
        place = place_of(query)
        try:
            with readers.using(call):
                frame = query.func()
        except Exception as error:
            raise _explained(error, place) from error
        if not isinstance(frame, DataFrame):
            kind = type(frame).__name__
            text = f"the function of {query.name} returns {kind}; it must return a DataFrame"
            raise PipelineError("pipeline.query", text, **place)
        return self._expected(query, frame) if self.stack else frame

    def _expected(self, query: Query, frame: Any) -> Any:
        """The rows of a dataset that another query reads, as its expectations leave them."""
        expected = self.names.pipeline.expectations(query)
        is_view = isinstance(self.names.pipeline.outputs[query.target], TemporaryView)
        try:
            if not expected or not is_view or not frame.isStreaming:
                return enforced(frame, expected)
            # The flow of a table counts its rows; a view has no flow of its own.
            name = f"{query.name}#{len(self.observed)}"
            self.observed[name] = expected
            return observed(frame, expected, name)
        except AnalysisException as error:
            text = f"expectations of {query.name}: {clean_cause(error)}"
            raise PipelineError("pipeline.query", text, **place_of(query)) from error

    def _schema_of(self, output: str) -> StructType:
        """The columns of a table, from the queries that fill it; their inputs are not ours."""
        pipeline, schemas = self.names.pipeline, self.names.schemas
        if output not in schemas:
            inner = dataclasses.replace(self, inputs=set(), read={}, observed={})
            frames = [inner.frame_of(query) for query in pipeline.queries_into(output)]
            schema = united(frames, pipeline.outputs[output]).schema
            rule = pipeline.rules.get(output)
            schemas[output] = schema if rule is None else rule.shown(schema)
        return schemas[output]

    def stream(self, name: str, options: dict[str, Any], *, is_table: bool = False) -> Any:
        pipeline = self.names.pipeline
        if name not in pipeline.outputs:
            if not is_table and name.lower() in self.names.topics():
                given = {"subscribe": name.lower(), "startingOffsets": "earliest", **options}
                return self.names.spark.readStream.format(readers.FORMAT).options(**given).load()
            own = [one for one in pipeline.outputs if pipeline.table_name(one) == name.lower()]
            name, is_table = own[0] if own else name, True
        output = pipeline.outputs.get(name)
        if isinstance(output, MaterializedView | Sink):
            kind = "sink" if isinstance(output, Sink) else "materialized view"
            text = f"{name} is a {kind} and cannot be read as a stream"
            raise UsageError("pipeline.query", f"{text}; read a view with spark.read.table")
        if name in pipeline.rules:
            raise _changing(name)
        if is_table and not isinstance(output, TemporaryView):
            return self._table_stream(name, options)
        queries = pipeline.queries_into(name)
        self._note("dataset", name, streaming=True)
        return united([self.frame_of(query) for query in queries], output)

    def _table_stream(self, name: str, options: dict[str, Any]) -> Any:
        """The existing rows of a lake table, then those that are added."""
        pipeline = self.names.pipeline
        is_own = name in pipeline.outputs
        table = pipeline.table_name(name) if is_own else name.lower()
        if not is_own and table not in table_names(self.bus.data):
            return self._unknown(name)
        lake_table = open_table(self.bus.data, table)
        checked = checked_options(options)
        if has_feed(lake_table.settings) and not checked.get("skips_changes"):
            raise _changing(name)
        self._note("table", table, streaming=True)
        kept = self._schema_of(name) if is_own else None
        given = {**options, "data": str(self.bus.data), "table": table}
        if self.root.target in pipeline.rules:
            given["maxRowsPerTrigger"] = str(CHANGES_PER_BATCH_MAX)
        return self._in_table_format(lake_table, kept, streaming=given)

    def batch(self, name: str, options: dict[str, Any]) -> Any:
        name, at = version_in(name)
        lowered = {key.lower(): str(value) for key, value in options.items()}
        if "versionasof" in lowered:
            at = int(lowered["versionasof"])
        elif "timestampasof" in lowered:
            at = time_in(lowered["timestampasof"])
        if at is not None:
            return self._version(name, at)
        output = self.names.pipeline.outputs.get(name)
        if isinstance(output, TemporaryView):
            self._note("dataset", name, streaming=False)
            return self.frame_of(self.names.pipeline.queries_into(name)[0])
        if isinstance(output, Sink):
            raise UsageError("pipeline.query", f"{name} is a sink and cannot be read")
        if output is not None:
            source = self._note("dataset", name, streaming=False)
            return self._table(source, self.names.table(name), self._schema_of(name))
        if name.lower() in table_names(self.bus.data):
            source = self._note("table", name.lower(), streaming=False)
            return self._table(source, open_table(self.bus.data, name.lower()), None)
        if name.lower() in self.names.topics():
            return self._topic(name.lower(), options)
        return self._unknown(name)

    def _version(self, name: str, at: int | datetime) -> Any:
        """A table at a version or a time."""
        from polybus.spark import tables

        is_own = name in self.names.pipeline.outputs
        name = name if is_own else name.lower()
        self._note("dataset" if is_own else "table", name, streaming=False)
        table = self.names.pipeline.table_name(name) if is_own else name
        return tables.read(self.names.spark, open_table(self.bus.data, table, at=at))

    def _table(self, source: Input, table: LakeTable, schema: StructType | None) -> Any:
        from polybus.spark import tables

        spark = self.names.spark
        if self.names.is_streaming(self.root):
            return self._in_table_format(table, schema)
        self.read[source] = table.version
        if schema is not None and (not self.run or not table.exists):
            return spark.createDataFrame([], schema)
        state, files = table.state, None
        if self.fresh is not None and self.fresh.table == table.name:
            state, files = self.fresh.state, self.fresh.files
        frame = tables.read(spark, table, state, files)
        self.read[source] = state.version
        return frame if schema is None else frame.to(_nullable(schema))

    def _in_table_format(
        self, table: LakeTable, schema: StructType | None, streaming: dict[str, str] | None = None
    ) -> Any:
        """A table in a streaming query: as the stream, with its options, or joined with one."""
        from polybus.spark import tables

        spark = self.names.spark
        kept = tables.read(spark, table).schema if schema is None else schema
        variants = tables.variants_in(kept)
        # A table stores VARIANT as JSON text, and a source cannot return VARIANT.
        stored = tables.stored_schema(parsed_fields(kept.json()))
        if streaming is None:
            rows = spark.read.format(TABLE_FORMAT).schema(stored).load(str(table.path))
        else:
            reader = spark.readStream.format(TABLE_FORMAT).schema(stored)
            rows = reader.options(**streaming).load()
        return tables.with_variants(rows, variants)

    def _topic(self, topic: str, options: dict[str, Any]) -> Any:
        self._note("topic", topic, streaming=False)
        if options or self.bus.url is not None or self.names.is_streaming(self.root):
            given = {"subscribe": topic, **options}
            return self.names.spark.read.format(readers.FORMAT).options(**given).load()
        from polybus.spark import views

        return views.table(self.names.spark, topic, self.bus.data)

    def _unknown(self, name: str) -> Any:
        """Leave the name to Spark's catalog if that knows it."""
        if "." in name or self.names.spark.catalog.tableExists(name):
            return None
        raise readers.unknown_relation(name)

    def source(self, given: dict[str, Any], load: readers.LoadFrame, *, streaming: bool) -> Any:
        lowered = {key.lower(): str(value) for key, value in given.items()}
        for topic in filter(None, lowered.get("subscribe", "").lower().split(",")):
            self._note("topic", topic.strip(), streaming=streaming)
        added = self.bus.missing_options(given)
        if not streaming:
            return load(added)
        if self.root.target in self.names.pipeline.rules and "maxoffsetspertrigger" not in lowered:
            added |= {"maxOffsetsPerTrigger": str(CHANGES_PER_BATCH_MAX)}
            lowered |= {"maxoffsetspertrigger": str(CHANGES_PER_BATCH_MAX)}
        # Spark starts a Python process to analyse each stream of ours; equal ones are shared.
        streams = self.names.streams
        key = tuple(sorted(lowered.items()))
        if key not in streams:
            streams[key] = load(added)
        return streams[key]

    def _note(self, kind: str, name: str, *, streaming: bool) -> Input:
        noted = Input(kind, name, streaming)
        self.inputs.add(noted)
        return noted


def _changing(name: str) -> UsageError:
    text = f"the rows of {name} change, so it cannot be read as a stream"
    return UsageError("pipeline.query", f"{text}; read it with spark.read.table")


def _explained(error: Exception, place: dict[str, Any]) -> PolybusError:
    """The error with its line, and with our text for a name that Spark does not know."""
    name = readers.missing_relation(error)
    if name is not None:
        error = readers.unknown_relation(name).with_traceback(error.__traceback__)
    return located("pipeline.query", error, **place)


def united(frames: list[Any], output: Any) -> Any:
    """The union of the queries of one output, in the columns that the output declares."""
    shaped = [in_schema_of(frame, output) for frame in frames]
    return reduce(lambda one, more: one.unionByName(more, allowMissingColumns=True), shaped)


def in_schema_of(frame: Any, output: Any) -> Any:
    """The frame with the columns and types that a table declares, if it declares any."""
    schema = getattr(output, "schema", None)
    if schema is None:
        return frame
    if isinstance(schema, str):
        schema = StructType.fromDDL(schema)
    if DELETED in frame.columns:  # changes, which have other columns than their table
        own = [field for field in schema if field.name not in RESERVED]
        schema = StructType([*own, frame.schema[SEQUENCE], frame.schema[DELETED]])
    return frame.to(schema)


def _nullable(schema: StructType) -> StructType:
    return StructType([StructField(one.name, one.dataType, True, one.metadata) for one in schema])


def writes_rows(output: Any) -> bool:
    """Whether the output has flows of its own; a temporary view is part of other queries."""
    return isinstance(output, StreamingTable | MaterializedView | Sink)
