"""What a task does: its ranges of the log become record batches of exactly Spark's schema.

Nothing is done for a single row. Columns that have one value for a whole topic are not read but
repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import UsageError
from polybus.log.reading.pieces import ReadPlan
from polybus.spark.source.losses import Losses
from polybus.spark.source.options import SourceOptions
from polybus.spark.source.origin import open_origin
from polybus.spark.source.planning import LogPartition
from polybus.spark.source.schema import MADE, PARTITION, arrow_schema


@dataclass(frozen=True)
class Shape:
    """What a task needs to know of the options."""

    columns: tuple[str, ...]
    headers: bool
    value_bytes_max: int
    fail_on_data_loss: bool

    @classmethod
    def of(cls, options: SourceOptions) -> Shape:
        return cls(
            options.columns, options.headers, options.value_bytes_max, options.fail_on_data_loss
        )

    @property
    def stored(self) -> list[str]:
        """The columns to read from the log; the offset too where it is needed to tell of a row."""
        left_out = MADE if self.headers else (*MADE, "headers")
        found = [name for name in self.columns if name not in left_out]
        return (
            found if "offset" in found or (found and "value" not in found) else [*found, "offset"]
        )


def read_partition(partition: Any, shape: Shape) -> Iterator[pa.RecordBatch]:
    """The rows of a partition.

    Raises:
        UsageError: `spark.data-loss`; `spark.value-too-large`, naming topic and offset.
        StorageError: `log.damaged`, naming file, topic and offsets.
    """
    if not isinstance(partition, LogPartition):
        return  # Spark's own, when there is nothing to read.
    origin = open_origin(partition.where)
    losses = Losses(fail=shape.fail_on_data_loss)
    schema = arrow_schema(shape.columns)
    for plan in partition.plans:
        made = _Made(plan)
        for rows in origin.read(plan, shape.stored, losses.note_error):
            _check_values(rows, plan, shape.value_bytes_max)
            columns = [made.column(name, rows) for name in shape.columns]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


class _Made:
    """A batch's columns: read ones as they are, others repeated."""

    def __init__(self, plan: ReadPlan) -> None:
        self._values = {
            "topic": pa.scalar(plan.topic, pa.string()),
            "partition": pa.scalar(PARTITION, pa.int32()),
            "epoch": pa.scalar(plan.epoch, pa.int64()),
        }
        self._repeated: dict[str, Any] = {}

    def column(self, name: str, rows: pa.RecordBatch) -> Any:
        found = rows.schema.get_field_index(name)
        if found >= 0 and name not in self._values:
            return rows.column(found)
        repeated = self._repeated.get(name)
        if repeated is None or len(repeated) < rows.num_rows:
            if name in self._values:
                repeated = pa.repeat(self._values[name], rows.num_rows)
            else:
                repeated = pa.nulls(rows.num_rows, arrow_schema((name,)).field(0).type)
            self._repeated[name] = repeated
        return repeated if len(repeated) == rows.num_rows else repeated.slice(0, rows.num_rows)


def _check_values(rows: pa.RecordBatch, plan: ReadPlan, bytes_max: int) -> None:
    """Refuse a value that would not fit in Spark's memory: an overflow there ends the session."""
    if rows.nbytes <= bytes_max or "value" not in rows.schema.names:
        return
    sizes = pc.binary_length(rows.column("value"))
    largest = pc.max(sizes).as_py() or 0
    if largest <= bytes_max:
        return
    row = pc.index(pc.greater(sizes, bytes_max), True).as_py()
    place = f"topic {plan.topic!r}, offset {rows.column('offset')[row].as_py()}"
    text = f"{place}: a value of {sizes[row].as_py()} bytes is over maxValueBytes ({bytes_max})"
    advice = "give Spark more memory and raise the option, or leave the column out with columns"
    raise UsageError("spark.value-too-large", f"{text}; {advice}")
