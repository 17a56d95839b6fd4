"""Search in a topic: windows of offsets, one after the other, until enough is found or time is up.

A search ends after `limit` messages, FOUND_BYTES_MAX of values or `time_s`, and returns where the
next one continues. Masks are applied first: hidden fields cannot be found.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from polybus.log.columns import SCHEMA
from polybus.log.opening import open_reader
from polybus.services.masks import TopicMask
from polybus.services.queries.jobs import SearchJob, Visibility, path_steps

WINDOW_ROWS = 10_000
FIRST_WINDOW_ROWS = 500
"""The first window is small, and each next one twice as large: often the first few rows are enough,
and they may be large.
"""
FOUND_BYTES_MAX = 16 << 20
"""Limit of values, except in exports: the bus, and a page, hold all of them."""


class Search:
    """One search. `found` gives the rows; then `summary` says how far it got."""

    schema = SCHEMA

    def __init__(self, data: Path, job: SearchJob) -> None:
        self._data = data
        self._job = job
        self._reader = open_reader(data)
        bounds = self._reader.bounds(job.topic)
        self._start = max(job.start, bounds.start)
        self._stop = min(job.stop, bounds.stop)
        self._epoch = bounds.epoch
        self._mask = TopicMask(job.fields) if job.fields else None
        self._text = job.text.encode().lower()
        name, _, value = job.header.partition(":")
        self._header = (name.strip(), value.strip().encode())
        self._path = path_steps(job.path)
        self._count = self._bytes = 0
        self._window_rows = max(FIRST_WINDOW_ROWS, min(job.limit, WINDOW_ROWS))
        # The offsets that are not searched yet.
        self.left = (self._start, max(self._start, self._stop))
        self._began_s = time.monotonic()

    def summary(self) -> dict[str, Any]:
        """How far it got; `next` is where to continue, None if all was searched."""
        first, last = self.left
        is_newest = self._job.is_newest
        following = (last if is_newest else first) if first < last else None
        scanned = max(0, self._stop - self._start) - (last - first)
        elapsed_s = round(time.monotonic() - self._began_s, 4)
        return {
            "epoch": self._epoch,
            "scanned": scanned,
            "from": self._start,
            "to": self._stop,
            "next": following,
            "is-complete": following is None,
            "elapsed-s": elapsed_s,
        }

    def found(self) -> Iterator[pa.RecordBatch]:
        """The rows that match, in the order of the search."""
        is_newest = self._job.is_newest
        while self.left[0] < self.left[1]:
            first, last = self.left
            for rows in self._window():
                rows, is_enough = self._within_limits(rows)
                yield rows
                if is_enough:
                    offset = rows.column("offset")[-1].as_py()
                    self.left = (first, offset) if is_newest else (offset + 1, last)
                    return
            if self._job.time_s and time.monotonic() - self._began_s > self._job.time_s:
                return

    def _within_limits(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, bool]:
        """Up to as many of these rows as are still wanted, at least one; and whether that was the
        limit.
        """
        given = rows.num_rows
        rows = rows.slice(0, self._job.limit - self._count)
        if self._job.form is None:
            lengths = pc.binary_length(rows.column("value")).cast(pa.int64())
            sizes = pc.cumulative_sum(pc.fill_null(lengths, 0))
            fitting = pc.sum(pc.less_equal(sizes, FOUND_BYTES_MAX - self._bytes)).as_py()
            rows = rows.slice(0, max(1, fitting))
            self._bytes += sizes[rows.num_rows - 1].as_py()
        self._count += rows.num_rows
        return rows, rows.num_rows < given or self._count == self._job.limit

    def _window(self) -> Iterator[pa.RecordBatch]:
        """The rows of the next window that match."""
        first, last = self.left
        size = self._window_rows
        self._window_rows = min(2 * size, WINDOW_ROWS)
        if self._job.is_newest:
            start, stop = max(first, last - size), last
            self.left = (first, start)
        else:
            start, stop = first, min(last, first + size)
            self.left = (stop, last)
        newest: list[pa.RecordBatch] = []
        for rows in self._rows(start, stop):
            masked = rows if self._mask is None else self._mask.rows(rows)
            matching = list(self._matching(masked))
            if not matching:
                continue
            if not self._job.is_newest:
                yield masked.take(pa.array(matching))
                continue
            # Copies, so that other rows are freed; at most as many as can be wanted.
            newest.append(masked.take(pa.array(matching[::-1])))
            while sum(one.num_rows for one in newest[1:]) >= self._job.limit:
                del newest[0]
        yield from reversed(newest)

    def _rows(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The rows of a window; with an SQL condition, those for which it is true."""
        if not self._job.sql:
            yield from self._reader.read(self._job.topic, start, stop)
            return
        # DuckDB is optional, and only needed for conditions.
        from polybus.services.queries.engine import RestrictedEngine

        topic, masks = self._job.topic, {}
        if self._job.fields:
            masks = {topic: self._job.fields}
        visibility = Visibility({topic: topic}, masks)
        quoted = '"' + topic.replace('"', '""') + '"'
        query = (
            f'SELECT "offset" FROM {quoted} WHERE "offset" >= {start} AND "offset" < {stop} '
            f"AND ({self._job.sql}\n)"
        )
        with RestrictedEngine(self._data, visibility) as engine:
            _, batches = engine.stream(query)
            wanted = {one for batch in batches for one in batch.column(0).to_pylist()}
        if not wanted:
            return
        for rows in self._reader.read(topic, min(wanted), max(wanted) + 1):
            keep = [one in wanted for one in rows.column("offset").to_pylist()]
            yield rows.filter(pa.array(keep))

    def _matching(self, rows: pa.RecordBatch) -> Iterator[int]:
        columns = [rows.column(name).to_pylist() for name in ("value", "key", "headers")]
        for index, (value, key, headers) in enumerate(zip(*columns, strict=True)):
            pairs = dict(headers or ())
            if self._has_text(value or b"", key or b"", pairs) and self._has_header(pairs):
                if not self._job.path or self._has_path(value or b""):
                    yield index

    def _has_text(self, value: bytes, key: bytes, headers: dict[str, bytes]) -> bool:
        needle = self._text
        if not needle or needle in value.lower() or needle in key.lower():
            return True
        return any(
            needle in name.encode().lower() or needle in one.lower()
            for name, one in headers.items()
        )

    def _has_header(self, headers: dict[str, bytes]) -> bool:
        name, wanted = self._header
        if not name:
            return True
        return name in headers and (not wanted or headers[name] == wanted)

    def _has_path(self, value: bytes) -> bool:
        try:
            found = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        for one in _at(found, self._path):
            if self._job.equals is None or _shown(one) == self._job.equals:
                return True
        return False


def _at(found: Any, path: list[str | None]) -> Iterator[Any]:
    """The values at a path; a list on the way means each of its items, or one item by its index."""
    if not path:
        yield found
        return
    name, *rest = path
    if name is None:
        inside = found.values() if isinstance(found, dict) else found
        for one in inside if isinstance(found, dict | list) else ():
            yield from _at(one, rest)
    elif isinstance(found, list):
        if name.isdecimal():
            if int(name) < len(found):
                yield from _at(found[int(name)], rest)
            return
        for one in found:
            yield from _at(one, path)
    elif isinstance(found, dict) and name in found:
        yield from _at(found[name], rest)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
