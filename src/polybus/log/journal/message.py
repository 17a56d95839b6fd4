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
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import pyarrow as pa

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.log.columns import SCHEMA, TopicRows
from polybus.scan.columns_py import Values

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
# A flatbuffer string has its length before it and a zero after it. The note, JSON, has no zeros.
_DIGITS_ENTRY = len(DIGITS).to_bytes(4, "little") + DIGITS + b"\x00"
_STORED = struct.pack("<q", -1)
_LENGTH = struct.Struct("<q")
_HEADERS_MAX = 64
NO_OWNERS: Mapping[str, str] = {}


def own_pages(size: int) -> mmap.mmap:
    """Memory that returns to the system as soon as it is unused, without an allocator between."""
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
        """Encode the rows, with the note as metadata.

        Returns the bytes in pieces, and the position of the checksum digits in the first.
        """
        header = self._header(len(note))
        body = _MessageBody(self._room(header.size + rows.bytes_max), header.size)
        rows.write(body)
        header.write(body, note, rows.count, rows.nodes(header.nodes_of_one_row))
        return body.pieces(), header.digits_at

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


class _MessageBody:
    """A message's body while it is written: buffers, each at a multiple of 8."""

    def __init__(self, target: memoryview, start: int) -> None:
        self.target = target
        self.places: list[int] = []
        self.start = self.end = start
        self._beside: list[memoryview] = []
        self._beside_at = 0
        self._beside_bytes = 0

    @property
    def bytes(self) -> int:
        return self.end - self.start + self._beside_bytes

    def absent(self) -> None:
        self.places += (self.bytes, 0)

    def put(self, data: Buffer) -> None:
        """Add a buffer that already has its length prefix."""
        at = self._take(len(data))
        self.target[at : at + len(data)] = data

    def store(self, data: Buffer | None) -> None:
        """Add an uncompressed buffer."""
        size = 0 if data is None else memoryview(data).nbytes
        at = self.room(size)
        if data is not None and size:
            self.target[at : at + size] = memoryview(data).cast("B")

    def room(self, size: int) -> int:
        """Reserve an uncompressed buffer; return the position for its bytes."""
        if not size:
            self.absent()
            return self.end
        at = self._take(len(_STORED) + size)
        self.target[at : at + len(_STORED)] = _STORED
        return at + len(_STORED)

    def lay_beside(self, parts: list[memoryview], size: int) -> None:
        """Add an uncompressed buffer without copying it; at most one per body."""
        at = self.end
        self.places += (self.bytes, len(_STORED) + size)
        self.target[at : at + len(_STORED)] = _STORED
        self.end = self._beside_at = at + len(_STORED)
        padding = bytes(-size % 8)
        self._beside = [*parts, memoryview(padding)]
        self._beside_bytes = size + len(padding)

    def pieces(self) -> list[memoryview]:
        """All bytes of the message, including its header."""
        whole = self.target[: self.end]
        if not self._beside:
            return [whole]
        return [whole[: self._beside_at], *self._beside, whole[self._beside_at :]]

    def _take(self, size: int) -> int:
        at = self.end
        self.places += (self.bytes, size)
        padded = -(-size // 8) * 8
        self.target[at + size : at + padded] = bytes(padded - size)
        self.end = at + padded
        return at


class GroupedRows:
    """The rows of some batches, grouped by topic, as columns: most are runs of equal values.

    `topics` says which rows belong to which topic. Batches of one topic and epoch keep their order.
    """

    def __init__(self, batches: Iterable[Batch], owners: Mapping[str, str] = NO_OWNERS) -> None:
        """`owners` are the accounts of topics; one that is missing is the default account's."""
        self._batches, self.topics, columns = scan.rows_by_topic(batches, TopicRows, names.ACCOUNT)
        topic_names, firsts, topic_counts = columns
        accounts, account_counts = [names.ACCOUNT], array("q", [sum(topic_counts)])
        if owners:
            accounts = [owners.get(topic, names.ACCOUNT) for topic in topic_names]
            account_counts = topic_counts
            self.topics = tuple(
                rows._replace(account=account)
                for rows, account in zip(self.topics, accounts, strict=True)
            )
        self._offsets = firsts, topic_counts
        self.count = sum(topic_counts)
        times, protocols, (senders, sender_counts) = scan.merge_runs(self._batches)
        sender_bytes = [sender.encode(errors="replace") for sender in senders]
        self._texts: list[tuple[Values, array[int]]] = [
            (accounts, account_counts),
            (topic_names, topic_counts),
            protocols,
            (sender_bytes, sender_counts),
        ]
        self._packed = [scan.pack_runs(*runs) for runs in self._texts]
        self._times = scan.pack_runs(*times)
        self._validity = scan.pack_runs([b"\x00"], array("q", [-(-self.count // 8)]))
        self._no_lengths = scan.pack_runs([bytes(4)], array("q", [self.count + 1]))
        keys = [batch.keys for batch in self._batches]
        self._keys = _column(keys, map(len, self._batches), pa.binary())
        headers = [_entries(batch.headers) for batch in self._batches]
        header_type = SCHEMA.field("headers").type
        self._headers = _column(headers, map(len, self._batches), header_type)
        self._value_bytes = scan.weigh(self._batches, 0, 0)
        self._beside = self._value_bytes >= BESIDE_BYTES_MIN and self.count <= BESIDE_ROWS_MAX

    @property
    def bytes_max(self) -> int:
        packed = (*self._packed, self._times, *(self._validity, self._no_lengths) * 2)
        # Five columns' lengths of 4 bytes and an offset of 8; a length and padding per buffer.
        stored_bytes = (0 if self._beside else self._value_bytes) + 28 * (self.count + 1)
        for column in (self._keys, self._headers):
            if column is not None:
                stored_bytes += sum(0 if one is None else one.size for one in column.buffers())
        return sum(map(len, packed)) + stored_bytes + 16 * 32

    def nodes(self, of_one_row: tuple[int, ...]) -> list[int]:
        """Row and null counts of each column and child: those of one row times the row count."""
        nodes = [self.count * one for one in of_one_row]
        if self._keys is not None:
            nodes[2 * _KEY_NODE + 1] = self._keys.null_count
        if self._headers is not None:
            nodes[2 * _HEADERS_NODE + 1] = self._headers.null_count
            for child in _CHILD_NODES:
                nodes[2 * child] = len(self._headers.keys)
        return nodes

    def write(self, body: _MessageBody) -> None:
        self._text(body, 0)
        self._text(body, 1)
        body.absent()
        scan.offsets_into(*self._offsets, body.target, body.room(8 * self.count))
        body.absent()
        body.put(self._times)
        if self._keys is None:
            self._nulls(body)
        else:
            _store(body, self._keys)
        body.absent()
        self._values(body)
        if self._headers is None:
            self._no_headers(body)
        else:
            _store(body, self._headers)
        self._text(body, 2)
        self._text(body, 3)

    def _no_headers(self, body: _MessageBody) -> None:
        """A null column, and its empty columns of keys and values."""
        self._nulls(body)
        for _ in range(2):
            body.absent()
            body.put(_STORED + bytes(4))
            body.absent()

    def _text(self, body: _MessageBody, index: int) -> None:
        """A column of repeated text: uncompressed lengths, compressed characters."""
        body.absent()
        scan.ends_into(*self._texts[index], body.target, body.room(4 * (self.count + 1)))
        body.put(self._packed[index])

    def _nulls(self, body: _MessageBody) -> None:
        body.put(self._validity)
        body.put(self._no_lengths)
        body.absent()

    def _values(self, body: _MessageBody) -> None:
        if self._beside:
            parts, ends = _values_of(self._batches)
            body.store(ends.tobytes())
            body.lay_beside(parts, self._value_bytes)
            return
        ends_at = body.room(4 * (self.count + 1))
        values_at = body.room(self._value_bytes)
        scan.gather_into(
            [batch.buffer for batch in self._batches],
            [batch.spans for batch in self._batches],
            body.target,
            ends_at,
            values_at,
        )


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


def _store(body: _MessageBody, column: Any) -> None:
    # It was built from whole lists, so it begins with the first row of its buffers.
    assert not column.offset
    for buffer in column.buffers():
        body.store(buffer)


def _values_of(batches: list[Batch]) -> tuple[list[memoryview], array[int]]:
    """Views of the values, and the column's int32 offsets."""
    parts = []
    ends = array("i", [0])
    for batch in batches:
        whole = memoryview(batch.buffer).cast("B")
        for start, stop in zip(batch.spans[::2], batch.spans[1::2], strict=True):
            parts.append(whole[start:stop])
            ends.append(ends[-1] + len(parts[-1]))
    return parts, ends


class _Header:
    """The header of a message for a note of some size, and the positions of its counts.

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
        self._before, self._after = data.split(note)
        table = PREFIX_BYTES + _unsigned(data, PREFIX_BYTES)
        batch_at = _field(data, table, 2)
        batch = batch_at + _unsigned(data, batch_at)
        self._body_bytes_at = _field(data, table, 3)
        self._row_count_at = _field(data, batch, 0)
        nodes_at = _vector(data, _field(data, batch, 1))
        places_at = _vector(data, _field(data, batch, 2))
        self._nodes_at, self._places_at = nodes_at + 4, places_at + 4
        self._nodes = struct.Struct(f"<{2 * _unsigned(data, nodes_at)}q")
        self._places = struct.Struct(f"<{2 * _unsigned(data, places_at)}q")
        self.nodes_of_one_row: tuple[int, ...] = self._nodes.unpack_from(data, self._nodes_at)

    def write(self, body: _MessageBody, note: bytes, row_count: int, nodes: list[int]) -> None:
        """Write the header with the counts of this body in place of those of one row."""
        target = body.target
        note_at = len(self._before)
        target[:note_at] = self._before
        target[note_at : note_at + len(note)] = note
        target[note_at + len(note) : self.size] = self._after
        _LENGTH.pack_into(target, self._body_bytes_at, body.bytes)
        _LENGTH.pack_into(target, self._row_count_at, row_count)
        self._nodes.pack_into(target, self._nodes_at, *nodes)
        self._places.pack_into(target, self._places_at, *body.places)


@functools.cache
def _one_row() -> pa.RecordBatch:
    # Lazily: pyarrow may import pandas for this, and not every process that imports us writes.
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
    # A separate writer, because the rows stay in its memory.
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
