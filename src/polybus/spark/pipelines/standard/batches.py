"""One micro-batch of the standard pipeline: decode, then add to every table, exactly once.

Spark may run a batch again after a failure, with the same messages. Every table remembers the last
batch of its writer and takes none twice; the order of the tables does not matter. The writer's name
has the id of the checkpoint in it, so that another count of batches is never taken for this one.

What a batch costs is mostly the number of Spark jobs, so most batches have one: it decodes the
messages and writes them as files of silver, not yet part of the table. What those files lack of the
messages that were planned is for quarantine, and only then there is a second job. Duplicates and
figures are found in the files themselves, with Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from polybus.errors import StorageError
from polybus.lake.compact import tidy
from polybus.lake.files import FileNote, new_path, note_of, write_file
from polybus.lake.settings import PipelineSettings
from polybus.lake.table import LakeTable, open_table
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.standard import gold
from polybus.spark.pipelines.standard.batch_settings import BatchSettings
from polybus.spark.pipelines.standard.decode import QUARANTINE_COLUMNS, SILVER_COLUMNS, Decoder
from polybus.spark.pipelines.standard.deliveries import (
    deliveries_of,
    deliveries_table,
    events_of,
)
from polybus.spark.pipelines.standard.duplicates import RecentIds
from polybus.spark.tables import stage

EVENTS = "$events"
SMALL_ROWS = 20_000
"""A batch of fewer messages is one task, and one file."""
FACT_COLUMNS = ["topic", "epoch", "offset", "timestamp", "protocol", "sender"]


@dataclass(frozen=True)
class PlannedRows:
    """How many messages and events a batch has; None where the checkpoint cannot tell."""

    messages: int | None = None
    events: int | None = None

    def is_below(self, rows: int) -> bool:
        return self.messages is not None and self.messages + (self.events or 0) < rows


def planned_rows(checkpoint: Checkpoint, batch_id: int) -> PlannedRows:
    """What a batch has; unknown for the first batch, and if a topic is new or was recreated."""
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
    """What `foreachBatch` calls. One object lives as long as its query.

    `scanned` is told how often a batch was read.
    """

    def __init__(
        self,
        data: Path,
        writer: str,
        settings: BatchSettings,
        *,
        checkpoint: Checkpoint | None = None,
        scanned: Callable[[int, int], None] | None = None,
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._checkpoint = checkpoint
        self._scanned = scanned
        self._decoder = Decoder(PipelineSettings())
        self._silver = open_table(data, "silver")
        self._quarantine = open_table(data, "quarantine")
        self._traffic = gold.traffic_table(data)
        self._senders = gold.senders_table(data)
        self._deliveries = deliveries_table(data)
        self._ids = RecentIds(data, writer)

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        plan = PlannedRows()
        if self._checkpoint is not None:
            self._sync_plan(self._checkpoint, batch_id)
            plan = planned_rows(self._checkpoint, batch_id)
        settings = self._settings.of(batch_id)
        if settings != self._decoder.settings:
            self._decoder = Decoder(settings)
        if plan.is_below(SMALL_ROWS):
            frame = frame.coalesce(1)
        scans = 0
        if plan.messages != 0:
            scans += self._take_messages(frame, batch_id, plan)
        if plan.events != 0 and settings.pipeline.deliveries:
            events = events_of(frame.where(f"topic = '{EVENTS}'"))
            rows = deliveries_of(events)
            self._deliveries.add(rows, writer=self._writer, batch_id=batch_id)
            scans += 1
        if self._scanned is not None:
            self._scanned(batch_id, scans)

    @staticmethod
    def _sync_plan(checkpoint: Checkpoint, batch_id: int) -> None:
        try:
            checkpoint.sync_batch(batch_id)
        except OSError as error:
            text = f"cannot sync the plan of batch {batch_id} in {checkpoint.path}: {error}"
            raise StorageError("pipeline.storage", text) from error

    def _take_messages(self, frame: DataFrame, batch_id: int, plan: PlannedRows) -> int:
        """Decode, keep and count; how often the batch was read for it."""
        settings = self._decoder.settings.pipeline
        messages = self._decoder(frame.where(f"topic <> '{EVENTS}'"))
        good = stage(messages.where("reason IS NULL").select(*SILVER_COLUMNS), self._silver, ())
        facts = read_facts(self._silver, good, [*FACT_COLUMNS, "bytes", "late", "message_id"])
        is_duplicate = np.zeros(facts.num_rows, dtype=bool)
        with_id = facts.filter(pc.is_valid(facts["message_id"]))
        if with_id.num_rows:
            ids = self._ids.of(with_id)
            flags = self._ids.duplicates(ids, batch_id, watermark_s=settings.watermark_s)
            is_duplicate[np.flatnonzero(pc.is_valid(facts["message_id"]))] = flags
        kept = without(self._silver, good, is_duplicate) if is_duplicate.any() else good
        commit(self._silver, kept, self._writer, batch_id)
        parts = [gold.facts_of(facts, duplicate=is_duplicate)]
        if plan.messages is None or plan.messages > facts.num_rows:
            parts.append(self._take_bad(messages, batch_id))
        if with_id.num_rows:
            self._ids.remember(
                ids, batch_id, watermark_s=settings.watermark_s, ids_max=settings.ids_max
            )
        if settings.gold:
            self._count(pa.concat_tables(parts), batch_id)
        return len(parts)

    def _take_bad(self, messages: DataFrame, batch_id: int) -> pa.Table:
        """Put what cannot be decoded into quarantine; its figures."""
        bad = messages.where("reason IS NOT NULL").selectExpr(
            *QUARANTINE_COLUMNS, "CURRENT_TIMESTAMP() AS quarantined_at"
        )
        notes = stage(bad, self._quarantine, ())
        facts = read_facts(self._quarantine, notes, [*FACT_COLUMNS, "value"])
        commit(self._quarantine, notes, self._writer, batch_id)
        size = pc.fill_null(pc.binary_length(facts["value"]), 0)
        facts = facts.drop_columns(["value"]).append_column("bytes", size)
        return gold.facts_of(facts, quarantined=True)

    def _count(self, facts: pa.Table, batch_id: int) -> None:
        traffic = gold.traffic_of(facts, batch_id)
        self._traffic.add(traffic, writer=self._writer, batch_id=batch_id)
        self._senders.add(gold.senders_of(facts), writer=self._writer, batch_id=batch_id)


@dataclass(frozen=True)
class BatchesThere:
    """StandardBatches that are made where they run: Spark Connect sends them to the server.

    `begun` is the batch that an earlier run began and did not finish.
    """

    data: Path
    writer: str
    checkpoint: Path
    begun: int | None

    def made(self, scanned: Callable[[int, int], None] | None = None) -> StandardBatches:
        settings = BatchSettings(self.data, begun=self.begun)
        return StandardBatches(
            self.data,
            self.writer,
            settings,
            checkpoint=Checkpoint(self.checkpoint),
            scanned=scanned,
        )

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        if self not in _there:
            _there.clear()
            _there[self] = self.made()
        _there[self](frame, batch_id)


_there: dict[BatchesThere, StandardBatches] = {}


def read_facts(table: LakeTable, notes: Sequence[FileNote], columns: list[str]) -> pa.Table:
    """Some columns of files that are not yet part of the table."""
    found = [pq.read_table(table.path / note.file.path, columns=columns) for note in notes]
    return pa.concat_tables(found)


def commit(table: LakeTable, notes: Sequence[FileNote], writer: str, batch_id: int) -> None:
    """Make files part of the table, or remove them if the batch is in it already."""
    full = [note for note in notes if note.file.rows or not table.exists]
    if not table.commit(full, writer=writer, batch_id=batch_id):
        full = []
    for note in notes:
        if note not in full:
            (table.path / note.file.path).unlink(missing_ok=True)
    tidy(table)


def without(
    table: LakeTable, notes: Sequence[FileNote], is_duplicate: npt.NDArray[np.bool_]
) -> list[FileNote]:
    """The files written again but for some rows; the flags are those of all files together."""
    made = []
    first = 0
    for note in notes:
        flags = is_duplicate[first : first + note.file.rows]
        first += note.file.rows
        if not flags.any():
            made.append(note)
            continue
        old = table.path / note.file.path
        path = new_path()
        write_file(table.path / path, note.schema, _kept(old, note.schema, ~flags))
        old.unlink()
        made.append(note_of(table.path, path))
    return made


def _kept(path: Path, schema: pa.Schema, keep: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
    first = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            mask = pa.array(keep[first : first + batch.num_rows])
            first += batch.num_rows
            yield pa.RecordBatch.from_arrays(batch.filter(mask).columns, schema=schema)
