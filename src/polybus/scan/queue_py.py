"""Queue messages: the pure-Python twin of `_queue.pyx`.

On the wire a message is its length, 4 bytes big-endian and signed, then its bytes.
"""

from __future__ import annotations

import struct
from array import array

from polybus.scan.batch import Buffer

LENGTH = struct.Struct(">i")
LENGTH_BYTES = 4


def scan_queue(
    buffer: Buffer, start: int, stop: int, message_bytes_max: int
) -> tuple[int, array[int]]:
    """Scan `buffer[start:stop]`; return where it stopped, and the spans of the messages.

    The scan stops at the first message that is incomplete, or whose length is negative or over the
    limit; the caller handles that one.
    """
    spans = array("i")
    while stop - start >= LENGTH_BYTES:
        (length,) = LENGTH.unpack_from(buffer, start)
        end = start + LENGTH_BYTES + length
        if not 0 <= length <= message_bytes_max or end > stop:
            break
        spans.append(start + LENGTH_BYTES)
        spans.append(end)
        start = end
    return start, spans


def split_queue(
    buffer: Buffer, start: int, stop: int, message_bytes_max: int
) -> tuple[int, list[bytes]]:
    """Like `scan_queue`, with each message as bytes."""
    end, spans = scan_queue(buffer, start, stop, message_bytes_max)
    view = memoryview(buffer)
    return end, [bytes(view[spans[i] : spans[i + 1]]) for i in range(0, len(spans), 2)]


def encode_queue(buffer: Buffer, spans: array[int]) -> bytes:
    """Each span of `buffer` as a message on the wire."""
    view = memoryview(buffer)
    parts: list[Buffer] = []
    for index in range(0, len(spans), 2):
        message = view[spans[index] : spans[index + 1]]
        parts += (LENGTH.pack(len(message)), message)
    return b"".join(parts)


def join_queue(
    messages: list[bytes], first: int, run_bytes_max: int, message_bytes_max: int
) -> tuple[int, bytes]:
    """Encode a run of `messages` from `first` on; return where it ended, and its bytes.

    The run ends before a message over `message_bytes_max`, or one that would exceed
    `run_bytes_max`; it is empty if that is the first one.
    """
    parts: list[bytes] = []
    run_bytes = 0
    while first < len(messages):
        message = messages[first]
        run_bytes += LENGTH_BYTES + len(message)
        if len(message) > message_bytes_max or run_bytes > run_bytes_max:
            break
        parts += (LENGTH.pack(len(message)), message)
        first += 1
    return first, b"".join(parts)
