"""From a folder of pipeline files to flows that can start, and the problems of those that cannot.

    prepared = prepare(spark, Path("pipelines"), BusLocation(data))
    for flow in prepared.flows: runner.start(flow)

This finds all problems that can be found before anything runs: broken files, unknown names, cycles,
columns that do not exist, streams that Spark cannot run, and changes since the last run that do not
fit the checkpoint. A pipeline with a problem does not start; the others do.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.errors import AnalysisException

from polybus.errors import PolybusError, UsageError
from polybus.lake import settings as pipeline_settings
from polybus.spark import listener
from polybus.spark.causes import clean_cause
from polybus.spark.expectations import declared
from polybus.spark.internals import Flow as Query
from polybus.spark.internals import (
    MaterializedView,
    StreamingTable,
    analysed_plan,
    check_streaming_plan,
    is_connect,
)
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
from polybus.spark.pipelines.declared.registry import (
    DeclarationRegistry,
    PipelineError,
    place_of,
)
from polybus.spark.pipelines.declared.streams import start_stream
from polybus.spark.pipelines.declared.view_flow import ViewFlow
from polybus.spark.pipelines.flows import FlowContext, PipelineFlow, checkpoints_of
from polybus.spark.pipelines.spark_sessions import another_session

VIEW_INTERVAL_S = 1.0
"""How often a materialized view checks its inputs for changes, in continuous mode."""


@dataclasses.dataclass(slots=True)
class Prepared:
    """Flows that can start, and by name the problems of the pipelines that cannot."""

    flows: list[PipelineFlow] = dataclasses.field(default_factory=list)
    problems: dict[str, PolybusError] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The pipelines and flows that a user selected; all if none are named.

    `reset` names flows or tables (`NAME` or `PIPELINE.NAME`) that start over: with a new checkpoint
    and, for tables, a new version without rows. `refresh` names the only ones that run.
    """

    pipelines: tuple[str, ...] = ()
    reset: tuple[str, ...] = ()
    refresh: tuple[str, ...] = ()

    @property
    def named(self) -> set[str]:
        return {name.lower() for name in (*self.reset, *self.refresh)}


def prepare(
    spark: Any,
    folder: Path,
    bus: BusLocation,
    chosen: Chosen = Chosen(),
    *,
    check_only: bool = False,
) -> Prepared:
    """Load and analyse the pipelines in `folder`.

    With `check_only` nothing on disk changes.

    Raises:
        UsageError: `pipeline.folder`, `pipeline.duplicate`, or `pipeline.unknown`, for a name in
            `chosen`.
    """
    found = choose(find_pipelines(folder), chosen.pipelines)
    prepared, known, spellings = Prepared(), set[str](), set[str]()
    for name, path in found.items():
        try:
            one = _Preparation(spark, name, path, bus)
            known |= one.flows()
            spellings |= one.prepare(prepared, chosen, check_only=check_only)
        except PolybusError as error:
            prepared.problems[name] = error
        except Exception as error:  # the user's code and Spark may raise any exception
            text = clean_cause(error)
            prepared.problems[name] = PipelineError("pipeline.query", text, file=str(path))
    unknown = chosen.named - spellings
    if unknown and not prepared.problems:
        shown = ", ".join(sorted(known))
        text = f"{', '.join(sorted(unknown))}: no such flow; there are: {shown}"
        raise UsageError("pipeline.unknown", text)
    return prepared


