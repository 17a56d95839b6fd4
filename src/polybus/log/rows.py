"""Conversion of stored rows to batches and back; only keys and headers become Python objects."""

from bisect import bisect_right
from typing import Any

import pyarrow as pa

from polybus import scan
from polybus.batch import Batch, Buffer
from polybus.log.columns import GroupedRows
from polybus.log.journal.message import MessageWriter, read_rows

_VALUE = 5


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


def rows_of(batch: Batch) -> pa.RecordBatch:
    """The rows of a batch that has offsets; a batch that was read from rows returns these."""
    if batch.stored is not None:
        return batch.stored
    # A separate writer, because the rows stay in its memory.
    pieces, _ = MessageWriter().write(GroupedRows([batch]), b" " * 64)
    return read_rows(pieces[0] if len(pieces) == 1 else b"".join(pieces))


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
