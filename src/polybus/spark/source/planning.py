"""Partitions: how many tasks a batch has, which task reads what, and how.

The ranges of all topics are laid end to end and cut into parts of about the same size, so that a
thousand small topics do not become a thousand tasks, and all cores read one large topic. A history
file is cut between row groups if one ends nearby: a task that begins inside of a row group decodes
all rows before its own.

A task reads its ranges as record batches of exactly Spark's schema. Nothing is done row by row.
Columns with one value for a whole topic are repeated, not read.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from polybus import references
from polybus.errors import UsageError
from polybus.log.reading.pieces import Piece, ReadPlan
from polybus.spark import origin
from polybus.spark.source.options import (
    CONSTANT,
    CUT_BYTES,
    PARTITION,
    REFERENCE,
    VALUE_BYTES,
    SourceOptions,
    arrow_schema,
)
from polybus.spark.source.positions import DataLoss

_REFERENCE_FIELDS = ("id", "size", "sha256", "type")
ROWS_MIN = 20_000
"""Fewer rows are not worth a separate task."""
ROWS_MAX = 2_000_000
BYTES_MAX = 128 << 20
"""These bound what a task reads, so that a failed task costs little."""


@dataclass(frozen=True)
class LogPartition(InputPartition):
    """What one task reads."""

    plans: tuple[ReadPlan, ...]


def partitions(
    plans: Sequence[ReadPlan],
    count_min: int | None = None,
    rows_max: int | None = None,
    *,
    cores: int | None = None,
) -> list[LogPartition]:
    """Split the plans: at least `count_min` tasks of at least one row, each up to `rows_max`."""
    rows = sum(piece.rows for plan in plans for piece in plan.pieces)
    size = sum(piece.bytes for plan in plans for piece in plan.pieces)
    if not rows:
        return []
    count = task_count(rows, size, count_min, cores=cores)
    per_task = max(1, -(-rows // count)) if count_min is None else max(1, rows // count)
    exact = count_min is not None or rows_max is not None
    if rows_max is not None:
        per_task = min(per_task, rows_max)
    parts = _parts(plans, per_task, snap=0 if exact else per_task // 3)
    return [LogPartition(tuple(part)) for part in parts]


def task_count(
    rows: int, size: int, count_min: int | None = None, *, cores: int | None = None
) -> int:
    """How many tasks read this many rows and bytes."""
    if cores is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    count = max(
        min(cores, rows // ROWS_MIN),
        -(-rows // ROWS_MAX),
        -(-size // BYTES_MAX),
        count_min or 1,
    )
    # A last round of tasks that leaves cores idle takes as long as a full one.
    return -(-count // cores) * cores if count > cores and count_min is None else count


def _parts(plans: Sequence[ReadPlan], rows: int, snap: int) -> Iterator[list[ReadPlan]]:
    """Parts of `rows` rows; a cut may move by `snap` rows to the end of a row group."""
    part: list[ReadPlan] = []
    room = rows
    for plan in plans:
        pieces: list[Piece] = []
        for piece in plan.pieces:
            rest = piece
            while rest.rows:
                at = _cut_at(rest, room, snap)
                pieces.append(rest.cut(rest.first, at))
                room -= at - rest.first
                rest = rest.cut(at, rest.stop)
                if rest.rows or room <= 0:
                    yield [*part, _plan_of(plan, pieces)]
                    part, pieces, room = [], [], rows
        if pieces:
            part.append(_plan_of(plan, pieces))
    if part:
        yield part


def _plan_of(plan: ReadPlan, pieces: list[Piece]) -> ReadPlan:
    return replace(plan, start=pieces[0].first, stop=pieces[-1].stop, pieces=tuple(pieces))


def _cut_at(piece: Piece, room: int, snap: int) -> int:
    at = piece.first + room
    if piece.stop <= at + snap:
        return piece.stop
    if snap and piece.file is not None:
        near = min(piece.row_group_starts(), key=lambda start: abs(start - at), default=at)
        if near > piece.first and abs(near - at) <= snap:
            return near
    return at


def read_partition(partition: Any, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """The rows of a partition.

    Raises:
        UsageError: `spark.data-loss`; `spark.value-too-large`, naming topic and offset.
        StorageError: `log.damaged`, naming file, topic and offsets.
    """
    if not isinstance(partition, LogPartition):
        return  # Spark's own, when there is nothing to read.
    log = origin.open_origin(options.location)
    loss = DataLoss(fail=options.fail_on_data_loss)
    schema = arrow_schema(options.columns)
    unread = (*CONSTANT, VALUE_BYTES, REFERENCE, *(() if options.headers else ("headers",)))
    stored = [name for name in options.columns if name not in unread]
    if {VALUE_BYTES, REFERENCE} & set(options.columns) and "value" not in stored:
        stored.append("value")
    if REFERENCE in options.columns and "headers" not in stored:
        stored.append("headers")
    if "offset" not in stored and ("value" in stored or not stored):
        stored.append("offset")  # For errors about values, or because no other column is read.
    for plan in partition.plans:
        for rows in log.read_plan(
            plan,
            columns=stored,
            rows_max=origin.ROWS_MAX,
            bytes_max=origin.BATCH_BYTES_MAX,
            lost=lambda error: loss.report(error.text),
        ):
            if REFERENCE in options.columns:
                rows = _with_references(rows, schema.field(REFERENCE).type)
            rows = _bounded(rows, plan, options)
            arrays = [_column(field.name, rows, plan, field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, rows: pa.RecordBatch, plan: ReadPlan, kind: pa.DataType) -> pa.Array:
    """A column of a record batch: read from the log, repeated, or null."""
    constants = {"topic": plan.topic, "partition": PARTITION, "epoch": plan.epoch}
    if name not in constants and name in rows.schema.names:
        return rows.column(name)
    return pa.repeat(pa.scalar(constants.get(name), kind), rows.num_rows)


def _with_references(rows: pa.RecordBatch, kind: pa.DataType) -> pa.RecordBatch:
    """Add the references of messages that have one: few, so one by one."""
    found: list[dict[str, Any] | None] = [None] * rows.num_rows
    headers = rows.column("headers")
    if headers.null_count < len(headers):
        for row, entries in enumerate(headers.to_pylist()):
            if entries and references.marked(dict(entries)):
                one = references.parse(rows.column("value")[row].as_py())
                if one is not None:
                    found[row] = {name: getattr(one, name) for name in _REFERENCE_FIELDS}
    return rows.append_column(REFERENCE, pa.array(found, kind))


def _bounded(rows: pa.RecordBatch, plan: ReadPlan, options: SourceOptions) -> pa.RecordBatch:
    """Refuse or cut a value that does not fit in Spark's memory: an overflow there ends the JVM."""
    if "value" not in rows.schema.names:
        return rows
    sizes, bytes_max = pc.binary_length(rows.column("value")), options.value_bytes_max
    if rows.nbytes > bytes_max and (pc.max(sizes).as_py() or 0) > bytes_max:
        is_large = pc.greater(sizes, bytes_max)
        if options.fail_on_large_value:
            raise _too_large(rows, plan, pc.index(is_large, True).as_py(), bytes_max)
        kept = pc.binary_slice(rows.column("value"), 0, CUT_BYTES)
        cut = pc.if_else(is_large, kept, rows.column("value"))
        rows = rows.set_column(rows.schema.get_field_index("value"), "value", cut)
    if VALUE_BYTES in options.columns:
        rows = rows.append_column(VALUE_BYTES, sizes.cast(pa.int64()))
    return rows


def _too_large(rows: pa.RecordBatch, plan: ReadPlan, row: int, bytes_max: int) -> UsageError:
    where = f"topic {plan.topic!r}, offset {rows.column('offset')[row].as_py()}"
    size = len(rows.column("value")[row].as_buffer())
    advice = (
        "set failOnLargeValue to false for its beginning only, leave the column out with columns, "
        "or give Spark more memory and raise maxValueBytes"
    )
    text = f"{where}: a value of {size} bytes is over maxValueBytes ({bytes_max}); {advice}"
    return UsageError("spark.value-too-large", text)
