"""One micro-batch of the standard pipeline: decode it, then add it to every table exactly once.

The order of writes for batch N, whose plan is synced first:

    standard-settings.json (if the settings changed) → silver → quarantine → recent_ids → traffic
    → top_senders → deliveries

Spark runs a batch again after a failure, with the same messages, and it then passes through the
same order. Every table stores the last batch of its writer in the same commit as the rows and
ignores a batch that it has, so any prefix of the order is completed and nothing is added twice.
The writer's name contains the id of the checkpoint: a new checkpoint, which counts batches from 0
again, is another writer.

If a topic's schema changes between two runs of a batch, a message that the first run put into
silver must not go to quarantine in the second. So new settings are stored before the first batch
that uses them, and a batch that an earlier process began gets the stored ones.

The cost of a batch is mostly its number of Spark jobs, so most batches have one: it decodes the
messages and writes them as files of silver that are not yet part of the table. Only if these have
fewer rows than the plan, the missing messages go to quarantine in a second job. Duplicates and
figures are computed from the files by Arrow.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from polybus.errors import StorageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.compact import tidy
from polybus.lake.files import FileNote, new_path, note_of, write_file
from polybus.lake.settings import PipelineSettings
from polybus.lake.table import LakeTable, open_table
from polybus.log.disk import replace_file
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.standard import gold
from polybus.spark.pipelines.standard.decode import QUARANTINE_COLUMNS, SILVER_COLUMNS, Decoder
from polybus.spark.pipelines.standard.deliveries import (
    deliveries_of,
    deliveries_table,
    events_of,
)
from polybus.spark.pipelines.standard.duplicates import RecentIds
from polybus.spark.tables import stage

EVENTS = "$events"
SETTINGS_FILE = "standard-settings.json"
SMALL_ROWS = 20_000
"""A smaller batch is one task, and one file."""
FACT_COLUMNS = ["topic", "epoch", "offset", "timestamp", "protocol", "sender"]
Scanned = Callable[[int, int], None]


class BatchSettings:
    """The settings of each batch: those of the bus's settings file, read before each batch.

    Args:
        begun: the batch that an earlier process began and did not finish, if there is one.
    """

    def __init__(self, data: Path, begun: int | None) -> None:
        self._data = data
        self._path = data / "pipeline" / SETTINGS_FILE
        self._begun = begun
        self._stored: PipelineSettings | None = None
        try:
            self._stored = msgspec.json.decode(self._path.read_bytes(), type=PipelineSettings)
        except (FileNotFoundError, msgspec.DecodeError):
            pass

    def of(self, batch_id: int) -> PipelineSettings:
        """The settings of a batch.

        Raises:
            StorageError: `pipeline.settings`, the bus's settings file cannot be read.
        """
        if self._stored is not None and batch_id == self._begun:
            return self._stored
        newest = pipeline_settings.read(self._data)
        if newest != self._stored:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(newest))
            self._stored = newest
        return newest


@dataclass(frozen=True)
class PlannedRows:
    """The number of messages and events in a batch; None if the checkpoint does not tell."""

    messages: int | None = None
    events: int | None = None

    def is_below(self, rows: int) -> bool:
        return self.messages is not None and self.messages + (self.events or 0) < rows


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

    `scanned` is called with the id of each batch and how often it was read.
    """

    def __init__(
        self,
        data: Path,
        writer: str,
        *,
        checkpoint: Checkpoint | None = None,
        begun: int | None = None,
        scanned: Scanned | None = None,
    ) -> None:
        self._writer = writer
        self._settings = BatchSettings(data, begun)
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
        plan = PlannedRows() if self._checkpoint is None else self._plan(self._checkpoint, batch_id)
        settings = self._settings.of(batch_id)
        if settings != self._decoder.settings:
            self._decoder = Decoder(settings)
        if plan.is_below(SMALL_ROWS):
            frame = frame.coalesce(1)
        scans = 0
        if plan.messages != 0:
            scans += self._add_messages(frame, batch_id, plan)
        if plan.events != 0 and settings.pipeline.deliveries:
            events = events_of(frame.where(f"topic = '{EVENTS}'"))
            self._deliveries.add(deliveries_of(events), writer=self._writer, batch_id=batch_id)
            scans += 1
        if self._scanned is not None:
            self._scanned(batch_id, scans)

    @staticmethod
    def _plan(checkpoint: Checkpoint, batch_id: int) -> PlannedRows:
        try:
            checkpoint.sync_batch(batch_id)
        except OSError as error:
            text = f"cannot sync the plan of batch {batch_id} in {checkpoint.path}: {error}"
            raise StorageError("pipeline.storage", text) from error
        return planned_rows(checkpoint, batch_id)

    def _add_messages(self, frame: DataFrame, batch_id: int, plan: PlannedRows) -> int:
        """Decode, store and count; returns how often this read the batch."""
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
            parts.append(self._add_quarantined(messages, batch_id))
        if with_id.num_rows:
            self._ids.remember(
                ids, batch_id, watermark_s=settings.watermark_s, ids_max=settings.ids_max
            )
        if settings.gold:
            counted, writer = pa.concat_tables(parts), self._writer
            traffic = gold.traffic_of(counted, batch_id)
            self._traffic.add(traffic, writer=writer, batch_id=batch_id)
            self._senders.add(gold.senders_of(counted), writer=writer, batch_id=batch_id)
        return len(parts)

    def _add_quarantined(self, messages: DataFrame, batch_id: int) -> pa.Table:
        """Store messages that cannot be decoded in quarantine; returns their facts."""
        bad = messages.where("reason IS NOT NULL").selectExpr(
            *QUARANTINE_COLUMNS, "CURRENT_TIMESTAMP() AS quarantined_at"
        )
        notes = stage(bad, self._quarantine, ())
        facts = read_facts(self._quarantine, notes, [*FACT_COLUMNS, "value"])
        commit(self._quarantine, notes, self._writer, batch_id)
        size = pc.fill_null(pc.binary_length(facts["value"]), 0)
        facts = facts.drop_columns(["value"]).append_column("bytes", size)
        return gold.facts_of(facts, quarantined=True)


@dataclass(frozen=True)
class RemoteBatches:
    """Describes StandardBatches: Spark Connect sends it to the server, which creates them there."""

    data: Path
    writer: str
    checkpoint: Checkpoint
    begun: int | None

    def local(self, scanned: Scanned | None = None) -> StandardBatches:
        """Create them in this process."""
        return StandardBatches(
            self.data, self.writer, checkpoint=self.checkpoint, begun=self.begun, scanned=scanned
        )

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        _created(self)(frame, batch_id)


@functools.lru_cache(maxsize=1)
def _created(batches: RemoteBatches) -> StandardBatches:
    return batches.local()


def read_facts(table: LakeTable, notes: Sequence[FileNote], columns: list[str]) -> pa.Table:
    """Some columns of files that are not yet part of the table."""
    found = [pq.read_table(table.path / note.file.path, columns=columns) for note in notes]
    return pa.concat_tables(found)


def commit(table: LakeTable, notes: Sequence[FileNote], writer: str, batch_id: int) -> None:
    """Make files part of the table, or remove them if the table has the batch already."""
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
    """Write the files again without duplicates; the flags are those of all files in order."""
    kept = []
    first = 0
    for note in notes:
        flags = is_duplicate[first : first + note.file.rows]
        first += note.file.rows
        if not flags.any():
            kept.append(note)
            continue
        old = table.path / note.file.path
        path = new_path()
        write_file(table.path / path, note.schema, _filtered(old, note.schema, ~flags))
        old.unlink()
        kept.append(note_of(table.path, path))
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
