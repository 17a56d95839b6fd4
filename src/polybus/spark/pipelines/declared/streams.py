"""Starting the streaming query of a flow into a table or a sink, each batch exactly once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybus.errors import UsageError
from polybus.lake.table import LakeTable
from polybus.spark import tables
from polybus.spark.causes import brief_errors
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.expectations import CheckedRows, Expectation, ExpectationCount, observed
from polybus.spark.internals import Flow as Query
from polybus.spark.internals import Sink, activate_in_thread, is_connect
from polybus.spark.pipelines.declared.cdc import apply_changes
from polybus.spark.pipelines.declared.names import Analysed, Names, in_schema_of
from polybus.spark.pipelines.declared.readers import FORMAT
from polybus.spark.pipelines.flows import FlowContext


def start_stream(
    context: FlowContext, *, names: Names, query: Query, analysed: Analysed, starts_over: bool
) -> Any:
    """Start the streaming query of a flow into a table or a sink.

    `starts_over` says that its checkpoint is new on purpose: a sink may take over its producer.
    """
    name = f"{names.pipeline.name}.{query.name}"
    output, frame = names.pipeline.outputs[query.target], analysed.frame
    context.figures.observed |= analysed.observed
    expected = names.pipeline.expectations(query)
    if expected and isinstance(output, Sink):
        frame = observed(frame, expected, query.name)
        context.figures.observed[query.name] = expected
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
        # Spark Connect sends the function, and what it uses, to the server.
        take = _into_table(names, query, frame, context.checkpoint)
        if not is_connect(names.spark):
            take.counted = context.figures.expected
        writer = writer.foreachBatch(take)
    activate_in_thread(names.spark)
    with names.settings_of(query):
        return writer.start()


def _into_table(names: Names, query: Query, frame: Any, folder: Path) -> "TableBatches":
    table = names.table(query.target)
    output, rule = names.pipeline.outputs[query.target], names.pipeline.rules.get(query.target)
    return TableBatches(
        flow=query.name,
        table=table,
        checkpoint=Checkpoint(folder),
        partition_by=tuple(getattr(output, "partition_cols", None) or ()),
        dimension=None if rule is None else rule.dimension(table, frame.columns),
        expected=names.pipeline.expectations(query),
    )


@dataclass
class TableBatches:
    """The function that stores a batch. `counted` gets the counts of expectations."""

    flow: str
    table: LakeTable
    checkpoint: Checkpoint
    partition_by: tuple[str, ...]
    dimension: Any
    expected: list[Expectation]
    counted: Callable[[list[ExpectationCount]], None] | None = None

    def __call__(self, rows: Any, batch_id: int) -> None:
        # A new checkpoint counts its batches from 0 again: its id distinguishes the two.
        writer = f"{self.flow}:{self.checkpoint.query_id()}"
        with brief_errors():
            try:
                self._store(rows, writer, batch_id)
            except UsageError as error:
                if error.code != "lake.schema":
                    raise
                reason = error.text
                tables.set_aside(rows, self.table, reason=reason, writer=writer, batch_id=batch_id)

    def _store(self, rows: Any, writer: str, batch_id: int) -> None:
        # On a server of Spark Connect the checkpoint cannot be found.
        batch: dict[str, Any] = {"writer": writer, "batch_id": batch_id}
        batch["checkpoint"] = self.checkpoint
        if self.table.has_batch(writer, batch_id):
            return
        checked = CheckedRows(rows, self.expected)
        if self.dimension is not None:
            apply_changes(checked, self.dimension, **batch)
        else:
            tables.append(checked, self.table, partition_by=self.partition_by, **batch)
        if self.counted is not None:
            self.counted(checked.counts())
