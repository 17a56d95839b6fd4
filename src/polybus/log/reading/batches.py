"""Batches of a useful size: many small ones are joined, large ones are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa


def joined(
    batches: Iterable[pa.RecordBatch], *, rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of up to `rows_max` rows and about `bytes_max` bytes.

    A single row is never cut, however large. Joining copies, so batches that are large enough
    by themselves are passed on as they are.
    """
    held: list[pa.RecordBatch] = []
    held_rows = held_bytes = 0
    for batch in batches:
        for part in _cut(batch, rows_max, bytes_max):
            size = part.nbytes
            if held and (held_rows + part.num_rows > rows_max or held_bytes + size > bytes_max):
                yield _one(held)
                held, held_rows, held_bytes = [], 0, 0
            held.append(part)
            held_rows += part.num_rows
            held_bytes += size
    if held:
        yield _one(held)


def _one(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    return held[0] if len(held) == 1 else pa.concat_batches(held)


def _cut(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= rows_max and (batch.num_rows <= 1 or batch.nbytes <= bytes_max):
        yield batch
        return
    half = min(rows_max, batch.num_rows // 2 or 1)
    for start in range(0, batch.num_rows, half):
        yield from _cut(batch.slice(start, half), rows_max, bytes_max)
