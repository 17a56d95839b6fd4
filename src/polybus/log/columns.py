"""The columns of the log: their schema, and stored rows as batches.

Only keys and headers become Python objects.
"""

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

import pyarrow as pa

from polybus import scan
from polybus.batch import Batch, Buffer

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
_VALUE = 5
_BATCH_BYTES_MIN = 1024
STORED_OVERHEAD_BYTES = 16 << 10
"""Memory that Arrow needs for rows in addition to their bytes: for one message, a hundred times
them.
"""


TopicKey = tuple[str, int]
"""A topic and its epoch."""


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

    @property
    def stop_offset(self) -> int:
        return self.first_offset + self.row_count


def batch_of(rows: pa.RecordBatch, *, topic: str, epoch: int, first_offset: int) -> Batch:
    """A batch that shares the memory of rows of one topic with consecutive offsets."""
    values = rows.column(_VALUE)
    _, ends, content = values.buffers()
    spans = scan.spans_of_offsets(ends, values.offset, len(values))
    buffer: Buffer = b"" if content is None else memoryview(content).cast("B")
    batch = Batch(topic, buffer, spans)
    batch.epoch = epoch
    batch.first_offset = first_offset
    batch.stored = rows
    keys = rows.column(4)
    if keys.null_count < len(keys):
        batch.keys = keys.to_pylist()
    headers = rows.column(6)
    if headers.null_count < len(headers):
        batch.headers = [None if one is None else dict(one) for one in headers.to_pylist()]
    batch.timestamp_us = rows.column(3)[0].value
    batch.protocol = rows.column(7)[0].as_py()
    batch.sender = rows.column(8)[0].as_py()
    return batch


def cut(rows: pa.RecordBatch, *, bytes_max: int) -> pa.RecordBatch:
    """The first rows with values of at most `bytes_max` together, but at least one."""
    values = rows.column(_VALUE)
    ends = memoryview(values.buffers()[1]).cast("B").cast("i")
    first = values.offset
    stop = first + len(values)
    last = bisect_right(ends, ends[first] + bytes_max, first + 1, stop + 1) - 1
    count = max(1, last - first)
    return rows if count == len(values) else rows.slice(0, count)


def cut_batch(batch: Batch, *, bytes_max: int) -> Batch:
    """`cut` for a batch."""
    if batch.value_bytes <= bytes_max:
        return batch
    spans = batch.spans
    size = 0
    for index in range(0, len(spans), 2):
        size += spans[index + 1] - spans[index]
        if size > bytes_max:
            return batch.slice(0, max(1, index // 2))
    return batch


def weight_of(batch: Batch) -> int:
    """What a batch counts towards the limit of a read; never 0, so that a read ends."""
    return max(batch.value_bytes, _BATCH_BYTES_MIN)


def copy_of(batch: Batch) -> Batch:
    """A copy for a reader, so that the log's batch does not keep the reader's cached encodings."""
    return batch.slice(0, len(batch))


def limited(batches: Iterable[Batch], *, bytes_max: int) -> list[Batch]:
    """Copies of the first batches with about `bytes_max` together, but at least one message."""
    found = []
    for batch in batches:
        part = cut_batch(batch, bytes_max=bytes_max)
        found.append(copy_of(batch) if part is batch else part)
        bytes_max -= weight_of(part)
        if bytes_max <= 0 or part is not batch:
            break
    return found


def row_at(rows: pa.RecordBatch, timestamp_us: int) -> int | None:
    """The first row whose timestamp is at or after the time."""
    times: Any = rows.column(3)
    whole = memoryview(times.buffers()[1]).cast("B").cast("q")
    part = whole[times.offset : times.offset + len(times)]
    if len(part) == 0:
        return None
    if part[0] >= timestamp_us:
        return 0
    # No bisection: the clock may have been set back.
    return next((row for row, time in enumerate(part) if time >= timestamp_us), None)
