"""Rows of a result on standard output: a table, JSON or CSV; JSON and CSV as the rows arrive."""

import csv
import sys
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from polybus.cli.output import as_json, echo_table, shown

CELL_CHARS_MAX = 80


class LimitedRows:
    """Batches up to a number of rows.

    Attributes:
        count: the rows given so far.
        more: whether there were more rows than the limit.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], rows_max: int | None) -> None:
        self.count = 0
        self.more = False
        self._batches = batches
        self._rows_max = rows_max

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            left = batch.num_rows if self._rows_max is None else self._rows_max - self.count
            self.more = batch.num_rows > left
            kept = batch.slice(0, left) if self.more else batch
            self.count += kept.num_rows
            if kept.num_rows:
                yield kept
            if self.more:
                return


def echo_rows(schema: pa.Schema, batches: LimitedRows) -> None:
    """A table. All rows are kept to find the width of each column, so it needs a limit."""
    rows = [[_cell(value) for value in row] for batch in batches for row in _rows(batch)]
    echo_table(schema.names, rows)


def echo_json_rows(batches: LimitedRows) -> None:
    """One array of objects, one object per line."""
    out = sys.stdout.buffer
    separator = b"[\n"
    for batch in batches:
        for row in batch.to_pylist():
            out.write(separator + msgspec.json.encode(plain(row)))
            separator = b",\n"
    out.write(b"[]\n" if separator == b"[\n" else b"\n]\n")
    out.flush()


def echo_csv(schema: pa.Schema, batches: LimitedRows) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(schema.names)
    for batch in batches:
        writer.writerows([_csv_cell(value) for value in row] for row in _rows(batch))
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes as text, or {"base64": …} if not UTF-8; maps as objects."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, bytes):
        carried = as_json(value)
        return carried.get("text", carried)
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) for one in value):
            return {str(plain(name)): plain(one) for name, one in value}
        return [plain(one) for one in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    return value


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*[column.to_pylist() for column in batch.columns], strict=True)


def _cell(value: Any) -> Any:
    """A number as it is, anything else as text of limited length."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Decimal):
        return plain(value)
    if isinstance(value, datetime):
        value = value.isoformat(sep=" ").replace("+00:00", "Z")
    elif isinstance(value, list | dict):
        value = msgspec.json.encode(plain(value))
    text = shown(value if isinstance(value, bytes) else str(value))
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def _csv_cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        return msgspec.json.encode(plain(value)).decode()
    value = plain(value)
    return f"base64:{value['base64']}" if isinstance(value, dict) else value
