"""Columns from spans and back: the pure-Python twin of `_columns.pyx`.

Arrow's variable-length columns are two buffers: the values end to end, and count + 1 int32 offsets.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from polybus.scan.batch import Buffer

WritableBuffer = bytearray | memoryview
Values: TypeAlias = "Sequence[bytes] | Sequence[str] | array[int]"
"""The values of runs: bytes, text or 64-bit numbers. Their counts are passed beside them."""
_Pairs = Sequence[tuple[bytes, int]]

STORED = b"\xff" * 8
"""The length field of an uncompressed buffer in a compressed message: -1."""
FRAME_START = bytes.fromhex("04224d18 60 70 73")
"""LZ4 frame: magic, version 1 with independent blocks, blocks of up to 4 MiB, header checksum."""
FRAME_END = bytes(4)
BLOCK_BYTES_MAX = 2 << 20
"""Half of the frame's maximum: a block that cannot be compressed grows a little."""
PACKED_BYTES_MIN = 64
MATCH_DISTANCE_MAX = 0xFFFF
MATCH_BYTES_MIN = 4
LITERALS_LAST = 12
"""LZ4: the last match of a block must start at least this many bytes before its end."""


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


def gather_into(
    buffers: Sequence[Buffer],
    spans: Sequence[array[int]],
    target: WritableBuffer,
    ends_at: int,
    values_at: int,
) -> int:
    """`gather` into `target`, which must be large enough; return the size of the values."""
    values, ends = gather(buffers, spans)
    _check_place(target, values_at, values)
    _put(target, ends_at, ends)
    _put(target, values_at, values)
    return len(values)


def ends_into(values: Values, counts: array[int], target: WritableBuffer, at: int) -> None:
    """Write the int32 offsets of a string column that repeats each value `count` times."""
    ends = array("i", [0])
    for value, count in _runs(values, counts):
        last = ends[-1]
        ends.extend([last + len(value) * number for number in range(1, count + 1)])
    _put(target, at, ends.tobytes())


def offsets_into(firsts: array[int], counts: array[int], target: WritableBuffer, at: int) -> None:
    """Write an int64 column that counts up from each of `firsts`, `count` rows each."""
    column = array("q")
    for first, count in zip(firsts, counts, strict=True):
        column.extend(range(first, first + count))
    _put(target, at, column.tobytes())


def _runs(values: Values, counts: array[int]) -> _Pairs:
    if any(count < 0 for count in counts):
        raise ValueError("a count cannot be negative")
    as_bytes = [value if isinstance(value, bytes) else _encoded(value) for value in values]
    return list(zip(as_bytes, counts, strict=True))


def _encoded(value: str | int) -> bytes:
    return value.encode() if isinstance(value, str) else value.to_bytes(8, "little", signed=True)


def _put(target: WritableBuffer, at: int, column: bytes) -> None:
    _check_place(target, at, column)
    target[at : at + len(column)] = column


def _check_place(target: WritableBuffer, at: int, column: bytes) -> None:
    if at < 0 or at + len(column) > len(target):
        raise IndexError("the column does not fit into its target")


def pack_runs(values: Values, counts: array[int]) -> bytes:
    """Each value repeated `count` times, as a buffer of a compressed Arrow message.

    That is an 8-byte length and an LZ4 frame, or -1 and the plain bytes if those are shorter; an
    empty column is empty. The repetitions are known, so the encoder neither searches for matches
    nor builds the column.
    """
    runs = _runs(values, counts)
    size = sum(len(value) * count for value, count in runs)
    if size == 0:
        return b""
    longest = max(len(value) for value, _ in runs)
    if size >= PACKED_BYTES_MIN and longest <= MATCH_DISTANCE_MAX:
        frame = FRAME_START
        for block in _blocks_of(runs):
            packed = _pack_block(block)
            frame += len(packed).to_bytes(4, "little") + packed
        frame += FRAME_END
        if len(frame) < size:
            return size.to_bytes(8, "little") + frame
    return STORED + b"".join(value * count for value, count in runs)


def _blocks_of(runs: _Pairs) -> list[list[tuple[bytes, int]]]:
    """Split the runs into LZ4 blocks; no value may be longer than a block."""
    blocks: list[list[tuple[bytes, int]]] = [[]]
    room = BLOCK_BYTES_MAX
    for value, count in runs:
        while value and count:
            fits = min(count, room // len(value))
            if fits:
                blocks[-1].append((value, fits))
                room -= fits * len(value)
                count -= fits
            else:
                blocks.append([])
                room = BLOCK_BYTES_MAX
    return blocks


def _pack_block(runs: _Pairs) -> bytes:
    """An LZ4 block: each value is one literal, and its repetitions are one match."""
    size = sum(len(value) * count for value, count in runs)
    packed = b""
    literals = b""
    at = 0
    for value, count in runs:
        literals += value
        at += len(value)
        repeated = len(value) * (count - 1)
        matched = min(repeated, size - LITERALS_LAST - at)
        if matched >= MATCH_BYTES_MIN:
            packed += _literals(literals, matched - MATCH_BYTES_MIN)
            packed += len(value).to_bytes(2, "little") + _length(matched - MATCH_BYTES_MIN)
            literals = b""
        else:
            matched = 0
        literals += (value * count)[len(value) + matched :]
        at += repeated
    return packed + _literals(literals, 0)


def _literals(literals: bytes, match: int) -> bytes:
    """The token of a sequence, which holds both lengths if small, and its literals."""
    token = min(len(literals), 15) << 4 | min(match, 15)
    return bytes([token]) + _length(len(literals)) + literals


def _length(length: int) -> bytes:
    """The rest of a length that does not fit the token."""
    if length < 15:
        return b""
    return b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])


def spans_of_offsets(offsets: Buffer, first: int, count: int) -> array[int]:
    """The spans of `count` messages of a column from its int32 offsets, starting at `first`."""
    ends = memoryview(offsets).cast("B").cast("i")
    spans = array("i")
    for index in range(first, first + count):
        spans.append(ends[index])
        spans.append(ends[index + 1])
    return spans