class _Preparation:
    """Prepares one pipeline, in its own session."""

    def __init__(self, spark: Any, name: str, path: Path, bus: BusLocation) -> None:
        session = another_session(spark)
        self._pipeline = load_pipeline(session, name, path, bus)
        for table in pipeline_settings.read(bus.data).tables:
            for output in self._pipeline.outputs:
                if self._pipeline.table_name(output) == table.name.lower():
                    registry = DeclarationRegistry(self._pipeline)
                    registry.register_expectations(output, declared(table))
        self._names = Names(session, self._pipeline, bus)
        self._checkpoints = checkpoints_of(bus.data, name)
        self._prints: dict[str, Fingerprint] = {}

    def flows(self) -> set[str]:
        """The full names of the flows, temporary views included."""
        return {f"{self._pipeline.name}.{name}" for name in self._pipeline.queries}

    def prepare(self, prepared: Prepared, chosen: Chosen, *, check_only: bool) -> set[str]:
        """Add the flows; returns the names by which they can be chosen. Raises PipelineError."""
        analysed = {name: self._analyse(query) for name, query in self._pipeline.queries.items()}
        for output in self._pipeline.outputs.values():
            self._check_schemas(output, analysed)
        changes = Changes(self._names, self._checkpoints, self._prints)
        spellings = {
            query.name: changes.spellings(query)
            for query in self._pipeline.queries.values()
            if writes_rows(self._pipeline.outputs[query.target])
        }
        reset, refresh = ({name.lower() for name in one} for one in (chosen.reset, chosen.refresh))
        every = [self._pipeline.queries[name] for name in spellings]
        # A table starts over with all of its flows, also those that do not run now.
        resets = [query for query in every if changes.is_reset(query, reset)]
        queries = [one for one in every if not refresh or refresh & spellings[one.name]]
        changes.check([query for query in queries if query not in resets])
        if not check_only:
            if not is_connect(self._names.spark):
                bus = self._names.bus
                # The bus lists the flows as consumers; a listener sees one session only.
                data = bus.data if bus.url is None else None
                listener.install(self._names.spark, data=data, url=bus.url, token=bus.token)
            changes.start_over(resets)
            changes.store({query.name for query in [*queries, *resets]})
        prepared.flows += [
            self._flow(query, analysed[query.name], starts_over=query in resets)
            for query in queries
        ]
        return {name for names in spellings.values() for name in names}

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
        self._check_expectations(query, analysed.frame)
        if writes_rows(output) and not is_view:
            self._check_stream(query, analysed.frame)
            shaped = in_schema_of(analysed.frame, output)
            partition_by = getattr(output, "partition_cols", None) or ()
            rule = self._pipeline.rules.get(query.target)
            text = "" if rule is None else str(rule)
            self._prints[query.name] = fingerprint(query, shaped, partition_by, text)
        return analysed

    def _check_expectations(self, query: Query, frame: Any) -> None:
        for one in self._pipeline.expectations(query):
            try:
                frame.where(one.condition).schema  # noqa: B018
            except AnalysisException as error:
                text = f"{query.name}: expectation {one.name!r}: {clean_cause(error)}"
                raise PipelineError("pipeline.query", text, **place_of(query)) from error

    def _check_stream(self, query: Query, frame: Any) -> None:
        """Make Spark run the checks now that it would run when the stream starts."""
        plan = analysed_plan(frame)
        if plan is None:
            return
        try:
            check_streaming_plan(self._names.spark, plan)
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
        refresh = ""
        start: Callable[[FlowContext], Any] = functools.partial(
            start_stream, names=names, query=query, analysed=analysed, starts_over=starts_over
        )
        if isinstance(output, MaterializedView):
            view = ViewFlow(names, query)
            start, repeat_s = view.refresh, VIEW_INTERVAL_S
            refresh = str(view.increment(analysed))
        outputs = f"table:{writes}"
        if not isinstance(output, MaterializedView | StreamingTable):
            topic = output.options.get("topic", "")
            writes = f"{output.format} {topic}".strip()
            outputs = f"topic:{topic.lower()}" if topic else f"sink:{output.format}"
        return PipelineFlow(
            self._pipeline.name,
            query.name,
            start,
            after=self._after(analysed),
            repeat_s=repeat_s,
            reads=tuple(sorted({one.name for one in analysed.inputs})),
            writes=writes,
            inputs=tuple(sorted({self._end(one) for one in analysed.inputs} - {""})),
            outputs=(outputs,),
            refresh=refresh,
        )

    def _end(self, given: Input) -> str:
        """An input of a query with its kind; none for a temporary view: its inputs count."""
        if given.kind != "dataset":
            return f"{given.kind}:{given.name}"
        if not writes_rows(self._pipeline.outputs[given.name]):
            return ""
        return f"table:{self._pipeline.table_name(given.name)}"

    def _after(self, analysed: Analysed) -> tuple[str, ...]:
        """The flows that fill the tables that a query reads as tables, or as streams of these."""
        streamed = {one.name for one in analysed.inputs if one.kind == "table" and one.streaming}
        tables = {
            one.name
            for one in analysed.inputs
            if one.kind == "dataset" and not one.streaming
            if writes_rows(self._pipeline.outputs[one.name])
        }
        tables |= {
            one for one in self._pipeline.outputs if self._pipeline.table_name(one) in streamed
        }
        filling = [one.name for one in self._pipeline.queries.values() if one.target in tables]
        return tuple(sorted(filling))
