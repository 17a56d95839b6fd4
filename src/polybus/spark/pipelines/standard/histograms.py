"""Sums and percentiles by key, which stay right when rows of many batches are added up.

Sizes and times are counted in buckets whose bounds grow by 2 %, so counts of batches can be added
and a percentile read from the sums is at most 1 % from the true one. Every whole number up to 50
has a bucket of its own; 64 MiB is bucket 911 and a day in microseconds 1272: there are never many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

GROWTH = 1.02
RELATIVE_ERROR_MAX = (GROWTH - 1) / (GROWTH + 1)
BUCKETS_MAX = 4096
Ints = npt.NDArray[np.int64]


def buckets_of(values: Ints) -> Ints:
    # A hair less, so that a value that is a bound exactly does not depend on how logarithms round.
    steps = np.ceil(np.log(np.maximum(values, 1)) / math.log(GROWTH) - 1e-9) + 1
    return np.where(values <= 0, 0, np.minimum(steps, BUCKETS_MAX - 1)).astype(np.int64)


def values_of(buckets: Ints) -> Ints:
    """The value that stands for each bucket: the one least far from all that are in it."""
    middle = 2.0 * GROWTH ** (buckets - 1.0) / (1.0 + GROWTH)
    return np.where(buckets == 0, 0, np.maximum(np.rint(middle), 1)).astype(np.int64)


class Groups:
    """Rows by the values of some columns; groups are in the order of their keys."""

    def __init__(self, rows: pa.Table, keys: Sequence[str]) -> None:
        self._rows = rows.combine_chunks()
        numbers = self._rows.select(list(keys)).to_pandas().groupby(list(keys), dropna=False)
        self.ids: Ints = numbers.ngroup().to_numpy().astype(np.int64)
        self.count = int(self.ids.max(initial=-1)) + 1

    def first(self, column: str) -> pa.Array:
        """A value of each group, for columns that have but one: the keys."""
        _, rows = np.unique(self.ids, return_index=True)
        return self._rows[column].combine_chunks().take(pa.array(rows))

    def last(self, column: str) -> pa.Array:
        """The value of each group's last row."""
        _, rows = np.unique(self.ids[::-1], return_index=True)
        return self._rows[column].combine_chunks().take(pa.array(len(self.ids) - 1 - rows))

    def last_known(self, column: str) -> pa.Array:
        """The last value of each group that is not null; null where all are."""
        values = self._rows[column].combine_chunks()
        rows = np.flatnonzero(values.is_valid())
        place = np.full(self.count, -1)
        # Of several values for one place numpy keeps the last.
        place[self.ids[rows]] = rows
        return values.take(pa.array(place, mask=place < 0))

    def sum(self, column: str) -> pa.Array:
        values = self._rows[column].to_numpy()
        return pa.array(np.bincount(self.ids, values, self.count).astype(np.int64))

    def min(self, column: str) -> pa.Array:
        return self._least(column, 1)

    def max(self, column: str) -> pa.Array:
        return self._least(column, -1)

    def _least(self, column: str, sign: int) -> pa.Array:
        values = self._rows[column]
        found = np.full(self.count, np.iinfo(np.int64).max)
        np.minimum.at(found, self.ids, sign * values.cast(pa.int64()).to_numpy())
        return pa.array(sign * found).cast(values.type)

    def histogram(self, buckets: str, counts: str) -> Histogram:
        """The histograms of each group's rows, added up; a row has lists of buckets and counts."""
        lists = self._rows[buckets].combine_chunks()
        owners = self.ids[pc.list_parent_indices(lists).to_numpy()]
        keyed = owners * BUCKETS_MAX + pc.list_flatten(lists).to_numpy()
        weights = pc.list_flatten(self._rows[counts].combine_chunks()).to_numpy()
        unique, place = np.unique(keyed, return_inverse=True)
        added = np.bincount(place, weights, len(unique)).astype(np.int64)
        starts = np.searchsorted(unique // BUCKETS_MAX, np.arange(self.count + 1))
        return Histogram(starts.astype(np.int64), unique % BUCKETS_MAX, added)


class Histogram:
    """Several histograms behind one another: number i is `[starts[i]:starts[i + 1]]`."""

    def __init__(self, starts: Ints, buckets: Ints, counts: Ints) -> None:
        self._starts = starts
        self._buckets = buckets
        self._counts = counts

    def buckets(self) -> pa.Array:
        return pa.ListArray.from_arrays(
            pa.array(self._starts, pa.int32()), pa.array(self._buckets, pa.int32())
        )

    def counts(self) -> pa.Array:
        return pa.ListArray.from_arrays(
            pa.array(self._starts, pa.int32()), pa.array(self._counts, pa.int64())
        )

    def percentile(self, quantile: float) -> pa.Array:
        """A percentile of each histogram; null where it is empty."""
        running = np.concatenate([[0], np.cumsum(self._counts)])
        before = running[self._starts[:-1]]
        total = running[self._starts[1:]] - before
        wanted = before + np.maximum(np.ceil(quantile * total), 1)
        places = np.searchsorted(running[1:], wanted, side="left")
        values = values_of(np.append(self._buckets, 0)[places])
        return pa.array(values, mask=total == 0)


def one_each(values: pa.Array | pa.ChunkedArray) -> pa.ListArray:
    """Each value as a list of its own; a null as an empty list."""
    flat = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    offsets = np.concatenate([[0], np.cumsum(np.asarray(flat.is_valid()).astype(np.int64))])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat.drop_null())
