"""The query process: does one job after the other until the bus kills it or ends.

    python -m polybus.services.queries.worker --data DIR --memory-bytes N

DuckDB and Delta are optional, and imported when a job needs them.

It only reads the data folder. If a job takes too long, or too much memory, the bus kills the
process and starts another.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa

from polybus.errors import PolybusError, StorageError
from polybus.services.queries.forms import PIECE_BYTES, JsonAnswer, encoded
from polybus.services.queries.jobs import (
    DATA,
    END,
    ERROR,
    FRAME_BYTES_MAX,
    HEAD,
    NOTE,
    ROWS,
    Form,
    HistogramJob,
    HistoryJob,
    Job,
    JobError,
    LettersJob,
    Lookup,
    RangesJob,
    SearchJob,
    SqlJob,
    TablesJob,
    UndeliveredJob,
    decode_job,
)
from polybus.services.queries.search import Search

ROOM_BYTES = 1 << 30
"""Address space that allocators and the stacks of DuckDB's threads reserve, more than they use."""
NICENESS = 5
"""Low priority: queries wait for the bus, not the bus for queries."""
PR_SET_PDEATHSIG = 1
MORE_S = 2.0
"""How long an export that has reached its limit checks whether more messages match."""
DOWNLOAD_BYTES_MAX = 1 << 30
"""Limit of the rows of a download, before they are encoded."""
HELD_BYTES = 16 << 20
"""A larger download waits on the disk until it is known whether it is complete."""


class QueryWorker:
    """Does jobs; writes answers to `out`."""

    def __init__(self, data: Path, out: BinaryIO) -> None:
        self._data = data
        self._out = out

    def do(self, line: bytes) -> None:
        """Do one job. An error of the job is its answer."""
        try:
            for kind, content in self._answer(decode_job(line)):
                for start in range(0, len(content), FRAME_BYTES_MAX):
                    self._write(kind, content[start : start + FRAME_BYTES_MAX])
        except PolybusError as error:
            self._fail(type(error).__name__, error.code, error.text)
        except ImportError as error:
            text = f"{error.name} is not installed where the bus runs"
            self._fail("UsageError", "sql.engine-missing", text)
        except MemoryError:
            self._fail("UsageError", "sql.too-large", "the query needs too much memory")
        except (OSError, ValueError, pa.ArrowException) as error:
            self._fail("UsageError", "sql.failed", " ".join(str(error).split())[:500])
        else:
            self._write(END, b"")
        self._out.flush()

    def _fail(self, kind: str, code: str, text: str) -> None:
        self._write(ERROR, msgspec.json.encode(JobError(kind, code, text)))

    def _write(self, kind: bytes, content: bytes) -> None:
        self._out.write(HEAD.pack(kind, len(content)))
        self._out.write(content)
        self._out.flush()

    def _looked_up(self, job: Lookup) -> Any:
        from polybus.services.queries import lookups

        match job:
            case HistogramJob():
                return lookups.histogram(self._data, job)
            case TablesJob():
                return lookups.tables(self._data, job.table)
            case LettersJob():
                return lookups.letters(self._data, job)
            case UndeliveredJob():
                return lookups.undelivered(self._data, job)
            case RangesJob():
                return lookups.undelivered_ranges(self._data, job)
            case HistoryJob():
                return lookups.history(self._data, job)

    def _answer(self, job: Job) -> Iterator[tuple[bytes, bytes]]:
        match job:
            case SqlJob():
                yield from self._sql(job)
            case SearchJob():
                yield from self._search(job)
            case _:
                yield DATA, msgspec.json.encode(self._looked_up(job))

    def _sql(self, job: SqlJob) -> Iterator[tuple[bytes, bytes]]:
        from polybus.services.queries.engine import RestrictedEngine

        began_s = time.monotonic()
        with RestrictedEngine(self._data, job.visibility) as engine:
            schema, batches = engine.stream(job.query)
            if job.form == "json":
                answer = JsonAnswer(schema, job.rows_max)
                for batch in batches:
                    if not answer.add(batch):
                        break
                elapsed_s = round(time.monotonic() - began_s, 4)
                yield DATA, answer.document(**{"elapsed-s": elapsed_s, "engine": "duckdb"})
                return
            yield from _file(job.form, schema, _Limited(job.rows_max), batches)

    def _search(self, job: SearchJob) -> Iterator[tuple[bytes, bytes]]:
        search = Search(self._data, job)
        if job.form is not None:
            limited = _Limited(job.limit, lambda: self._finds_more(job, search))
            yield from _file(job.form, search.schema, limited, search.found())
            return
        rows = pa.Table.from_batches(list(search.found()), search.schema)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
        yield NOTE, msgspec.json.encode(search.summary())
        yield ROWS, sink.getvalue().to_pybytes()

    def _finds_more(self, job: SearchJob, search: Search) -> bool:
        """Whether more messages match after an export's; also True if that takes too long."""
        left = msgspec.structs.replace(job, limit=1, time_s=MORE_S, form=None)
        left.start, left.stop = search.left
        more = Search(self._data, left)
        return any(rows.num_rows for rows in more.found()) or not more.summary()["is-complete"]


class _Limited:
    """Rows up to a number of them and DOWNLOAD_BYTES_MAX.

    `has_more` says at the end whether rows were left out.

    Attributes:
        is_truncated: there were more rows.
    """

    def __init__(self, rows_max: int, has_more: Callable[[], bool] = lambda: False) -> None:
        self._has_more = has_more
        self._rows_left = rows_max
        self._bytes_left = DOWNLOAD_BYTES_MAX
        self.is_truncated = False

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows and (self._rows_left <= 0 or self._bytes_left <= 0):
                self.is_truncated = True
                return
            self.is_truncated = batch.num_rows > self._rows_left
            yield batch.slice(0, self._rows_left)
            if self.is_truncated:
                return
            self._rows_left -= batch.num_rows
            self._bytes_left -= batch.nbytes
        self.is_truncated = self._has_more()


def _file(
    form: Form, schema: pa.Schema, limited: _Limited, batches: Iterator[pa.RecordBatch]
) -> Iterator[tuple[bytes, bytes]]:
    """A file, preceded by whether it was cut: that is only known at its end, so it is buffered."""
    with tempfile.SpooledTemporaryFile(HELD_BYTES) as held:
        for piece in encoded(form, schema, limited.of(batches)):
            try:
                held.write(piece)
            except OSError as error:
                text = f"cannot write to {tempfile.gettempdir()}: {error.strerror}"
                raise StorageError("sql.storage", text) from error
        held.seek(0)
        yield NOTE, msgspec.json.encode({"truncated": limited.is_truncated})
        while piece := held.read(PIECE_BYTES):
            yield DATA, piece


def _end_with_parent() -> None:
    """Let Linux send SIGKILL when the bus ends, even during a query."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _reserved_bytes() -> int:
    """The current memory of this process as RLIMIT_DATA counts it."""
    found = re.search(rb"VmData:\s+(\d+) kB", Path("/proc/self/status").read_bytes())
    return int(found[1]) << 10 if found is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m polybus.services.queries.worker")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    given = parser.parse_args()
    _end_with_parent()
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError):
        from polybus.lake import duck

        duck.MEMORY_MAX = f"{given.memory_bytes >> 20}MiB"
        # Loading it reserves memory, which must not count for a query.
        importlib.import_module("duckdb")
    limit = _reserved_bytes() + given.memory_bytes + ROOM_BYTES
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    worker = QueryWorker(given.data, sys.stdout.buffer)
    for line in sys.stdin.buffer:
        worker.do(line)


if __name__ == "__main__":
    main()
