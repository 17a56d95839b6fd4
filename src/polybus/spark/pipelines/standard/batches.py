"""The standard flows: `watch`, and `decode`, one query over all topics that feeds every table.

`decode` adds each micro-batch to every table exactly once. The order of writes for batch N, whose
plan is synced first:

    standard-settings.json (if the settings changed) → standard-aside.json (if decoding raised)
    → silver → quarantine → recent_ids → traffic → top_senders → deliveries

Spark runs a batch again after a failure, with the same messages, and it then passes through the
same order. Every table stores the last batch of its writer in the same commit as the rows and
ignores a batch that it has, so any prefix of the order is completed and nothing is added twice.
The writer's name contains the id of the checkpoint: a new checkpoint, which counts batches from 0
again, is another writer.

If a topic's schema changes between two runs of a batch, a message that the first run put into
silver must not go to quarantine in the second. So new settings are stored before the first batch
that uses them, and a batch that an earlier process began gets the stored ones. The source cuts
values over a limit that is fixed when the query starts (`cut_over`), so the stored limit of values
is never larger.

The cost of a batch is mostly its number of Spark jobs, so most batches have one: it decodes the
messages and writes them as files of silver that are not yet part of the table. Only if these have
fewer rows than the plan, the missing messages go to quarantine in a second job. Duplicates and
figures are computed from the files by Arrow.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from polybus.errors import UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.files import FileNote, new_path, note_of, write_file
from polybus.lake.settings import PipelineSettings
from polybus.lake.table import LakeTable, open_table
from polybus.log.disk import replace_file
from polybus.spark.causes import brief_errors
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.flows import FlowContext, PipelineFlow
from polybus.spark.pipelines.standard import aside, decode, gold
from polybus.spark.pipelines.standard.aside import SetAside
from polybus.spark.pipelines.standard.watch import Watch
from polybus.spark.session.connect import is_connect
from polybus.spark.source.options import COLUMNS, VALUE_BYTES, VALUE_BYTES_MAX
from polybus.spark.tables import commit_staged, stage

GROUP = "standard"
LOOK_EVERY_S = 0.2
# All user topics, and the system topic in which the bus reports deliveries.
PATTERN = r"\$events|[^$].*"
TABLES = ("silver", "quarantine", "traffic", "top_senders", "deliveries", "recent_ids")
_ADVICE = (
    "restore the checkpoint, or remove both the checkpoint and the tables "
    f"{', '.join(TABLES)}: they are then built again from the log"
)
_DAMAGED_ADVICE = (
    "the batch was planned before the damage, and all topics wait for it: restore the file from a "
    "backup, or delete the topic, and the pipeline continues by itself"
)
EVENTS = "$events"
SETTINGS_FILE = "standard-settings.json"
SMALL_ROWS = 20_000
"""A smaller batch is one task, and one file."""
FACT_COLUMNS = ["topic", "epoch", "offset", "timestamp", "protocol", "sender"]


@dataclass(frozen=True)
class PlannedRows:
    """The number of messages and events in a batch; None if the checkpoint does not tell."""

    messages: int | None = None
    events: int | None = None


def planned_rows(checkpoint: Checkpoint, batch_id: int) -> PlannedRows:
    """The rows of a batch; unknown for the first batch, and if a topic is new or was recreated."""
    start, end = checkpoint.planned_end(batch_id - 1), checkpoint.planned_end(batch_id)
    if start is None or end is None:
        return PlannedRows()
    rows = {}
    for topic, position in end.topics.items():
        before = start.topics.get(topic)
        if before is None or before.epoch != position.epoch or before.offset > position.offset:
            return PlannedRows()
        rows[topic] = position.offset - before.offset
    events = rows.pop(EVENTS, 0)
    return PlannedRows(sum(rows.values()), events)


class StandardBatches:
    """The function for `foreachBatch`. One object lives as long as its query.

    Args:
        begun: the batch that an earlier process began and did not finish, if there is one.
        cut_over: the source cuts larger values.
        scanned: called with the id of each batch and how often it was read.
    """

    def __init__(
        self,
        data: Path,
        writer: str,
        checkpoint: Checkpoint | None = None,
        begun: int | None = None,
        cut_over: int = VALUE_BYTES_MAX,
        scanned: Callable[[int, int], None] = lambda batch_id, times: None,
    ) -> None:
        self._arguments = (data, writer, checkpoint, begun, cut_over)
        self._scanned = scanned
        self._settings = _stored_settings(data)
        self._decoded: tuple[PipelineSettings, list[str]] | None = None
        self._silver = open_table(data, "silver")
        self._quarantine = open_table(data, "quarantine")
        self._traffic = gold.traffic_table(data)
        self._senders = gold.senders_table(data)
        self._deliveries = gold.deliveries_table(data)
        self._ids = gold.RecentIds(data, writer)

    def __reduce__(self) -> tuple[Any, ...]:
        """Spark Connect sends it to the server, which creates its own there."""
        return StandardBatches, self._arguments

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        with brief_errors():
            self._add(frame, batch_id)

    def _add(self, frame: DataFrame, batch_id: int) -> None:
        _, writer, checkpoint, _, _ = self._arguments
        plan = PlannedRows() if checkpoint is None else _synced_plan(checkpoint, batch_id)
        settings = self._settings_of(batch_id)
        if plan.messages is not None and plan.messages + (plan.events or 0) < SMALL_ROWS:
            frame = frame.coalesce(1)
        scans = 0
        if plan.messages != 0:
            scans += self._add_messages(frame, batch_id, plan, settings)
        if plan.events != 0 and settings.pipeline.deliveries:
            events = gold.events_of(frame.where(f"topic = '{EVENTS}'"))
            self._deliveries.add(gold.deliveries_of(events), writer=writer, batch_id=batch_id)
            scans += 1
        self._scanned(batch_id, scans)

    def _settings_of(self, batch_id: int) -> PipelineSettings:
        """Those of the bus's settings file, unless an earlier process began the batch.

        Raises:
            StorageError: `pipeline.settings`, the bus's settings file cannot be read.
        """
        data, _, _, begun, cut_over = self._arguments
        if self._settings is not None and batch_id == begun:
            return _with_limit(self._settings, cut_over)
        newest = _with_limit(pipeline_settings.read(data), cut_over)
        if newest != self._settings:
            path = data / "pipeline" / SETTINGS_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, msgspec.json.encode(newest))
            self._settings = newest
        return newest

    def _add_messages(
        self, frame: DataFrame, batch_id: int, plan: PlannedRows, settings: PipelineSettings
    ) -> int:
        """Decode, store and count; returns how often this read the batch."""
        if self._decoded is None or self._decoded[0] != settings:
            self._decoded = settings, decode.columns(settings)
        raw = frame.where(f"topic <> '{EVENTS}'")
        limit = settings.pipeline.value_bytes_max
        good, bad, kept = self._stage(raw, batch_id, limit)
        facts = read_facts(self._silver, good, "bytes", "late", "message_id")
        has_id = pc.is_valid(facts["message_id"])
        is_duplicate = np.zeros(facts.num_rows, dtype=bool)
        with_id, watermark_s = facts.filter(has_id), settings.pipeline.watermark_s
        if with_id.num_rows:
            ids = self._ids.of(with_id)
            flags = self._ids.duplicates(ids, batch_id, watermark_s=watermark_s)
            is_duplicate[np.flatnonzero(has_id)] = flags
        unique = without(self._silver, good, is_duplicate)
        writer = self._arguments[1]
        commit_staged(self._silver, unique, writer=writer, batch_id=batch_id)
        parts = [gold.facts_of(facts, duplicate=is_duplicate)]
        if plan.messages is None or plan.messages > facts.num_rows:
            parts.append(self._add_quarantined(kept, bad, batch_id, limit))
        if with_id.num_rows:
            ids_max = settings.pipeline.ids_max
            self._ids.remember(ids, batch_id, watermark_s=watermark_s, ids_max=ids_max)
        if settings.pipeline.gold:
            counted = pa.concat_tables(parts)
            traffic = gold.traffic_of(counted, batch_id)
            self._traffic.add(traffic, writer=writer, batch_id=batch_id)
            self._senders.add(gold.senders_of(counted), writer=writer, batch_id=batch_id)
        return len(parts)

    def _decode(self, raw: DataFrame) -> DataFrame:
        assert self._decoded is not None
        return raw.selectExpr("*", *self._decoded[1])

    def _stage(
        self, raw: DataFrame, batch_id: int, limit: int
    ) -> tuple[list[FileNote], list[FileNote], DataFrame]:
        """Write messages to files of silver, and those that make it raise to files of quarantine.

        Returns both, and all messages but those that raise.
        """
        data, writer = self._arguments[:2]

        def stage_good(part: DataFrame) -> list[FileNote]:
            decoded = self._decode(part).where("reason IS NULL").selectExpr(*decode.SILVER)
            return stage(decoded, self._silver, (), json=("payload",))

        left_out = aside.stored(data, writer, batch_id)
        if not left_out.ranges:
            try:
                return stage_good(raw), [], raw
            except Exception as error:
                # What the batch has put into silver stays there, so that it can no longer change.
                has_batch = self._silver.last_batch(writer) == batch_id
                if has_batch or aside.is_of_surroundings(error):
                    raise
            good, found = aside.stage_apart(raw, stage_good)
            left_out = SetAside(writer, batch_id, found)
        else:
            good = stage_good(raw.where(f"NOT ({left_out.condition})"))
        if not left_out.ranges:
            return good, [], raw
        unread = raw.where(left_out.condition)
        unread = unread.selectExpr("*", decode.BYTES, f"{left_out.reason} AS reason")
        bad = stage(unread.selectExpr(*decode.quarantined(limit)), self._quarantine, ())
        left_out.save(data)
        return good, bad, raw.where(f"NOT ({left_out.condition})")

    def _add_quarantined(
        self, raw: DataFrame, notes: list[FileNote], batch_id: int, limit: int
    ) -> pa.Table:
        """Store messages that cannot be decoded in quarantine; returns their facts."""
        bad = self._decode(raw).where("reason IS NOT NULL")
        bad = bad.selectExpr(*decode.quarantined(limit))
        notes = [*notes, *stage(bad, self._quarantine, ())]
        facts = read_facts(self._quarantine, notes, "bytes")
        commit_staged(self._quarantine, notes, writer=self._arguments[1], batch_id=batch_id)
        return gold.facts_of(facts, quarantined=True)


def _stored_settings(data: Path) -> PipelineSettings | None:
    try:
        stored = (data / "pipeline" / SETTINGS_FILE).read_bytes()
        return msgspec.json.decode(stored, type=PipelineSettings)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _with_limit(settings: PipelineSettings, cut_over: int) -> PipelineSettings:
    limit = min(settings.pipeline.value_bytes_max, cut_over)
    pipeline = msgspec.structs.replace(settings.pipeline, value_bytes_max=limit)
    return msgspec.structs.replace(settings, pipeline=pipeline)


def cut_limit(data: Path, begun: int | None) -> int:
    """The size over which the source cuts values: no batch of the query decodes a larger one."""
    limit = pipeline_settings.read(data).pipeline.value_bytes_max
    stored = _stored_settings(data)
    if begun is not None and stored is not None:
        limit = max(limit, stored.pipeline.value_bytes_max)
    return min(limit, VALUE_BYTES_MAX)


def _synced_plan(checkpoint: Checkpoint, batch_id: int) -> PlannedRows:
    checkpoint.sync_batch(batch_id)
    return planned_rows(checkpoint, batch_id)


def read_facts(table: LakeTable, notes: Sequence[FileNote], *more: str) -> pa.Table:
    """FACT_COLUMNS and more of files that are not yet part of the table."""
    columns = [*FACT_COLUMNS, *more]
    found = [pq.read_table(table.path / note.file.path, columns=columns) for note in notes]
    return pa.concat_tables(found)


def without(
    table: LakeTable, notes: Sequence[FileNote], is_duplicate: npt.NDArray[np.bool_]
) -> list[FileNote]:
    """Write the files again without duplicates; the flags are those of all files in order."""
    kept = []
    first = 0
    for note in notes:
        flags = is_duplicate[first : first + note.file.rows]
        first += note.file.rows
        if flags.any():
            old, path = table.path / note.file.path, new_path()
            schema = pq.read_schema(old)
            write_file(table.path / path, schema, _filtered(old, schema, ~flags))
            old.unlink()
            note = note_of(table.path, path, note.fields)
        kept.append(note)
    return kept


def _filtered(
    path: Path, schema: pa.Schema, keep: npt.NDArray[np.bool_]
) -> Iterator[pa.RecordBatch]:
    first = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            mask = pa.array(keep[first : first + batch.num_rows])
            first += batch.num_rows
            yield pa.RecordBatch.from_arrays(batch.filter(mask).columns, schema=schema)


def flows(data: Path) -> list[PipelineFlow]:
    """The flows of the standard pipeline for the bus of a data folder."""
    return [
        PipelineFlow(
            GROUP,
            "decode",
            start_decode,
            # A batch over a file that was damaged after its plan runs again until that is restored.
            retried=("log.damaged", "log.frozen"),
            retried_advice=_DAMAGED_ADVICE,
        ),
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
    cut_over = cut_limit(data, begun)
    batches = StandardBatches(data, writer, checkpoint, begun, cut_over, context.figures.scanned)
    options = {
        "subscribePattern": PATTERN,
        "startingOffsets": "earliest",
        "groupId": GROUP,
        "maxOffsetsPerTrigger": str(pipeline_settings.read(data).pipeline.batch_rows_max),
        # A topic that is deleted, recreated or damaged must not end the pipeline of all others.
        "failOnDataLoss": "false",
        "failOnDamage": "false",
        "failOnLargeValue": "false",
        "maxValueBytes": str(cut_over),
        "columns": ",".join((*COLUMNS, VALUE_BYTES)),
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
        writers = open_table(data, name).writers()
        if any(one.startswith(f"{GROUP}.decode:") and one != writer for one in writers):
            text = f"table {name} was filled from another checkpoint than {checkpoint.path}"
            raise UsageError("pipeline.checkpoint", f"{text}; {_ADVICE}")
