"""Boson properties: the pure-Python twin of `_properties.pyx`.

Most messages of a publisher differ in their last value only. Once the codec has decoded one, it
knows the head they share (all bytes before the last value's length) and scans for more of them.
"""

from __future__ import annotations

import struct
from array import array

from polybus.scan.batch import Buffer

_INT32 = struct.Struct(">i")


def scan_properties(
    buffer: Buffer, start: int, stop: int, head: bytes, value_bytes_max: int
) -> tuple[int, array[int]]:
    """Scan `buffer[start:stop]` for messages that are `head` and one more value.

    Returns where the first other message begins (another head, an invalid length, incomplete), and
    the spans of the values before it.
    """
    spans: array[int] = array("i")
    view = memoryview(buffer)
    head_bytes = len(head)
    while stop - start >= head_bytes + _INT32.size and view[start : start + head_bytes] == head:
        value = start + head_bytes + _INT32.size
        length: int = _INT32.unpack_from(view, value - _INT32.size)[0]
        if not 0 <= length <= min(value_bytes_max, stop - value):
            break
        start = value + length
        spans.extend((value, start))
    return start, spans


def encode_properties(
    head: bytes, middle: bytes, buffer: Buffer, spans: array[int], epoch: int, first_offset: int
) -> bytes:
    """Each span of `buffer` as a message: `head`, its position as a value, `middle`, its value."""
    if epoch < 0 or first_offset < 0:
        raise ValueError("a message needs a position")
    view = memoryview(buffer)
    parts: list[Buffer] = []
    for index in range(0, len(spans), 2):
        position = b"%d:%d" % (epoch, first_offset + index // 2)
        value = view[spans[index] : spans[index + 1]]
        parts += (head, _INT32.pack(len(position)), position)
        parts += (middle, _INT32.pack(len(value)), value)
    return b"".join(parts)
