"""Columns from spans and back: the pure-Python twin of `_columns.pyx`.

Arrow's variable-length columns are two buffers: the values end to end, and count + 1 int32 offsets.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from polybus.scan.batch import Buffer


def gather(buffers: Sequence[Buffer], spans: Sequence[array[int]]) -> tuple[bytes, bytes]:
    """Concatenate the spans of several buffers; return (values, int32 offsets)."""
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


def spans_of_offsets(offsets: Buffer, first: int, count: int) -> array[int]:
    """The spans of `count` messages of a column from its int32 offsets, starting at `first`."""
    ends = memoryview(offsets).cast("B").cast("i")
    spans = array("i")
    for index in range(first, first + count):
        spans.append(ends[index])
        spans.append(ends[index + 1])
    return spans
