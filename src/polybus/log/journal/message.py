# cython: annotation_typing=False
"""The bytes of a commit's record batch message: which buffers are compressed.

pyarrow compresses all buffers of a message or none. In rows of small messages half of the bytes are
repeated columns (account, topic, protocol, sender, time), which LZ4 compresses to almost nothing at
little cost; but trying the values too takes longer than the rest of a commit. The Arrow format
allows uncompressed buffers in a compressed message, so values, keys, headers, offsets and lengths
are stored uncompressed. Every Arrow reader understands it.

So we take the header that pyarrow writes for one row of the same shape, and fill in our own counts
and buffer positions.

A few large values are not copied: they stay in their batches, and the message is several pieces.
"""

from __future__ import annotations

import functools
import mmap
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import pyarrow as pa

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.log.columns import SCHEMA, TopicRows

COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
PREFIX_BYTES = 8
DIGITS = b"0" * 16
SCRATCH_BYTES = 1 << 20
SCRATCH_BYTES_MAX = 16 << 20
_SCHEMA_BYTES = SCHEMA.serialize().size
BESIDE_BYTES_MIN = 4 << 20
BESIDE_ROWS_MAX = 1024
"""From this size and up to this row count, values are not copied."""
# Indexes of columns among the nodes; the three children of `headers` follow it.
_KEY_NODE, _HEADERS_NODE, _CHILD_NODES = 4, 6, (7, 8, 9)
# A flatbuffer string has its length before it and a zero after it. JSON metadata has no zeros.
_DIGITS_ENTRY = len(DIGITS).to_bytes(4, "little") + DIGITS + b"\x00"
_HEADERS_TYPE = SCHEMA.field("headers").type
_LENGTH = struct.Struct("<q")
_HEADERS_MAX = 64
NO_OWNERS: Mapping[str, str] = {}


def own_pages(size: int) -> mmap.mmap:
    """Memory that returns to the system as soon as it is freed, because no allocator keeps it."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class MessageWriter:
    """Writes messages into a buffer that the next message overwrites.

    Reused memory is in the caches; fresh memory costs ten times as much. The buffer is mapped
    pages, so that those of a large message return to the system.
    """

    def __init__(self) -> None:
        self._scratch = own_pages(SCRATCH_BYTES)
        self._headers: dict[int, _Header] = {}

    def write(self, rows: GroupedRows, note: bytes) -> tuple[list[memoryview], int]:
        """Encode the rows, with this metadata.

        Returns the bytes in pieces, and the position of the checksum digits in the first.
        """
        header = self._header(len(note))
        target, places = rows.write(header.size, self._room)
        body_bytes = header.write(target, note, rows, places)
        return rows.pieces(target, header.size, body_bytes, places), header.digits_at

    def _header(self, note_bytes: int) -> _Header:
        header = self._headers.get(note_bytes)
        if header is None:
            if len(self._headers) == _HEADERS_MAX:
                self._headers.clear()
            header = self._headers[note_bytes] = _Header(note_bytes)
        return header

    def _room(self, size: int) -> memoryview:
        has = len(self._scratch)
        if has < size or has > SCRATCH_BYTES_MAX > size:
            spare = size // 4 if size <= SCRATCH_BYTES_MAX else 0
            self._scratch = own_pages(max(size + spare, SCRATCH_BYTES))
        return memoryview(self._scratch)


class GroupedRows:
    """The rows of some batches, grouped by topic.

    `topics` says which rows belong to which topic. Batches of one topic and epoch keep their order.
    """

    def __init__(self, batches: Iterable[Batch], owners: Mapping[str, str] = NO_OWNERS) -> None:
        """`owners` has the accounts of topics; a missing one means the default account."""
        self._batches, self.topics, self._runs = scan.rows_by_topic(
            batches, TopicRows, names.ACCOUNT
        )
        topic_names, _, counts = self._runs
        self.count = sum(counts)
        self._accounts, self._account_counts = [names.ACCOUNT], array("q", [self.count])
        if owners:
            self._accounts = [owners.get(topic, names.ACCOUNT) for topic in topic_names]
            self._account_counts = counts
            self.topics = tuple(
                rows._replace(account=account)
                for rows, account in zip(self.topics, self._accounts, strict=True)
            )
        self._keys = self._headers = None
        if scan.have_extras(self._batches):
            row_counts = [len(batch) for batch in self._batches]
            keys = [batch.keys for batch in self._batches]
            self._keys = _column(keys, row_counts, pa.binary())
            headers = [_entries(batch.headers) for batch in self._batches]
            self._headers = _column(headers, row_counts, _HEADERS_TYPE)
        self._value_bytes = scan.weigh(self._batches, 0, 0)
        self._is_beside = self._value_bytes >= BESIDE_BYTES_MIN and self.count <= BESIDE_ROWS_MAX

    def nodes(self) -> dict[int, int]:
        """By index, the row and null counts that are not the row count times those of one row."""
        found = {}
        if self._keys is not None:
            found[2 * _KEY_NODE + 1] = self._keys.null_count
        if self._headers is not None:
            found[2 * _HEADERS_NODE + 1] = self._headers.null_count
            for child in _CHILD_NODES:
                found[2 * child] = len(self._headers.keys)
        return found

    def write(self, start: int, room: Callable[[int], memoryview]) -> tuple[memoryview, array[int]]:
        """Write the body of a message, from `start` on, into what `room` gives for a size.

        Returns the target, and for each buffer its position in the body and its size.
        """
        return scan.write_rows(
            self._batches,
            self._accounts,
            self._account_counts,
            self._runs,
            _buffers_of(self._keys),
            _buffers_of(self._headers),
            self._is_beside,
            start,
            room,
        )

    def pieces(
        self, target: memoryview, start: int, body_bytes: int, places: array[int]
    ) -> list[memoryview]:
        """All bytes of a message whose body begins at `start`."""
        stop = start + body_bytes
        if not self._is_beside:
            return [target[:stop]]
        padding = bytes(-self._value_bytes % 8)
        stop -= self._value_bytes + len(padding)
        values_at = start + places[2 * scan.VALUES_BUFFER] + len(scan.STORED)
        parts = [*_values_of(self._batches), memoryview(padding)]
        return [target[:values_at], *parts, target[values_at:stop]]


def _entries(headers: Sequence[Mapping[str, bytes] | None] | None) -> list[Any] | None:
    if headers is None:
        return None
    return [list(one.items()) if one else None for one in headers]


def _column(parts: list[Any], counts: Iterable[int], kind: pa.DataType) -> Any:
    """The column of the batches' keys or headers; None if no row has any."""
    if parts.count(None) == len(parts):
        return None
    pieces = []
    for absent, run in groupby(zip(parts, counts, strict=True), lambda one: one[0] is None):
        if absent:
            pieces.append(pa.nulls(sum(count for _, count in run), kind))
        else:
            pieces.append(pa.array(list(chain.from_iterable(part for part, _ in run)), kind))
    return pa.concat_arrays(pieces)


