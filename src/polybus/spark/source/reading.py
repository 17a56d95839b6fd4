"""What a task does: it reads its ranges of the log as record batches of exactly Spark's schema.

Nothing is done row by row. Columns with one value for a whole topic are repeated, not read.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import UsageError
from polybus.log.reading.pieces import ReadPlan
from polybus.spark.origin import BATCH_BYTES_MAX, ROWS_MAX, open_origin
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.planning import LogPartition
from polybus.spark.source.positions import DataLoss
from polybus.spark.source.schema import CONSTANT, PARTITION, arrow_schema


def read_partition(partition: Any, options: SourceOptions) -> Iterator[pa.RecordBatch]:
    """The rows of a partition.

    Raises:
        UsageError: `spark.data-loss`; `spark.value-too-large`, naming topic and offset.
        StorageError: `log.damaged`, naming file, topic and offsets.
    """
    if not isinstance(partition, LogPartition):
        return  # Spark's own, when there is nothing to read.
    origin = open_origin(options.location)
    loss = DataLoss(fail=options.fail_on_data_loss)
    schema = arrow_schema(options.columns)
    for plan in partition.plans:
        columns = _TaskColumns(plan)
        for rows in origin.read_plan(
            plan,
            columns=stored_columns(options),
            rows_max=ROWS_MAX,
            bytes_max=BATCH_BYTES_MAX,
            lost=loss.note_error,
        ):
            _check_values(rows, plan, options.value_bytes_max)
            arrays = [columns.get(name, rows) for name in options.columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def stored_columns(options: SourceOptions) -> list[str]:
    """The columns to read from the log.

    `offset` is read too if errors about values need it, or if no other column is read.
    """
    unread = CONSTANT if options.headers else (*CONSTANT, "headers")
    found = [name for name in options.columns if name not in unread]
    if "offset" not in found and ("value" in found or not found):
        found.append("offset")
    return found


class _TaskColumns:
    """The columns of a record batch: read from the log, repeated, or null."""

    def __init__(self, plan: ReadPlan) -> None:
        self._constants = {
            "topic": pa.scalar(plan.topic, pa.string()),
            "partition": pa.scalar(PARTITION, pa.int32()),
            "epoch": pa.scalar(plan.epoch, pa.int64()),
        }
        self._repeated: dict[str, Any] = {}

    def get(self, name: str, rows: pa.RecordBatch) -> Any:
        index = rows.schema.get_field_index(name)
        if index >= 0 and name not in self._constants:
            return rows.column(index)
        repeated = self._repeated.get(name)
        if repeated is None or len(repeated) < rows.num_rows:
            null = pa.scalar(None, arrow_schema((name,)).field(0).type)
            repeated = pa.repeat(self._constants.get(name, null), rows.num_rows)
            self._repeated[name] = repeated
        return repeated.slice(0, rows.num_rows)


def _check_values(rows: pa.RecordBatch, plan: ReadPlan, bytes_max: int) -> None:
    """Refuse a value that does not fit in Spark's memory: an overflow there ends the session."""
    if rows.nbytes <= bytes_max or "value" not in rows.schema.names:
        return
    sizes = pc.binary_length(rows.column("value"))
    if (pc.max(sizes).as_py() or 0) <= bytes_max:
        return
    row = pc.index(pc.greater(sizes, bytes_max), True).as_py()
    where = f"topic {plan.topic!r}, offset {rows.column('offset')[row].as_py()}"
    text = f"{where}: a value of {sizes[row].as_py()} bytes is over maxValueBytes ({bytes_max})"
    advice = "give Spark more memory and raise the option, or leave the column out with columns"
    raise UsageError("spark.value-too-large", f"{text}; {advice}")
