"""Auto CDC flows: how the rows of a stream become changes of a table, type 1 or 2.

A flow reads its source, and each row becomes a change: the columns that the table keeps, the
sequence number by which changes are ordered, and whether the row deletes its key. lake/dimension.py
decides what the table then shows.

A batch of changes passes the driver, so a source without a limit of its own gets one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql import types as T

from polybus.errors import UsageError
from polybus.lake.dimension import DELETED, END_AT, SEQUENCE, START_AT, Dimension
from polybus.lake.table import LakeTable
from polybus.spark import tables
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.expectations import CheckedRows, check
from polybus.spark.internals import AutoCdcFlow, expression_of

CHANGES_PER_BATCH_MAX = 200_000
RESERVED = (SEQUENCE, DELETED, START_AT, END_AT)
_NESTED = (T.ArrayType, T.MapType, T.StructType, T.VariantType)
NO_KEY = "a key or the sequence number is null"


@dataclass(frozen=True, kw_only=True)
class ChangeRule:
    """The declaration of an auto CDC flow. Expressions are SQL text or Columns."""

    source: str
    keys: tuple[str, ...]
    sequence: Any
    deletes: Any = None
    columns: tuple[str, ...] = ()
    except_columns: tuple[str, ...] = ()
    has_history: bool = False
    tracked: tuple[str, ...] = ()
    except_tracked: tuple[str, ...] = ()

    def events(self, frame: Any) -> Any:
        """The rows of the source as changes. Raises UsageError `pipeline.query`."""
        types = {field.name: field.dataType for field in frame.schema}
        for name in self._all_names():
            if name not in types:
                raise _refused(f"the source {self.source} has no column {name}")
        kept = [name for name in types if name not in self.except_columns]
        kept = [name for name in kept if not self.columns or name in self.columns]
        for name in self.keys:
            if name not in kept:
                raise _refused(f"the key {name} must be one of the columns that the table keeps")
            if isinstance(types[name], _NESTED):
                raise _refused(f"the key {name} is {types[name].simpleString()}; use a plain type")
        for name in set(kept) & set(RESERVED):
            raise _refused(f"the column name {name} is reserved; leave it out or rename it")
        deletes = F.lit(False) if self.deletes is None else _column(self.deletes)
        changes = frame.select(
            *(F.col(f"`{name}`") for name in kept),
            _column(self.sequence).alias(SEQUENCE),
            F.coalesce(deletes, F.lit(False)).alias(DELETED),
        )
        kind = changes.schema[SEQUENCE].dataType
        if isinstance(kind, (T.ArrayType, T.MapType, T.VariantType)):
            text = f"the sequence is {kind.simpleString()}, which has no order"
            raise _refused(f"{text}; use a number, a time, or a struct of those")
        return changes

    def _all_names(self) -> list[str]:
        chosen = (self.columns, self.except_columns, self.tracked, self.except_tracked)
        return [*self.keys, *(name for names in chosen for name in names)]

    def shown(self, schema: T.StructType) -> T.StructType:
        """The columns of the table, from those of the changes."""
        fields = [field for field in schema if field.name not in (SEQUENCE, DELETED)]
        kind = schema[SEQUENCE].dataType
        ends = [T.StructField(name, kind) for name in (START_AT, END_AT)]
        return T.StructType([*fields, *(ends if self.has_history else [])])

    def dimension(self, table: LakeTable, columns: Sequence[str]) -> Dimension:
        """The table that changes with these columns keep up to date."""
        others = [name for name in columns if name not in (*self.keys, *RESERVED)]
        tracked = self.tracked or [name for name in others if name not in self.except_tracked]
        return Dimension(table, self.keys, self.has_history, tuple(tracked))

    def __str__(self) -> str:
        """The parameters on which the state of the table depends."""
        parts = [f"auto CDC type {2 if self.has_history else 1}", f"keys {', '.join(self.keys)}"]
        parts += [f"sequence {self.sequence}", f"deletes {self.deletes}"]
        tracked = [*self.tracked, *(f"not {name}" for name in self.except_tracked)]
        return "; ".join([*parts, f"tracked {', '.join(tracked)}" if tracked else ""]).rstrip("; ")


def rule_of(flow: AutoCdcFlow) -> ChangeRule:
    """The rule that a Python file declares. Raises UsageError `pipeline.query`."""
    return ChangeRule(
        source=flow.source,
        keys=_names(flow.keys),
        sequence=expression_of(flow.sequence_by),
        deletes=None if flow.apply_as_deletes is None else expression_of(flow.apply_as_deletes),
        columns=_names(flow.column_list),
        except_columns=_names(flow.except_column_list),
        has_history=str(flow.stored_as_scd_type) == "2",
        # Spark 4.2 knows type 1 only.
        tracked=_names(getattr(flow, "track_history_column_list", None)),
        except_tracked=_names(getattr(flow, "track_history_except_column_list", None)),
    )


def _names(columns: Sequence[Any] | None) -> tuple[str, ...]:
    texts = [expression_of(column) for column in columns or ()]
    return tuple(str(text).strip("`") for text in texts)


def _column(expression: Any) -> Any:
    return F.expr(expression) if isinstance(expression, str) else expression


def _refused(text: str) -> UsageError:
    return UsageError("pipeline.query", text)


def apply_changes(
    rows: CheckedRows, dimension: Dimension, *, writer: str, batch_id: int, checkpoint: Checkpoint
) -> None:
    """Apply the changes of a batch that is not in the table. Rows without a key are quarantined.

    Raises:
        UsageError: `lake.schema`, a column has another type than in the table;
            `pipeline.expectation`.
        StorageError: as `tables.append`.
    """
    table = dimension.table
    checkpoint.sync_batch(batch_id)
    frame, fields = tables.stored_columns(rows.rows, table)
    needed = [f"`{name}` IS NOT NULL" for name in (*dimension.keys, SEQUENCE)]
    events = frame.toArrow()
    check(rows.counts())
    if any(events[name].null_count for name in (*dimension.keys, SEQUENCE)):
        bad = rows.kept.where(f"NOT ({' AND '.join(needed)})")
        tables.quarantine(bad, table, reason=NO_KEY, writer=writer, batch_id=batch_id)
        for name in (*dimension.keys, SEQUENCE):
            events = events.filter(pc.is_valid(events[name]))
    dimension.apply(events, fields, writer=writer, batch_id=batch_id)
