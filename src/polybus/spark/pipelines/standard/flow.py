"""The flows of the standard pipeline: `watch`, and `decode`, which feeds every standard table."""

from pathlib import Path
from typing import Any

from polybus.errors import UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.table import open_table
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.flows import FlowContext, PipelineFlow
from polybus.spark.pipelines.standard.batches import StandardBatches
from polybus.spark.pipelines.standard.watch import Watch
from polybus.spark.session.connect import is_connect

GROUP = "standard"
LOOK_EVERY_S = 0.2
# All user topics, and the system topic in which the bus reports deliveries.
PATTERN = r"\$events|[^$].*"
TABLES = ("silver", "quarantine", "traffic", "top_senders", "deliveries", "recent_ids")
_ADVICE = (
    "restore the checkpoint, or remove both the checkpoint and the tables "
    f"{', '.join(TABLES)}: they are then built again from the log"
)


def flows(data: Path) -> list[PipelineFlow]:
    """The flows of the standard pipeline for the bus of a data folder."""
    return [
        # A batch over a file that was damaged after its plan runs again until that is restored.
        PipelineFlow(GROUP, "decode", start_decode, retried=("log.damaged", "log.frozen")),
        PipelineFlow(GROUP, "watch", Watch(data).tick, repeat_s=LOOK_EVERY_S),
    ]


def start_decode(context: FlowContext) -> Any:
    """Start one query over all topics, from its checkpoint or from the beginning of the log.

    Raises:
        UsageError: `pipeline.checkpoint`, the tables were filled from another checkpoint.
    """
    data, checkpoint = context.bus.data, Checkpoint(context.checkpoint)
    writer = writer_of(checkpoint)
    check_tables(data, writer, checkpoint)
    if is_connect(context.spark):
        context.figures.rows = None  # nobody reports how often it reads a batch
    begun = checkpoint.unfinished_batch()
    batches = StandardBatches(data, writer, checkpoint, begun, context.figures.scanned)
    options = {
        "subscribePattern": PATTERN,
        "startingOffsets": "earliest",
        "groupId": GROUP,
        "maxOffsetsPerTrigger": str(pipeline_settings.read(data).pipeline.batch_rows_max),
        # A topic that is deleted, recreated or damaged must not end the pipeline of all others.
        "failOnDataLoss": "false",
        "failOnDamage": "false",
        **context.bus.options(),
    }
    return (
        context.spark.readStream.format("polybus")
        .options(**options)
        .load()
        .writeStream.queryName(f"{GROUP}.decode")
        .option("checkpointLocation", str(context.checkpoint))
        .trigger(**context.trigger)
        .foreachBatch(batches)
        .start()
    )


def writer_of(checkpoint: Checkpoint) -> str:
    """The name under which the tables know the batches: each checkpoint has another."""
    try:
        return f"{GROUP}.decode:{checkpoint.create_query_id()}"
    except ValueError as error:
        raise UsageError("pipeline.checkpoint", f"{error}; {_ADVICE}") from error


def check_tables(data: Path, writer: str, checkpoint: Checkpoint) -> None:
    """Refuse tables that another checkpoint filled: they would get every message twice."""
    for name in TABLES:
        writers = open_table(data, name).state.batches
        if any(one.startswith(f"{GROUP}.decode:") and one != writer for one in writers):
            text = f"table {name} was filled from another checkpoint than {checkpoint.path}"
            raise UsageError("pipeline.checkpoint", f"{text}; {_ADVICE}")
