"""The log's rows: their schema, and columns made of batches without touching single messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa

from polybus import names, scan
from polybus.batch import Batch

SCHEMA = pa.schema(
    [
        ("account", pa.string()),
        ("topic", pa.string()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("protocol", pa.string()),
        ("sender", pa.string()),
    ]
)
_HEADERS_TYPE = SCHEMA.field("headers").type

Runs = Sequence[tuple[bytes, int]]


class Columns:
    """Turns batches into rows."""

    def __init__(self) -> None:
        self._nulls = Nulls()

    @classmethod
    def one_row(cls) -> pa.RecordBatch:
        """A row without key and headers, to learn from how such rows are laid out."""
        return cls().rows([Batch.of("t", [b"v"])], [(b"t", 1)], [(0, 1)])

    def rows(
        self, batches: Sequence[Batch], topic_runs: Runs, offset_runs: Sequence[tuple[int, int]]
    ) -> pa.RecordBatch:
        """The rows of the batches, in their order; topics and offsets are given as runs."""
        counts = [len(batch.spans) // 2 for batch in batches]
        count = sum(counts)
        times_us = [(b.timestamp_us, n) for b, n in zip(batches, counts, strict=True)]
        protocols, senders = _origins(batches, counts)
        columns = [
            _strings([(names.ACCOUNT.encode(), count)], count),
            _strings(topic_runs, count),
            _integers(scan.offset_runs(offset_runs), 2, count),
            _integers(scan.integer_runs(times_us), 3, count),
            self._keys(batches, count),
            _binaries(*scan.gather([b.buffer for b in batches], [b.spans for b in batches]), count),
            self._headers(batches, count),
            _strings(protocols, count),
            _strings(senders, count),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _keys(self, batches: Sequence[Batch], rows: int) -> Any:
        if all(batch.keys is None for batch in batches):
            return self._nulls.binary(rows)
        pieces = []
        for absent, run in groupby(batches, lambda batch: batch.keys is None):
            if absent:
                pieces.append(self._nulls.binary(sum(map(len, run))))
            else:
                pieces.append(pa.array([key for b in run for key in b.keys or ()], pa.binary()))
        return pa.concat_arrays(pieces)

    def _headers(self, batches: Sequence[Batch], rows: int) -> Any:
        if all(batch.headers is None for batch in batches):
            return self._nulls.headers(rows)
        pieces = []
        for absent, run in groupby(batches, lambda batch: batch.headers is None):
            if absent:
                pieces.append(self._nulls.headers(sum(map(len, run))))
            else:
                maps = [list(one.items()) if one else None for b in run for one in b.headers or ()]
                pieces.append(pa.array(maps, _HEADERS_TYPE))
        return pa.concat_arrays(pieces)


class Nulls:
    """Columns without a value in them, over one block of zeros that all of them share."""

    def __init__(self) -> None:
        self._zeros = pa.py_buffer(bytes(1 << 16))
        self._empty = pa.py_buffer(b"")
        self._no_items = pa.StructArray.from_arrays(
            [pa.array([], pa.string()), pa.array([], pa.binary())],
            fields=[_HEADERS_TYPE.key_field, _HEADERS_TYPE.item_field],
        )

    def binary(self, rows: int) -> Any:
        zeros = self._zeros_for(rows)
        buffers = [zeros, zeros, self._empty]
        return pa.Array.from_buffers(pa.binary(), rows, buffers, null_count=rows)

    def headers(self, rows: int) -> Any:
        zeros = self._zeros_for(rows)
        return pa.Array.from_buffers(
            _HEADERS_TYPE, rows, [zeros, zeros], null_count=rows, children=[self._no_items]
        )

    def _zeros_for(self, rows: int) -> Any:
        if self._zeros.size < 4 * (rows + 1):
            self._zeros = pa.py_buffer(bytes(8 * (rows + 1)))
        return self._zeros


def _origins(
    batches: Sequence[Batch], counts: Sequence[int]
) -> tuple[list[tuple[bytes, int]], list[tuple[bytes, int]]]:
    """The runs of protocols and of senders; batches of one peer in a row are one run."""
    protocols: list[tuple[bytes, int]] = []
    senders: list[tuple[bytes, int]] = []
    protocol, sender = batches[0].protocol, batches[0].sender
    run = 0
    for batch, count in zip(batches, counts, strict=True):
        if batch.sender != sender or batch.protocol != protocol:
            protocols.append((protocol.encode(), run))
            senders.append((sender.encode(errors="replace"), run))
            protocol, sender = batch.protocol, batch.sender
            run = 0
        run += count
    protocols.append((protocol.encode(), run))
    senders.append((sender.encode(errors="replace"), run))
    return protocols, senders


def _strings(runs: Runs, rows: int) -> Any:
    values, offsets = scan.string_runs(runs)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.string(), rows, buffers, null_count=0)


def _binaries(values: bytes, offsets: bytes, rows: int) -> Any:
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), rows, buffers, null_count=0)


def _integers(column: bytes, field: int, rows: int) -> Any:
    buffers = [None, pa.py_buffer(column)]
    return pa.Array.from_buffers(SCHEMA.field(field).type, rows, buffers, null_count=0)
