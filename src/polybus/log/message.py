"""The bytes of a commit's record batch message, each buffer stored as it pays.

Arrow compresses all buffers of a message or none. Half of a small message's row is columns that
repeat (account, topic, protocol, sender, time), and LZ4 makes nothing of them almost for free; but
trying the values too costs more time than all the rest of a commit. Arrow's format allows each
buffer of a compressed message to be stored as it is, so that is what we do with values, offsets
and lengths. Every Arrow reader understands it.

pyarrow offers no such choice, so we take the header that it writes for one row of the same shape
and put in our own counts and buffer places. Rows with keys or headers are left to pyarrow alone.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import pyarrow as pa

from polybus.log.columns import SCHEMA, Columns

COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
PREFIX_BYTES = 8
_SCHEMA_BYTES = SCHEMA.serialize().size
_LZ4 = pa.Codec("lz4")
_STORED = struct.pack("<q", -1)
_LENGTH = struct.Struct("<q")
_PLACE = struct.Struct("<qq")
_ONE_ROW = Columns.one_row()


class Header(NamedTuple):
    """A message's flatbuffer header, and where in it our numbers go."""

    data: bytearray
    body_bytes_at: int
    row_count_at: int
    nodes_at: int
    node_count: int
    places_at: int
    place_count: int


class MessageWriter:
    """Writes messages into memory of its own, which the next message overwrites.

    Memory that is used again and again is warm; fresh memory costs ten times as much.
    """

    def __init__(self) -> None:
        self._scratch = pa.allocate_buffer(1 << 20)

    def write(self, rows: pa.RecordBatch, metadata: dict[str, bytes]) -> memoryview:
        if rows.column("key").null_count < len(rows):
            return self._by_pyarrow(rows, metadata)
        if rows.column("headers").null_count < len(rows):
            return self._by_pyarrow(rows, metadata)
        buffers = _buffers(rows)
        header = _header(metadata)
        assert header.place_count == len(buffers), "pyarrow lays rows out in another way"
        start = PREFIX_BYTES + len(header.data)
        end = start
        for number, pieces in enumerate(buffers):
            size = sum([len(piece) for piece in pieces])
            _PLACE.pack_into(header.data, header.places_at + 16 * number, end - start, size)
            end += -(-size // 8) * 8
        _patch(header, len(rows), end - start)
        target = self._room(end)
        target[:PREFIX_BYTES] = b"\xff\xff\xff\xff" + len(header.data).to_bytes(4, "little")
        target[PREFIX_BYTES:start] = header.data
        at = start
        for pieces in buffers:
            for piece in pieces:
                target[at : at + len(piece)] = piece
                at += len(piece)
            padding = -(at - start) % 8
            target[at : at + padding] = bytes(padding)
            at += padding
        return target

    def _by_pyarrow(self, rows: pa.RecordBatch, metadata: dict[str, bytes]) -> memoryview:
        size = pa.ipc.get_record_batch_size(rows) + sum(map(len, metadata.values()))
        # What LZ4 cannot compress it makes a little larger.
        self._room(_SCHEMA_BYTES + size + size // 128 + (16 << 10))
        sink = pa.FixedSizeBufferWriter(self._scratch)
        writer = pa.ipc.new_stream(sink, SCHEMA, options=COMPRESSED)
        writer.write_batch(rows, custom_metadata=metadata)
        return memoryview(self._scratch).cast("B")[_SCHEMA_BYTES : sink.tell()]

    def _room(self, size: int) -> memoryview:
        if self._scratch.size < size:
            self._scratch = pa.allocate_buffer(size + size // 4)
        return memoryview(self._scratch).cast("B")[:size]


def _buffers(rows: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """The body's buffers in the order of the schema, each as the pieces it is stored in."""
    row_count = len(rows)
    none: tuple[Any, ...] = ()
    validity = _packed(bytes(-(-row_count // 8)))
    no_lengths = _packed(bytes(4 * (row_count + 1)))
    columns = [rows.column(index).buffers() for index in range(len(SCHEMA))]
    account, topic, offset, timestamp, _, value, _, protocol, sender = columns
    empty_child = [none, _stored(bytes(4)), none]
    return [
        *_text(account),
        *_text(topic),
        *(none, _stored(offset[1])),
        *(none, _packed(timestamp[1])),
        *(validity, no_lengths, none),
        *(none, _stored(value[1]), _stored(value[2])),
        *(validity, no_lengths, none, *empty_child, *empty_child),
        *_text(protocol),
        *_text(sender),
    ]


def _text(buffers: list[Any]) -> tuple[tuple[Any, ...], ...]:
    """A column of repeating text: its lengths as they are, its characters packed."""
    return (), _stored(buffers[1]), _packed(buffers[2])


def _stored(data: Any) -> tuple[Any, ...]:
    return (_STORED, memoryview(data).cast("B")) if len(data) else ()


def _packed(data: Any) -> tuple[Any, ...]:
    if not len(data):
        return ()
    packed = memoryview(_LZ4.compress(data)).cast("B")
    return (_LENGTH.pack(len(data)), packed) if len(packed) < len(data) else _stored(data)


def _header(metadata: dict[str, bytes]) -> Header:
    """The header of one row with this metadata, taken apart.

    The flatbuffer tables are `Message` (field 2 the record batch, field 3 the body's length) and
    `RecordBatch` (field 0 the row count, 1 the nodes, 2 the buffers).
    """
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, SCHEMA, options=COMPRESSED)
    writer.write_batch(_ONE_ROW, custom_metadata=metadata)
    message = memoryview(sink.getvalue()).cast("B")[_SCHEMA_BYTES:]
    size = int.from_bytes(message[4:8], "little")
    data = bytearray(message[PREFIX_BYTES : PREFIX_BYTES + size])
    table = _unsigned(data, 0)
    batch_at = _field(data, table, 2)
    batch = batch_at + _unsigned(data, batch_at)
    nodes = _vector(data, _field(data, batch, 1))
    places = _vector(data, _field(data, batch, 2))
    return Header(
        data,
        body_bytes_at=_field(data, table, 3),
        row_count_at=_field(data, batch, 0),
        nodes_at=nodes + 4,
        node_count=_unsigned(data, nodes),
        places_at=places + 4,
        place_count=_unsigned(data, places),
    )


def _patch(header: Header, row_count: int, body_bytes: int) -> None:
    """Put our counts where those of one row stand: a node counts its rows and its nulls."""
    _LENGTH.pack_into(header.data, header.body_bytes_at, body_bytes)
    _LENGTH.pack_into(header.data, header.row_count_at, row_count)
    for number in range(header.node_count):
        at = header.nodes_at + 16 * number
        rows, nulls = _PLACE.unpack_from(header.data, at)
        _PLACE.pack_into(header.data, at, rows * row_count, nulls * row_count)


def _unsigned(data: bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _field(data: bytearray, table: int, number: int) -> int:
    to_fields = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    at = to_fields + 4 + 2 * number
    return table + int.from_bytes(data[at : at + 2], "little")


def _vector(data: bytearray, at: int) -> int:
    return at + _unsigned(data, at)