def _buffers_of(column: Any) -> list[memoryview | None] | None:
    if column is None:
        return None
    # It was built from whole lists, so it begins with the first row of its buffers.
    assert not column.offset
    return [None if buffer is None else memoryview(buffer) for buffer in column.buffers()]


def _values_of(batches: list[Batch]) -> list[memoryview]:
    """Views of the values."""
    parts = []
    for batch in batches:
        whole = memoryview(batch.buffer).cast("B")
        for start, stop in zip(batch.spans[::2], batch.spans[1::2], strict=True):
            parts.append(whole[start:stop])
    return parts


class _Header:
    """The header of a message with metadata of some size, and the positions of its counts.

    The flatbuffer tables are `Message` (field 2 the record batch, field 3 the body's length) and
    `RecordBatch` (field 0 the row count, 1 the nodes, 2 the buffers). A node has the row count and
    the null count of a column or of its child.
    """

    def __init__(self, note_bytes: int) -> None:
        note = b"~" * note_bytes
        message = _by_pyarrow(_one_row(), note)
        self.digits_at = message.index(_DIGITS_ENTRY) + 4
        data = bytes(message[: PREFIX_BYTES + _unsigned(message, 4)])
        self.size = len(data)
        self._template = data
        table = PREFIX_BYTES + _unsigned(data, PREFIX_BYTES)
        batch_at = _field(data, table, 2)
        batch = batch_at + _unsigned(data, batch_at)
        nodes_at = _vector(data, _field(data, batch, 1))
        places_at = _vector(data, _field(data, batch, 2))
        self._nodes_at = nodes_at + 4
        body_bytes_at, row_count_at = _field(data, table, 3), _field(data, batch, 0)
        self._fields = array(
            "q", [data.index(note), body_bytes_at, row_count_at, nodes_at + 4, places_at + 4]
        )
        nodes_stop = self._nodes_at + 16 * _unsigned(data, nodes_at)
        self._nodes = array("q", data[self._nodes_at : nodes_stop])

    def write(self, target: memoryview, note: bytes, rows: GroupedRows, places: array[int]) -> int:
        """Write the header with the counts of these rows; return the size of the body."""
        body_bytes = scan.write_header(
            target, self._template, note, self._fields, self._nodes, rows.count, places
        )
        for index, number in rows.nodes().items():
            _LENGTH.pack_into(target, self._nodes_at + 8 * index, number)
        return body_bytes


@functools.cache
def _one_row() -> pa.RecordBatch:
    # Lazily: pyarrow may import pandas for this, and some processes that import this never write.
    row = {"account": "a", "topic": "t", "offset": 0, "timestamp": 0, "value": b"v"}
    row |= {"protocol": "p", "sender": "s"}
    return pa.RecordBatch.from_pylist([row], schema=SCHEMA)


def read_rows(message: Buffer) -> pa.RecordBatch:
    """The rows of a message, over the same memory."""
    found = pa.ipc.read_message(pa.BufferReader(pa.py_buffer(message)))
    return pa.ipc.read_record_batch(found, SCHEMA)


def rows_of(batch: Batch) -> pa.RecordBatch:
    """The rows of a batch that has offsets; a batch that was read from rows returns these."""
    if batch.stored is not None:
        return batch.stored
    # A separate writer, because the rows refer to its memory.
    pieces, _ = MessageWriter().write(GroupedRows([batch]), b" " * 64)
    return read_rows(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _by_pyarrow(rows: pa.RecordBatch, note: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, SCHEMA, options=COMPRESSED)
    writer.write_batch(rows, custom_metadata={"polybus.commit": note, "polybus.xxh3": DIGITS})
    return bytes(sink.getvalue().to_pybytes()[_SCHEMA_BYTES:])


def _unsigned(data: Buffer, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _field(data: bytes, table: int, number: int) -> int:
    to_fields = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    at = to_fields + 4 + 2 * number
    return table + int.from_bytes(data[at : at + 2], "little")


def _vector(data: bytes, at: int) -> int:
    return at + _unsigned(data, at)
