"""From a folder of pipeline files to flows that can start, and the problems of those that cannot.

    prepared = prepare(spark, Path("pipelines"), BusLocation(data))
    for flow in prepared.flows: runner.start(flow)

This finds all problems that can be found before anything runs: broken files, unknown names, cycles,
columns that do not exist, streams that Spark cannot run, and changes since the last run that do not
fit the checkpoint. A pipeline with a problem does not start; the others do.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.pipelines.flow import Flow as Query
from pyspark.pipelines.output import MaterializedView, Sink, StreamingTable

from polybus.errors import PolybusError, UsageError
from polybus.lake.table import open_table
from polybus.spark import listener, tables
from polybus.spark.causes import brief_errors, clean_cause
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.declared.changes import Changes, Fingerprint, fingerprint
from polybus.spark.pipelines.declared.loader import choose, find_pipelines, load_pipeline
from polybus.spark.pipelines.declared.names import (
    Analysed,
    Input,
    Names,
    in_schema_of,
    united,
    writes_rows,
)
from polybus.spark.pipelines.declared.readers import FORMAT
from polybus.spark.pipelines.declared.registry import PipelineError, place_of
from polybus.spark.pipelines.flows import FlowContext, PipelineFlow, checkpoints_of
from polybus.spark.pipelines.sessions import another_session, use_in_thread
from polybus.spark.session.connect import is_connect

VIEW_INTERVAL_S = 1.0
"""How often a materialized view checks its inputs for changes, in continuous mode."""


def start_stream(
    context: FlowContext, *, names: Names, query: Query, frame: Any, starts_over: bool
) -> Any:
    """Start the streaming query of a flow into a table or a sink.

    `starts_over` says that its checkpoint is new on purpose: a sink may take over its producer.
    """
    name = f"{names.pipeline.name}.{query.name}"
    output = names.pipeline.outputs[query.target]
    writer = (
        in_schema_of(frame, output)
        .writeStream.queryName(name)
        .outputMode("append")
        .option("checkpointLocation", str(context.checkpoint))
        .trigger(**context.trigger)
    )
    if isinstance(output, Sink):
        options = dict(output.options)
        if output.format == FORMAT:
            options |= names.bus.missing_options(options)
            if "producer" not in {key.lower() for key in options}:
                options["producer"] = name
            if starts_over:
                options["takeOver"] = "true"
        writer = writer.format(output.format).options(**options)
    else:
        flow, table = query.name, names.table(query.target)
        checkpoint = Checkpoint(context.checkpoint)
        partition_by = tuple(output.partition_cols or ())

        def append(rows: Any, batch_id: int) -> None:
            # A new checkpoint counts its batches from 0 again: its id tells the two apart.
            writer = f"{flow}:{checkpoint.query_id()}"
            with brief_errors():
                try:
                    tables.append(
                        rows,
                        table,
                        writer=writer,
                        batch_id=batch_id,
                        partition_by=partition_by,
                        # On a server of Spark Connect it cannot be found.
                        checkpoint=checkpoint,
                    )
                except UsageError as error:
                    if error.code != "lake.schema":
                        raise
                    reason = error.text
                    tables.set_aside(rows, table, reason=reason, writer=writer, batch_id=batch_id)

        # Spark Connect sends the function, and what it uses, to the server.
        writer = writer.foreachBatch(append)
    use_in_thread(names.spark)
    with names.settings_of(query):
        return writer.start()


class ViewFlow:
    """A materialized view, which is computed completely when its inputs have changed."""

    def __init__(self, names: Names, query: Query) -> None:
        self._names = names
        self._query = query
        self._seen: dict[Input, Any] = {}

    def refresh(self, context: FlowContext) -> None:
        """Replace the table, unless no input has changed since the last time."""
        if self._seen and self._seen == self._versions(self._seen):
            return
        names, query = self._names, self._query
        analysed = names.analyse(query, run=True)
        # Read before the rows: a change in between causes one unnecessary refresh.
        versions = self._versions(analysed.inputs)
        use_in_thread(names.spark)
        # Other flows cannot start while the session has settings of this one.
        has_settings = names.pipeline.conf or query.spark_conf
        with names.settings_of(query) if has_settings else nullcontext():
            rows = in_schema_of(analysed.frame, names.pipeline.outputs[query.target])
            context.figures.rows = tables.replace(
                rows, names.table(query.target), writer=query.name
            )
        self._seen = versions

    def _versions(self, inputs: Any) -> dict[Input, Any]:
        """The version of every input; the same versions mean the same rows."""
        return {one: self._version(one) for one in inputs}

    def _version(self, one: Input) -> Any:
        bus = self._names.bus
        if one.kind == "dataset":
            return self._names.table(one.name).version
        if one.kind == "table":
            return open_table(bus.data, one.name).version
        if bus.url is not None:
            return object()  # counts as changed, which is cheaper than a request each second
        from polybus.log.reading.reader import LogReader

        try:
            bounds = LogReader(bus.data).bounds(one.name)
        except PolybusError:
            return None
        return (bounds.epoch, bounds.start, bounds.stop)


@dataclasses.dataclass(slots=True)
class Prepared:
    """Flows that can start, and by name the problems of the pipelines that cannot."""

    flows: list[PipelineFlow] = dataclasses.field(default_factory=list)
    problems: dict[str, PolybusError] = dataclasses.field(default_factory=dict)


def prepare(
    spark: Any,
    folder: Path,
    bus: BusLocation,
    *,
    only: tuple[str, ...] = (),
    reset: Collection[str] = (),
    check_only: bool = False,
) -> Prepared:
    """Load and analyse the pipelines in `folder`.

    `only` names pipelines. `reset` names flows or tables (`NAME` or `PIPELINE.NAME`) that start
    over: with a new checkpoint and, for tables, a new version without rows. With `check_only`
    nothing on disk changes.

    Raises:
        UsageError: `pipeline.folder`, `pipeline.duplicate`, or `pipeline.unknown`, for a name in
            `only` or `reset`.
    """
    found = choose(find_pipelines(folder), only)
    prepared = Prepared()
    resets = {name.lower() for name in reset}
    used: set[str] = set()
    for name, path in found.items():
        try:
            one = _Preparation(spark, name, path, bus)
            used |= one.prepare(prepared, resets, check_only=check_only)
        except PolybusError as error:
            prepared.problems[name] = error
        except Exception as error:  # the user's code and Spark may raise anything
            text = clean_cause(error)
            prepared.problems[name] = PipelineError("pipeline.query", text, file=str(path))
    unknown = resets - used
    if unknown and not prepared.problems:
        known = ", ".join(flow.full_name for flow in prepared.flows)
        text = f"--reset {', '.join(sorted(unknown))}: no such flow; there are: {known}"
        raise UsageError("pipeline.unknown", text)
    return prepared


class _Preparation:
    """Prepares one pipeline, in its own session."""

    def __init__(self, spark: Any, name: str, path: Path, bus: BusLocation) -> None:
        session = another_session(spark)
        self._pipeline = load_pipeline(session, name, path, bus)
        self._names = Names(session, self._pipeline, bus)
        self._checkpoints = checkpoints_of(bus.data, name)
        self._prints: dict[str, Fingerprint] = {}

    def prepare(self, prepared: Prepared, resets: set[str], *, check_only: bool) -> set[str]:
        """Add the flows; returns the names in `resets` that are ours. Raises PipelineError."""
        queries = [
            query
            for query in self._pipeline.queries.values()
            if writes_rows(self._pipeline.outputs[query.target])
        ]
        analysed = {name: self._analyse(query) for name, query in self._pipeline.queries.items()}
        for output in self._pipeline.outputs.values():
            self._check_schemas(output, analysed)
        changes = Changes(self._names, self._checkpoints, self._prints)
        chosen = [query for query in queries if changes.is_reset(query, resets)]
        changes.check([query for query in queries if query not in chosen])
        if not check_only:
            if not is_connect(self._names.spark):
                bus = self._names.bus
                # The bus lists the flows as consumers; a listener sees one session only.
                data = bus.data if bus.url is None else None
                listener.install(self._names.spark, data=data, url=bus.url, token=bus.token)
            changes.start_over(chosen)
            changes.store()
        prepared.flows += [
            self._flow(query, analysed[query.name], starts_over=query in chosen)
            for query in queries
        ]
        return {name for query in chosen for name in changes.spellings(query)} & resets

    def _analyse(self, query: Query) -> Analysed:
        analysed = self._names.analyse(query)
        output = self._pipeline.outputs[query.target]
        is_view = isinstance(output, MaterializedView)
        if writes_rows(output) and analysed.frame.isStreaming == is_view:
            text = f"{query.name} writes to {query.target}, which takes a stream"
            advice = "read a stream (spark.readStream, STREAM(name)), or declare a view"
            if is_view:
                text = f"{query.name} is a materialized view, and its query is a stream"
                advice = "read with spark.read, or declare a table"
            raise PipelineError("pipeline.query", f"{text}; {advice}", **place_of(query))
        if writes_rows(output) and not is_view:
            self._check_stream(query, analysed.frame)
            shaped = in_schema_of(analysed.frame, output)
            self._prints[query.name] = fingerprint(
                query.name, query.target, shaped, getattr(output, "partition_cols", None) or ()
            )
        return analysed

    def _check_stream(self, query: Query, frame: Any) -> None:
        """Let Spark check now what it would check when the stream starts."""
        plan = getattr(frame, "_jdf", None)
        if plan is None:
            return
        jvm = self._names.spark._jvm  # noqa: SLF001
        checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        mode = jvm.org.apache.spark.sql.streaming.OutputMode.Append()
        try:
            checker.checkForStreaming(plan.queryExecution().analyzed(), mode)
        except AnalysisException as error:
            raise PipelineError("pipeline.query", clean_cause(error), **place_of(query)) from error

    def _check_schemas(self, output: Any, analysed: dict[str, Analysed]) -> None:
        """The queries of one table must agree on its columns."""
        queries = self._pipeline.queries_into(output.name)
        if not isinstance(output, StreamingTable) or not queries:
            return
        try:
            united([analysed[query.name].frame for query in queries], output)
        except AnalysisException as error:
            text = f"the flows into {output.name} do not agree: {clean_cause(error)}"
            raise PipelineError("pipeline.query", text, **place_of(queries[-1])) from error

    def _flow(self, query: Query, analysed: Analysed, *, starts_over: bool) -> PipelineFlow:
        names, output = self._names, self._pipeline.outputs[query.target]
        repeat_s, writes = None, self._pipeline.table_name(query.target)
        start: Callable[[FlowContext], Any] = functools.partial(
            start_stream, names=names, query=query, frame=analysed.frame, starts_over=starts_over
        )
        if isinstance(output, MaterializedView):
            start, repeat_s = ViewFlow(names, query).refresh, VIEW_INTERVAL_S
        elif not isinstance(output, StreamingTable):
            writes = f"{output.format} {output.options.get('topic', '')}".strip()
        return PipelineFlow(
            self._pipeline.name,
            query.name,
            start,
            after=self._after(analysed),
            repeat_s=repeat_s,
            reads=tuple(sorted({one.name for one in analysed.inputs})),
            writes=writes,
        )

    def _after(self, analysed: Analysed) -> tuple[str, ...]:
        """The flows that fill the tables that a query reads as tables."""
        tables = {
            one.name
            for one in analysed.inputs
            if one.kind == "dataset" and not one.streaming
            if writes_rows(self._pipeline.outputs[one.name])
        }
        filling = [one.name for one in self._pipeline.queries.values() if one.target in tables]
        return tuple(sorted(filling))
