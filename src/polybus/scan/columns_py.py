"""Columns from spans and back, in plain Python: the twin of `_columns.pyx`.

Arrow's variable-length columns are two buffers: the values end to end, and count + 1 int32 offsets.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

Buffer = bytes | bytearray | memoryview


def spans_bytes(spans: array[int]) -> int:
    """The total length of all spans."""
    return sum(spans[1::2]) - sum(spans[0::2])


def gather(buffers: Sequence[Buffer], spans: Sequence[array[int]]) -> tuple[bytes, bytes]:
    """Copy the spans of several buffers end to end; return (values, int32 offsets)."""
    parts = []
    offsets = array("i", [0])
    end = 0
    for buffer, buffer_spans in zip(buffers, spans, strict=True):
        view = memoryview(buffer)
        for index in range(0, len(buffer_spans), 2):
            part = view[buffer_spans[index] : buffer_spans[index + 1]]
            parts.append(part)
            end += len(part)
            offsets.append(end)
    return b"".join(parts), offsets.tobytes()


def string_runs(runs: Sequence[tuple[bytes, int]]) -> tuple[bytes, bytes]:
    """A string column that repeats each value `count` times; return (values, int32 offsets)."""
    offsets = array("i", [0])
    end = 0
    for value, count in runs:
        for _ in range(count):
            end += len(value)
            offsets.append(end)
    return b"".join(value * count for value, count in runs), offsets.tobytes()


def offset_runs(runs: Sequence[tuple[int, int]]) -> bytes:
    """An int64 column that counts up from each `first`, `count` times."""
    column = array("q")
    for first, count in runs:
        column.extend(range(first, first + count))
    return column.tobytes()


def integer_runs(runs: Sequence[tuple[int, int]]) -> bytes:
    """An int64 column that repeats each value `count` times."""
    column = array("q")
    for value, count in runs:
        column.extend([value] * count)
    return column.tobytes()


def spans_of_offsets(offsets: Buffer, first: int, count: int) -> array[int]:
    """The spans of `count` messages of a column, from its int32 offsets, beginning with `first`."""
    ends = memoryview(offsets).cast("B").cast("i")
    spans = array("i")
    for index in range(first, first + count):
        spans.append(ends[index])
        spans.append(ends[index + 1])
    return spans
