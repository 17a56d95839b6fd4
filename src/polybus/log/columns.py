"""The columns of the log: their schema, and the columns of a commit as runs of equal values."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from polybus import names, scan
from polybus.batch import Batch
from polybus.scan.columns_py import Values

SCHEMA = pa.schema(
    [
        ("account", pa.string()),
        ("topic", pa.string()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("protocol", pa.string()),
        ("sender", pa.string()),
    ]
)
_HEADERS_TYPE = SCHEMA.field("headers").type

Runs: TypeAlias = "tuple[Values, array[int]]"
"""A column as runs: its values, and how many consecutive rows have each."""


class TopicRows(NamedTuple):
    """The rows of a topic in a commit: `row_count` from `first_row` on, offsets ascending."""

    account: str
    topic: str
    epoch: int
    first_offset: int
    row_count: int
    first_row: int
    min_timestamp_us: int
    max_timestamp_us: int


class GroupedRows:
    """The rows of some batches, grouped by topic, with columns as runs.

    Attributes:
        batches: the batches in the order of their rows; they hold values, keys and headers.
        topics: which rows belong to which topic.
        times, protocols: these columns.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        """Group batches; those of one topic and epoch keep their order."""
        self.batches, counts, self.topics, columns = scan.rows_by_topic(
            batches, TopicRows, names.ACCOUNT
        )
        self._names, self._firsts, self._counts = columns
        self.count = sum(counts)
        self.times, self.protocols, self._senders = scan.merge_runs(self.batches, counts)

    @property
    def accounts(self) -> Runs:
        return [names.ACCOUNT], array("q", [self.count])

    @property
    def topic_names(self) -> Runs:
        return self._names, self._counts

    @property
    def offsets(self) -> tuple[array[int], array[int]]:
        """The first offset and the row count of each topic."""
        return self._firsts, self._counts

    @property
    def senders(self) -> Runs:
        senders, counts = self._senders
        return [sender.encode(errors="replace") for sender in senders], counts

    def value_bytes(self) -> int:
        return scan.weigh(self.batches, 0, 0)

    def keys(self) -> Any:
        """The column of keys; None if no row has one."""
        if all(batch.keys is None for batch in self.batches):
            return None
        pieces = []
        for absent, run in groupby(self.batches, lambda batch: batch.keys is None):
            if absent:
                pieces.append(pa.nulls(sum(map(len, run)), pa.binary()))
            else:
                pieces.append(pa.array([key for b in run for key in b.keys or ()], pa.binary()))
        return pa.concat_arrays(pieces)

    def headers(self) -> Any:
        """The column of headers; None if no row has any."""
        if all(batch.headers is None for batch in self.batches):
            return None
        pieces = []
        for absent, run in groupby(self.batches, lambda batch: batch.headers is None):
            if absent:
                pieces.append(pa.nulls(sum(map(len, run)), _HEADERS_TYPE))
            else:
                maps = [list(one.items()) if one else None for b in run for one in b.headers or ()]
                pieces.append(pa.array(maps, _HEADERS_TYPE))
        return pa.concat_arrays(pieces)
