"""Slowly changing dimensions: a table that a stream of changes keeps up to date, by key.

Type 1 keeps the newest row of each key. Type 2 keeps its history: a row per period, with the
sequence numbers at which it begins and ends (`__START_AT`, `__END_AT`, null if it still holds).

Changes may arrive late. What the table shows of a key depends only on the set of its changes, and
not on their order or on how they were divided into batches. For that a second table,
`<table>.changes`, has the data that the first does not show: for type 1 the newest change of each
key, including deletions, and for type 2 all changes.

The order of writes, for each batch, is `<table>.changes` and then `<table>`. Both have the number
of the batch. After a crash between them the batch runs again: the changes are stored, and the rows
of its keys are derived from them once more. Both steps are idempotent.

A table with a change data feed lists there, for each batch, the rows of the batch's keys before it,
as deleted, and after it, as inserted. The other rows of the files that it rewrites are not in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import StorageError
from polybus.lake.compact import tidy
from polybus.lake.fields import TableFields, arrow_schema, merged_fields
from polybus.lake.files import NewFile, page_checked
from polybus.lake.table import Conflict, LakeTable

SEQUENCE, DELETED = "__sequence", "__deleted"
START_AT, END_AT = "__START_AT", "__END_AT"
CHANGES = "changes"
"""The suffix of the second table."""
FILE_ROWS_MIN = 100_000
"""The rest of a file with changed rows stays a separate file if it has at least this many rows."""
_ROW = "__row"
_ATTEMPTS_MAX = 20


@dataclass(frozen=True)
class Dimension:
    """A table, its keys, and whether it keeps history.

    `tracked` are the columns whose change begins a new period; other columns show the newest value
    of the period.
    """

    table: LakeTable
    keys: tuple[str, ...]
    has_history: bool = False
    tracked: tuple[str, ...] = ()

    @property
    def changes(self) -> LakeTable:
        return LakeTable(self.table.path.with_name(f"{self.table.path.name}.{CHANGES}"))

    def apply(self, events: pa.Table, fields: TableFields, *, writer: str, batch_id: int) -> None:
        """Apply the changes of a batch. Idempotent, as a commit of the table.

        `events` has the columns of the table, `__sequence` and `__deleted`; keys and sequence are
        not null. `fields` are its columns. Of changes with the same key and sequence, a deletion
        wins, then the one with the larger columns.

        Raises:
            UsageError: `lake.schema`, a column has another type than before. Nothing is changed.
            StorageError: as `LakeTable.commit`.
        """
        if self.table.has_batch(writer, batch_id):
            return
        events = events.cast(arrow_schema(fields))
        keys = events.select(list(self.keys)).group_by(list(self.keys)).aggregate([])
        self._store(events, keys, fields, writer, batch_id)
        shown = table_fields(fields, has_history=self.has_history)

        def rows() -> pa.Table:
            changes = self._ordered(rows_of(self.changes, keys))
            return (self._periods if self.has_history else self._newest)(changes)

        replace_rows(self.table, keys, rows, shown, (writer, batch_id))

    def _store(
        self, events: pa.Table, keys: pa.Table, fields: TableFields, writer: str, batch_id: int
    ) -> None:
        """Add the batch to the table of changes, unless it has it."""
        changes = self.changes
        if changes.has_batch(writer, batch_id):
            return
        if self.has_history:
            note = changes.write(events, fields=fields)
            changes.commit([note], writer=writer, batch_id=batch_id)
            tidy(changes)
            return

        def newest() -> pa.Table:
            known = [rows_of(changes, keys)] if changes.exists else []
            together = pa.concat_tables([*known, events], promote_options="default")
            ordered = self._ordered(together)
            return ordered.filter(_is_last(ordered, self.keys))

        replace_rows(changes, keys, newest, fields, (writer, batch_id))

    def _ordered(self, events: pa.Table) -> pa.Table:
        """One change per key and sequence, in an order that depends only on their values."""
        first = (*self.keys, SEQUENCE)
        others = sorted(set(events.column_names) - {*first, DELETED})
        sortable = events.select([*first, DELETED, *others])
        while any(pa.types.is_struct(field.type) for field in sortable.schema):
            sortable = sortable.flatten()
        order = [
            (index, "ascending", "at_start")
            for index, field in enumerate(sortable.schema)
            if not pa.types.is_nested(field.type) and not pa.types.is_null(field.type)
        ]
        # Columns of a struct have names with dots, which may be those of other columns.
        numbered = sortable.rename_columns([str(index) for index in range(sortable.num_columns)])
        options = [(str(index), way, nulls) for index, way, nulls in order]
        ordered = events.take(pc.sort_indices(numbered, sort_keys=options))
        return ordered.filter(_is_last(ordered, first))

    def _newest(self, events: pa.Table) -> pa.Table:
        last = events.filter(_is_last(events, self.keys))
        return last.filter(pc.invert(last[DELETED])).drop_columns([SEQUENCE, DELETED])

    def _periods(self, events: pa.Table) -> pa.Table:
        """A row per period: it begins with a change of a tracked column, or after a deletion."""
        deleted = events[DELETED].to_numpy()
        is_new_key = _differs(events, self.keys)
        after_deletion = np.concatenate([[True], deleted[:-1]])
        begins = ~deleted & (is_new_key | after_deletion | _differs(events, self.tracked))
        # A period ends where the next one of its key begins, or with a deletion.
        bounds = np.flatnonzero(begins | deleted)
        ends = np.append(bounds[1:], events.num_rows)
        is_period = begins[bounds]
        first, end = bounds[is_period], ends[is_period]
        is_open = (end == events.num_rows) | is_new_key[np.minimum(end, events.num_rows - 1)]
        sequence = events[SEQUENCE]
        rows = events.take(pa.array(end - 1)).drop_columns([SEQUENCE, DELETED])
        rows = rows.append_column(START_AT, sequence.take(pa.array(first)))
        return rows.append_column(END_AT, sequence.take(pa.array(end, mask=is_open)))


def table_fields(fields: TableFields, *, has_history: bool) -> TableFields:
    """The columns of the table, from those of the changes."""
    known = {field["name"]: field for field in fields}
    sequence, _ = known.pop(SEQUENCE), known.pop(DELETED)
    names = (START_AT, END_AT) if has_history else ()
    return (*known.values(), *(sequence | {"name": name} for name in names))


def rows_of(table: LakeTable, keys: pa.Table) -> pa.Table:
    """The rows of a table with one of these keys."""
    names = keys.column_names
    found = [
        _read(table, path).filter(pa.array(mask))
        for path in table.state.files
        if (mask := _is_among(_read(table, path, names), keys)).any()
    ]
    return pa.concat_tables([*found, arrow_schema(table.state.fields).empty_table()])


def replace_rows(
    table: LakeTable,
    keys: pa.Table,
    rows: Callable[[], pa.Table],
    fields: TableFields,
    batch: tuple[str, int],
) -> None:
    """Replace the rows with these keys, in one commit; other files stay.

    `rows` gives the new rows; it is called again if another writer was faster.
    """
    for _ in range(_ATTEMPTS_MAX):
        state = table.state
        merged = merged_fields(table.name, state.fields, [fields])
        new = _in_columns(rows(), merged)
        old, fresh, remove = [new.slice(0, 0)], [new], []
        notes: list[NewFile] = []
        for path in state.files:
            is_among = _is_among(_read(table, path, keys.column_names), keys)
            if not is_among.any():
                continue
            remove.append(path)
            known = _in_columns(_read(table, path), merged)
            old.append(known.filter(pa.array(is_among)))
            left = known.filter(pa.array(~is_among))
            if left.num_rows >= FILE_ROWS_MIN:
                notes.append(table.write(left, fields=merged))
            else:
                fresh.append(left)
        together = pa.concat_tables(fresh)
        if together.num_rows or not state.files:
            notes.append(table.write(together, fields=merged))
        feed = _feed(pa.concat_tables(old), new) if table.is_fed and remove else None
        try:
            table.commit(
                notes,
                remove=remove,
                writer=batch[0],
                batch_id=batch[1],
                based_on=state.version,
                feed=feed,
            )
        except Conflict:
            for note in notes:
                (table.path / note.file.path).unlink(missing_ok=True)
            continue
        tidy(table)
        return
    raise Conflict(table.name)


def _feed(old: pa.Table, new: pa.Table) -> pa.Table:
    parts = {"delete": old, "insert": new}
    return pa.concat_tables(
        rows.append_column("_change_type", pa.array([kind] * rows.num_rows, pa.string()))
        for kind, rows in parts.items()
    )


def _read(table: LakeTable, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a file; columns that it lacks are null. Raises StorageError `lake.damaged`."""
    import pyarrow.dataset as ds

    schema = arrow_schema(table.state.fields)
    try:
        found = ds.dataset(str(table.path / path), schema=schema, format=page_checked())
        return found.to_table(columns)
    except (OSError, pa.ArrowException) as error:
        raise StorageError("lake.damaged", f"table {table.name}: {error}") from error


