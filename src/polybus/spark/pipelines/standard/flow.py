"""The flow `decode`: one streaming query over all topics, which feeds every table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polybus.errors import UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.table import open_table
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.flows import FlowContext
from polybus.spark.pipelines.standard import damage
from polybus.spark.pipelines.standard.batches import BatchesThere
from polybus.spark.session.connect import is_connect

GROUP = "standard"
# All topics of users, and the bus's own report of its deliveries.
PATTERN = r"\$events|[^$].*"
TABLES = ("silver", "quarantine", "traffic", "top_senders", "deliveries", "recent_ids")


class Decode:
    """The flow, which goes on without topics that turn out to be damaged, until it is made anew."""

    def __init__(self) -> None:
        self._damaged: dict[str, str] = {}

    def start(self, context: FlowContext) -> Any:
        """Start the query, from its checkpoint or from the beginning of the log.

        Raises:
            UsageError: `pipeline.checkpoint`, the tables were made by another checkpoint.
        """
        checkpoint_id = identity(context.checkpoint)
        check_tables(context.data, checkpoint_id, context.checkpoint)
        there = BatchesThere(
            context.data,
            writer_name(checkpoint_id),
            context.checkpoint,
            Checkpoint(context.checkpoint).unfinished_batch(),
        )
        if is_connect(context.spark):
            context.figures.cannot_count()
            batches: Any = there
        else:
            batches = there.made(context.figures.scanned)
        stream = context.spark.readStream.format("polybus").options(**self._options(context))
        return (
            stream.load()
            .writeStream.queryName(f"{GROUP}.decode")
            .option("checkpointLocation", str(context.checkpoint))
            .trigger(**context.trigger)
            .foreachBatch(batches)
            .start()
        )

    def recover(self, context: FlowContext, error: BaseException) -> bool:
        """Leave out the topics that are damaged, if that is why the flow failed."""
        if not damage.is_damage(error):
            return False
        checkpoint = context.checkpoint
        found = damage.damaged_topics(self._options(context), checkpoint)
        if not found:
            return False
        if damage.has_any(checkpoint, found):
            writer = writer_name(identity(checkpoint))
            if not damage.forget_batch(context.data, checkpoint, TABLES, writer):
                return False
        self._damaged |= found
        context.figures.warn(damage.warning(self._damaged))
        return True

    def _options(self, context: FlowContext) -> dict[str, str]:
        where = {"data": str(context.data)} if context.url is None else {"url": context.url}
        if context.url is not None and context.token is not None:
            where["token"] = context.token
        rows_max = pipeline_settings.read(context.data).pipeline.batch_rows_max
        return {
            "subscribePattern": PATTERN,
            "startingOffsets": "earliest",
            "groupId": GROUP,
            "maxOffsetsPerTrigger": str(rows_max),
            # A topic that is deleted, or made anew, must not end the pipeline of all others.
            "failOnDataLoss": "false",
            "leaveOut": json.dumps(sorted(self._damaged)),
            **where,
        }


def writer_name(checkpoint_id: str) -> str:
    return f"{GROUP}.decode:{checkpoint_id}"


def identity(checkpoint: Path) -> str:
    """The query id that the checkpoint has; a new one is given to a new checkpoint."""
    try:
        return Checkpoint(checkpoint).create_query_id()
    except ValueError as error:
        raise UsageError("pipeline.checkpoint", f"{error}; {_ADVICE}") from error


_ADVICE = (
    "put the checkpoint back, or remove both the checkpoint and the tables "
    f"{', '.join(TABLES)} to make them anew from the log"
)


def check_tables(data: Path, checkpoint_id: str, checkpoint: Path) -> None:
    """Refuse to go on with tables that another checkpoint filled: all would be in them twice."""
    for name in TABLES:
        writers = open_table(data, name).state.batches
        strange = [
            one
            for one in writers
            if one.startswith(f"{GROUP}.decode:") and one != writer_name(checkpoint_id)
        ]
        if strange:
            text = f"table {name} was filled from another checkpoint than {checkpoint}; {_ADVICE}"
            raise UsageError("pipeline.checkpoint", text)
