"""Turns a pipeline's queries into flows that write lake tables, sinks and views."""

import dataclasses
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pyspark.pipelines.flow import Flow as Query
from pyspark.pipelines.output import Sink

from polybus.errors import PolybusError
from polybus.lake.table import LakeTable, open_table
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.declared.names import Input, Names, in_schema_of
from polybus.spark.pipelines.declared.readers import FORMAT
from polybus.spark.pipelines.flows import FlowContext
from polybus.spark.pipelines.sessions import use_in_thread

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
        table, columns = names.table(query.target), tuple(output.partition_cols or ())
        writer = writer.foreachBatch(Append(query.name, table, context.checkpoint, columns))
    use_in_thread(names.spark)
    with names.settings_of(query):
        return writer.start()


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Appends the batches of a flow to its table. Spark Connect sends it to the server."""

    flow: str
    table: LakeTable
    checkpoint: Path
    partition_by: tuple[str, ...]

    def __call__(self, rows: Any, batch_id: int) -> None:
        from polybus.spark import tables

        tables.append(
            rows,
            self.table,
            # A new checkpoint counts its batches from 0 again: its id tells the two apart.
            writer=f"{self.flow}:{Checkpoint(self.checkpoint).query_id()}",
            batch_id=batch_id,
            partition_by=self.partition_by,
        )


class ViewFlow:
    """A materialized view, which is computed completely when its inputs have changed."""

    def __init__(self, names: Names, query: Query) -> None:
        self._names = names
        self._query = query
        self._seen: dict[Input, Any] | None = None
        self._refreshing = threading.Lock()

    def refresh(self, context: FlowContext) -> None:
        """Replace the table, unless no input has changed since the last time."""
        from polybus.spark import tables

        with self._refreshing:
            if self._seen and self._seen == self._versions(self._seen):
                return
            before = self._seen
            analysed = self._names.analyse(self._query, run=True)
            # Read before the rows: a change in between causes one unnecessary refresh.
            self._seen = self._versions(analysed.inputs)
            output = self._names.pipeline.outputs[self._query.target]
            table = self._names.table(self._query.target)
            use_in_thread(self._names.spark)
            try:
                with self._settings():
                    rows = in_schema_of(analysed.frame, output)
                    count = tables.replace(rows, table, writer=self._query.name)
            except BaseException:
                self._seen = before
                raise
            context.figures.rows = count

    def _settings(self) -> AbstractContextManager[None]:
        """The settings, if there are any: other flows cannot start while the session has them."""
        if self._names.pipeline.conf or self._query.spark_conf:
            return self._names.settings_of(self._query)
        return nullcontext()

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