def _in_columns(rows: pa.Table, fields: TableFields) -> pa.Table:
    schema = arrow_schema(fields)
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _is_among(rows: pa.Table, keys: pa.Table) -> np.ndarray:
    """For each row, whether it has one of these keys."""
    names = keys.column_names
    if len(names) == 1:
        mask = pc.is_in(rows[names[0]], value_set=keys[names[0]].combine_chunks())
        return np.asarray(mask)
    numbered = rows.select(names).append_column(_ROW, pa.array(np.arange(rows.num_rows)))
    found = numbered.join(keys, keys=names, join_type="left semi")[_ROW]
    is_among = np.zeros(rows.num_rows, dtype=bool)
    is_among[found.to_numpy()] = True
    return is_among


def _differs(rows: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """For each row, whether one of these columns differs from that of the row before."""
    differs = np.zeros(rows.num_rows, dtype=bool)
    differs[:1] = True
    for name in columns:
        column = rows[name].combine_chunks()
        before, after = column[:-1], column[1:]
        if pa.types.is_nested(column.type):
            values = column.to_pylist()
            others = [one != two for one, two in zip(values, values[1:], strict=False)]
            differs[1:] |= np.array(others, dtype=bool)
            continue
        is_other = pc.fill_null(pc.not_equal(before, after), False)
        is_null = pc.xor(pc.is_null(before), pc.is_null(after))
        differs[1:] |= np.asarray(pc.or_(is_other, is_null))
    return differs


def _is_last(rows: pa.Table, columns: Sequence[str]) -> pa.Array:
    """For each row of a sorted table, whether the next one differs in these columns."""
    return pa.array(np.append(_differs(rows, columns)[1:], True)[: rows.num_rows])
