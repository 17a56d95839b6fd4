"""The columns of a commit: the pure-Python twin of `_rows.pyx`.

A commit is a compressed Arrow message whose rows come from batches. Most columns repeat a few
values, so they are made of runs and packed; values, offsets and lengths are uncompressed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import TypeAlias, TypeVar

from polybus.scan.batch import Batch
from polybus.scan.columns_py import gather

Values: TypeAlias = "Sequence[bytes] | Sequence[str] | array[int]"
"""The values of runs: bytes, text or 64-bit numbers. Their counts are passed beside them."""
TopicRuns: TypeAlias = "tuple[list[str], array[int], array[int]]"
"""The topics' names, first offsets and row counts, as `rows_by_topic` returns them."""
Buffers = Sequence[memoryview | None]
_Pairs = Sequence[tuple[bytes, int]]
_V = TypeVar("_V")

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


VALUES_BUFFER = 15
"""The index of the values among the buffers of a body."""
BUFFERS = 31
# A column of no keys and headers has its nulls and lengths, and its two columns within have this.
_NO_ENTRIES = (b"", STORED + bytes(4), b"") * 2


def write_rows(  # noqa: PLR0913 - in C a record of them takes longer
    batches: list[Batch],
    accounts: list[str],
    account_counts: array[int],
    topics: TopicRuns,
    keys: Buffers | None,
    headers: Buffers | None,
    is_beside: bool,
    start: int,
    room: Callable[[int], memoryview],
) -> tuple[memoryview, array[int]]:
    """Write the rows of batches as the body of a message, from `start` on; return target, places.

    `room` gives the target for a size. Each buffer begins at a multiple of 8 and is followed by
    zeros; `places` has the position of each in the body, and its size. The batches are in the
    order of the topics. `keys` and `headers` are the buffers of these columns, None if no row has
    any. With `is_beside` the values are left out, but have their place: after its length field,
    the positions count on as if values and padding were there.
    """
    names, firsts, counts = topics
    rows = sum(len(batch.spans) // 2 for batch in batches)
    if sum(counts) != rows or sum(account_counts) != rows or len(firsts) != len(counts):
        raise ValueError("the topics and accounts are not those of the batches")
    offsets = array("q", chain.from_iterable(map(_counted, firsts, counts)))
    values, ends = gather([batch.buffer for batch in batches], [batch.spans for batch in batches])
    nulls = (
        pack_runs([b"\0"], array("q", [-(-rows // 8)])),
        pack_runs([bytes(4)], array("q", [rows + 1])),
        b"",
    )
    times = _merged([batch.timestamp_us for batch in batches], batches)
    protocols = _merged([batch.protocol for batch in batches], batches)
    senders = _merged([batch.sender.encode(errors="replace") for batch in batches], batches)
    before = [
        *_text(accounts, account_counts),
        *_text(names, counts),
        b"",
        _stored(offsets.tobytes()),
        b"",
        pack_runs(array("q", times[0]), times[1]),
        *(nulls if keys is None else _extras(keys, 3)),
        b"",
        STORED + ends,
    ]
    after = [
        *((*nulls, *_NO_ENTRIES) if headers is None else _extras(headers, 9)),
        *_text(*protocols),
        *_text(*senders),
    ]
    value = STORED if is_beside else _stored(values)
    body, places = _laid_out([*before, value, *after], len(values) if is_beside else None)
    target = room(start + len(body))
    if start < 0 or start + len(body) > len(target):
        raise IndexError("the columns do not fit into their target")
    target[start : start + len(body)] = body
    return target, places


def _laid_out(parts: list[bytes], beside: int | None) -> tuple[bytes, array[int]]:
    """Buffers, each with its padding, and their places; `beside` bytes of values are left out."""
    places = array("q")
    body = bytearray()
    skipped = 0
    for index, part in enumerate(parts):
        size = len(part)
        places.extend((len(body) + skipped, size))
        body += part + bytes(-size % 8)
        if index == VALUES_BUFFER and beside is not None:
            places[-1] += beside
            skipped = -(-beside // 8) * 8
    return bytes(body), places


def write_header(  # noqa: PLR0913 - in C a record of them takes longer
    target: memoryview,
    template: bytes,
    note: bytes,
    fields: array[int],
    nodes: array[int],
    rows: int,
    places: array[int],
) -> int:
    """Write the header of a message, with its own counts, and return the size of its body.

    `fields` are the positions of the note, the body's size, the row count, the nodes and the places
    in the template. `nodes` are the row and null counts of the columns of one row.
    """
    note_at, size_at, rows_at, nodes_at, places_at = fields
    body_bytes = places[-2] + -(-places[-1] // 8) * 8
    header = bytearray(template)
    for at, content in (
        (note_at, note),
        (size_at, array("q", [body_bytes]).tobytes()),
        (rows_at, array("q", [rows]).tobytes()),
        (nodes_at, array("q", [rows * one for one in nodes]).tobytes()),
        (places_at, places.tobytes()),
    ):
        if at < 0 or at + len(content) > len(template):
            raise IndexError("a field is outside the header")
        header[at : at + len(content)] = content
    target[: len(header)] = header
    return body_bytes


def _merged(values: list[_V], batches: Iterable[Batch]) -> tuple[list[_V], array[int]]:
    """A value of each batch as runs of rows."""
    runs: list[_V] = []
    counts = array("q")
    for value, batch in zip(values, batches, strict=True):
        if not runs or runs[-1] != value:
            runs.append(value)
            counts.append(0)
        counts[-1] += len(batch.spans) // 2
    return runs, counts


def _text(values: Values, counts: array[int]) -> tuple[bytes, bytes, bytes]:
    """A column of repeated text: no nulls, its lengths uncompressed, its characters packed."""
    lengths = chain.from_iterable(
        repeat(len(value), count) for value, count in _runs(values, counts)
    )
    ends = array("i", accumulate(lengths, initial=0))
    return b"", STORED + ends.tobytes(), pack_runs(values, counts)


def _extras(column: Buffers, count: int) -> list[bytes]:
    if len(column) != count:
        raise ValueError("the column has another number of buffers")
    return [b"" if buffer is None else _stored(bytes(buffer)) for buffer in column]


def _stored(content: bytes) -> bytes:
    return STORED + content if content else b""


def _counted(first: int, count: int) -> range:
    return range(first, first + count)


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


def _runs(values: Values, counts: array[int]) -> _Pairs:
    if any(count < 0 for count in counts):
        raise ValueError("a count cannot be negative")
    as_bytes = [value if isinstance(value, bytes) else _encoded(value) for value in values]
    return list(zip(as_bytes, counts, strict=True))


def _encoded(value: str | int) -> bytes:
    return value.encode() if isinstance(value, str) else value.to_bytes(8, "little", signed=True)
