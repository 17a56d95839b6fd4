"""The formats of an answer: JSON, CSV, JSON lines, Parquet and Arrow, a piece at a time."""

import csv
import io
from collections.abc import Iterable, Iterator
from datetime import date, time, timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from polybus.lake.values import plain
from polybus.services.queries.jobs import Form

JSON_BYTES_MAX = 16 << 20
"""Limit of an answer as one JSON document, which a page holds completely."""
PIECE_ROWS = 10_000
PIECE_BYTES = 8 << 20


def for_browser(value: Any) -> Any:
    """A value for JSON, within the limits of JavaScript."""
    return plain(value, _for_browser)


def _for_browser(value: Any) -> Any:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, int) and abs(value) >= 1 << 53:
        # JavaScript has no integers of this size.
        return str(value)
    return value


class JsonAnswer:
    """Columns and rows as one JSON document, up to a number of rows and JSON_BYTES_MAX.

    Attributes:
        is_truncated: there were more rows.
    """

    def __init__(self, schema: pa.Schema, rows_max: int) -> None:
        self._columns = [{"name": one.name, "type": str(one.type)} for one in schema]
        self._rows_max = rows_max
        self._rows: list[bytes] = []
        self._bytes = 0
        self.is_truncated = False

    def add(self, batch: pa.RecordBatch) -> bool:
        """Add rows; False if there is no room for more."""
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            if len(self._rows) >= self._rows_max or self._bytes > JSON_BYTES_MAX:
                self.is_truncated = True
                return False
            encoded = msgspec.json.encode([for_browser(one) for one in row])
            self._bytes += len(encoded)
            self._rows.append(encoded)
        return True

    def document(self, **about: Any) -> bytes:
        head = msgspec.json.encode(
            {
                "columns": self._columns,
                "row-count": len(self._rows),
                "truncated": self.is_truncated,
                **about,
            }
        )
        return head[:-1] + b',"rows":[' + b",".join(self._rows) + b"]}"


class _Pieces(io.RawIOBase):
    """Keeps written bytes until they are taken, and counts the total for Parquet's footer."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._written += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._written

    def take(self) -> bytes:
        data, self._pieces = b"".join(self._pieces), []
        return data


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches large enough for a piece of a file, or a row group, each."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= PIECE_ROWS or size >= PIECE_BYTES:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches()
            held, rows, size = [], 0, 0
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def encoded(form: Form, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """Rows as a file of this format, in pieces."""
    sink = _Pieces()
    batches = joined(batches)
    match form:
        case "csv":
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(schema.names)
            for batch in batches:
                columns = [column.to_pylist() for column in batch.columns]
                writer.writerows([_cell(one) for one in row] for row in zip(*columns, strict=True))
                yield text.getvalue().encode()
                text.seek(0)
                text.truncate()
            yield text.getvalue().encode()
        case "parquet":
            with pq.ParquetWriter(sink, schema, compression="zstd") as file:
                for batch in batches:
                    file.write_batch(batch)
                    yield sink.take()
            yield sink.take()
        case "arrow":
            with pa.ipc.new_stream(sink, schema) as stream:
                for batch in batches:
                    stream.write_batch(batch)
                    yield sink.take()
            yield sink.take()
        case _:
            for batch in batches:
                yield b"".join(
                    msgspec.json.encode(for_browser(row)) + b"\n" for row in batch.to_pylist()
                )


def _cell(value: Any) -> Any:
    value = for_browser(value)
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        # A spreadsheet would evaluate it as a formula.
        return f"'{value}"
    return value
