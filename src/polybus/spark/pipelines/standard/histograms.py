"""Sums and percentiles by key that stay correct when rows of many batches are added up.

Sizes and times are counted in buckets whose bounds grow by 2 %, so counts of batches can be added
and a percentile of the sums is at most 1 % from the true one. Every integer up to 50 has a bucket
of its own; 64 MiB is bucket 911 and a day in microseconds bucket 1272, so there are never many.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

GROWTH = 1.02
RELATIVE_ERROR_MAX = (GROWTH - 1) / (GROWTH + 1)
BUCKETS_MAX = 4096
Ints = npt.NDArray[np.int64]


def buckets_of(values: Ints) -> Ints:
    # Slightly less, so that a value on a bound does not depend on the rounding of logarithms.
    steps = np.ceil(np.log(np.maximum(values, 1)) / math.log(GROWTH) - 1e-9) + 1
    return np.where(values <= 0, 0, np.minimum(steps, BUCKETS_MAX - 1)).astype(np.int64)


def values_of(buckets: Ints) -> Ints:
    """The value that represents each bucket: the one closest to all values in it."""
    middle = 2.0 * GROWTH ** (buckets - 1.0) / (1.0 + GROWTH)
    return np.where(buckets == 0, 0, np.maximum(np.rint(middle), 1)).astype(np.int64)


class Groups:
    """Rows grouped by the values of some columns; groups are in the order of their keys."""

    def __init__(self, rows: pa.Table, keys: Sequence[str]) -> None:
        self._rows = rows.combine_chunks()
        groups = self._rows.select(list(keys)).to_pandas().groupby(list(keys), dropna=False)
        self.ids: Ints = groups.ngroup().to_numpy().astype(np.int64)
        self.count = int(self.ids.max(initial=-1)) + 1

    def aggregate(self, how: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
        """Column → one value per group: its `sum`, `min`, `max`, or `first` or `last` non-null."""
        numbered = self._rows.append_column("group", pa.array(self.ids))
        # Threads would lose the order of the rows.
        grouped = numbered.group_by("group", use_threads=False).aggregate(list(how.items()))
        grouped = grouped.sort_by("group")
        return {name: grouped[f"{name}_{kind}"] for name, kind in how.items()}

    def histogram(self, buckets: str, counts: str) -> "Histogram":
        """The sum of the histograms of each group; a row has lists of buckets and counts."""
        lists = self._rows[buckets].combine_chunks()
        owners = self.ids[pc.list_parent_indices(lists).to_numpy()]
        keyed = owners * BUCKETS_MAX + pc.list_flatten(lists).to_numpy()
        weights = pc.list_flatten(self._rows[counts].combine_chunks()).to_numpy()
        unique, place = np.unique(keyed, return_inverse=True)
        added = np.bincount(place, weights, len(unique)).astype(np.int64)
        starts = np.searchsorted(unique // BUCKETS_MAX, np.arange(self.count + 1))
        return Histogram(starts.astype(np.int64), unique % BUCKETS_MAX, added)


class Histogram:
    """Consecutive histograms: number i is `[starts[i]:starts[i + 1]]`."""

    def __init__(self, starts: Ints, buckets: Ints, counts: Ints) -> None:
        self._starts = starts
        self._buckets = buckets
        self._counts = counts

    def lists(self) -> tuple[pa.ListArray, pa.ListArray]:
        """The buckets and the counts, a list per histogram."""
        starts = pa.array(self._starts, pa.int32())
        buckets, counts = pa.array(self._buckets, pa.int32()), pa.array(self._counts, pa.int64())
        return pa.ListArray.from_arrays(starts, buckets), pa.ListArray.from_arrays(starts, counts)

    def percentile(self, quantile: float) -> pa.Array:
        """A percentile of each histogram; null if it is empty."""
        running = np.concatenate([[0], np.cumsum(self._counts)])
        before = running[self._starts[:-1]]
        total = running[self._starts[1:]] - before
        wanted = before + np.maximum(np.ceil(quantile * total), 1)
        places = np.searchsorted(running[1:], wanted, side="left")
        values = values_of(np.append(self._buckets, 0)[places])
        return pa.array(values, mask=total == 0)


def as_lists(values: pa.Array | pa.ChunkedArray) -> pa.ListArray:
    """Each value as a list of one, each null as an empty list."""
    flat = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    offsets = np.concatenate([[0], np.cumsum(np.asarray(flat.is_valid()).astype(np.int64))])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat.drop_null())
