"""The log's rows: their schema, and what a commit's rows are made of, told without single rows."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from polybus import names, scan
from polybus.batch import Batch

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
_TIME = struct.Struct("<q")

T = TypeVar("T")
Runs = Sequence[tuple[bytes, int]]
"""A column as (value, how many rows in a row have it)."""


class TopicRows(NamedTuple):
    """Which rows of a commit are a topic's: `count` from `first_row` on, offsets ascending."""

    account: str
    topic: str
    epoch: int
    first_offset: int
    count: int  # type: ignore[assignment]
    first_row: int
    min_timestamp_us: int
    max_timestamp_us: int


class Rows:
    """The rows of some batches, grouped by topic, each column as little as it takes.

    Attributes:
        batches: all of them, in the order of their rows; values, keys and headers stay there.
        topics: which rows are whose.
    """

    def __init__(self, batches: Iterable[Batch]) -> None:
        """Take batches; those of a topic and epoch stay in their order."""
        found = scan.rows_by_topic(batches, TopicRows, names.ACCOUNT)
        self.batches, self._counts, self.topics = found
        self.count = sum(self._counts)

    def accounts(self) -> Runs:
        return [(names.ACCOUNT.encode(), self.count)]

    def topic_names(self) -> Runs:
        return [(rows.topic.encode(), rows.count) for rows in self.topics]

    def offsets(self) -> Sequence[tuple[int, int]]:
        return [(rows.first_offset, rows.count) for rows in self.topics]

    def times(self) -> Runs:
        runs = _merged([batch.timestamp_us for batch in self.batches], self._counts)
        return [(_TIME.pack(time_us), count) for time_us, count in runs]

    def protocols(self) -> Runs:
        runs = _merged([batch.protocol for batch in self.batches], self._counts)
        return [(protocol.encode(), count) for protocol, count in runs]

    def senders(self) -> Runs:
        runs = _merged([batch.sender for batch in self.batches], self._counts)
        return [(sender.encode(errors="replace"), count) for sender, count in runs]

    def value_bytes(self) -> int:
        return sum([scan.spans_bytes(batch.spans) for batch in self.batches])

    def keys(self) -> Any:
        """The column of keys; None when there is not one."""
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
        """The column of headers; None when there is not one."""
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


def _merged(values: Iterable[T], counts: Iterable[int]) -> list[tuple[T, int]]:
    """Runs of equal values, of values that come with how often each comes."""
    runs: list[tuple[T, int]] = []
    last: T | None = None
    total = 0
    for value, count in zip(values, counts, strict=True):
        if value != last:
            if last is not None:
                runs.append((last, total))
            last = value
            total = 0
        total += count
    if last is not None:
        runs.append((last, total))
    return runs
