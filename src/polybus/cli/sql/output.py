"""Rows on standard output: a table, JSON or CSV, as they come."""

from __future__ import annotations

import base64
import csv
import sys
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import click
import msgspec
import pyarrow as pa

from polybus.cli.output import echo_table, shown

CELL_CHARS_MAX = 80


class Limited:
    """Batches up to so many rows. Afterwards `count` says how many, `more` if there were others."""

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


def echo_rows(schema: pa.Schema, batches: Limited) -> None:
    """A table for people. All of it is held, to know the columns' widths: it needs a limit."""
    rows = [[_cell(value) for value in row] for batch in batches for row in _rows(batch)]
    echo_table(schema.names, rows)


def echo_json_rows(batches: Limited) -> None:
    """One array of objects, one on a line, written as rows come."""
    out = sys.stdout.buffer
    separator = b"[\n"
    for batch in batches:
        for row in batch.to_pylist():
            out.write(separator + msgspec.json.encode(plain(row)))
            separator = b",\n"
    out.write(b"[]\n" if separator == b"[\n" else b"\n]\n")
    out.flush()


def echo_csv(schema: pa.Schema, batches: Limited) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(schema.names)
    for batch in batches:
        writer.writerows([_csv_cell(value) for value in row] for row in _rows(batch))
    click.echo("", nl=False)


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes as text, or {"base64": …} if not UTF-8; maps as objects."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
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
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return value
    if isinstance(value, Decimal):
        return plain(value)
    text = _text(value)
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def _text(value: Any) -> str:
    """On one line, and nothing in it that could steer the terminal."""
    if isinstance(value, bytes):
        return shown(value)
    if isinstance(value, str):
        return shown(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, datetime):
        return value.isoformat(sep=" ").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, list | dict):
        return shown(msgspec.json.encode(plain(value)))
    return str(value)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"base64:{base64.b64encode(value).decode()}"
    if isinstance(value, list | dict):
        return msgspec.json.encode(plain(value)).decode()
    return plain(value)
