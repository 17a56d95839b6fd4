"""A small table of sums to which every batch is added exactly once, by Arrow and without Spark."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.lake.compact import vacuum
from polybus.lake.table import LakeTable

TIME = pa.timestamp("us", "UTC")
CLOSED_ROWS = 20_000
"""A larger file is split, so that batches do not rewrite rows of old times."""
OPEN_S = 7200
VACUUM_EVERY = 256


class Accumulated:
    """Sums by key. If a key is a time, a batch rewrites only the files that have its times.

    `combine` merges all rows of the same keys into one. A batch that runs again adds nothing: the
    table stores the last batch of each writer.
    """

    def __init__(
        self, table: LakeTable, time: str | None, *, combine: Callable[[pa.Table], pa.Table]
    ) -> None:
        self.table = table
        self._time = time
        self._combine = combine
        self._cached: dict[str, pa.Table] = {}

    def add(self, rows: pa.Table, *, writer: str, batch_id: int) -> bool:
        """Add rows; False if the table has the batch already, or it has no rows."""
        last = self.table.last_batch(writer)
        if rows.num_rows == 0 or (last is not None and batch_id <= last):
            return False
        touched = self._touched(rows)
        known = [self._read(path).select(rows.schema.names) for path in touched]
        parts = self._parts(self._combine(pa.concat_tables([*known, rows])))
        notes = [self.table.write(part) for part in parts]
        self.table.commit(notes, remove=touched, writer=writer, batch_id=batch_id)
        self._cached = {note.file.path: part for note, part in zip(notes, parts, strict=True)}
        if self.table.version % VACUUM_EVERY == 0:
            vacuum(self.table)
        return True

    def recent(self, since_us: int) -> pa.Table | None:
        """The rows from a time on; None if there are none."""
        assert self._time is not None
        files = self.table.files(**{self._time: (since_us, None)})
        if not files:
            return None
        rows = pa.concat_tables(
            [self._read(path.relative_to(self.table.path).as_posix()) for path in files]
        )
        return rows.filter(pc.greater_equal(rows[self._time], pa.scalar(since_us, TIME)))

    def _touched(self, rows: pa.Table) -> list[str]:
        ranges = {}
        if self._time is not None:
            times_us = rows[self._time].cast(pa.int64())
            ends = pc.min_max(times_us).as_py()
            ranges[self._time] = (ends["min"], ends["max"])
        files = self.table.files(**ranges)
        return [path.relative_to(self.table.path).as_posix() for path in files]

    def _read(self, path: str) -> pa.Table:
        found = self._cached.get(path)
        return pq.read_table(self.table.path / path) if found is None else found

    def _parts(self, rows: pa.Table) -> list[pa.Table]:
        if self._time is None or rows.num_rows <= CLOSED_ROWS:
            return [rows]
        newest_us = pc.max(rows[self._time]).cast(pa.int64()).as_py()
        is_open = pc.greater(rows[self._time], pa.scalar(newest_us - OPEN_S * 1_000_000, TIME))
        parts = [rows.filter(pc.invert(is_open)), rows.filter(is_open)]
        return [part for part in parts if part.num_rows]
