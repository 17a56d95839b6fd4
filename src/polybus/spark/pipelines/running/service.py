"""How other processes find, watch and stop the pipeline of a data folder.

    DATA/pipeline/lock             held while a pipeline runs: two would share checkpoints
    DATA/pipeline/pipeline.json    process and socket of the pipeline that runs, see Note
    DATA/pipeline/pipeline.sock    the socket, for its owner only
    DATA/pipeline/status.json      progress each second, and how the last run ended

A request on the socket is a JSON object on a line. A connection may send many, one at a time:

    {"verb": "status"}                           → {"pid": …, "flows": […]}
    {"verb": "sql", "query": …, "rows-max": …}   → {"rows": …, "truncated": …, "seconds": …},
                                                   then the rows as an Arrow IPC stream
    {"verb": "stop"}                             → {"stopping": true}

A refusal is `{"error": {"code": …, "text": …}}`; the connection stays.

Nothing here imports PySpark.
"""

import contextlib
import datetime
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log import layout
from polybus.log.disk import FileLock
from polybus.processes import is_alive

LINE_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 16
ROWS_MAX = 10_000
"""Rows of an answer if the request does not say."""
ROWS_MAX_LIMIT = 1_000_000
"""The most rows a request may ask for: an answer is held in memory as a whole."""
ANSWER_TIMEOUT_S = 600.0
STOP_INTERVAL_S = 0.1
T = TypeVar("T")
RunSql = Callable[[str, int], tuple[pa.Table, bool]]


# The files.


class Note(msgspec.Struct, frozen=True):
    """The content of pipeline.json: the pipeline that runs on the data folder."""

    pid: int
    socket: str
    master: str
    jvm: int = 0
    """The Java process, which may briefly outlive a killed driver; 0 if it is elsewhere."""


def folder(data: Path) -> Path:
    """The folder of the pipeline's own files, including the checkpoints."""
    return data / "pipeline"


def only_one(data: Path) -> FileLock:
    """Take the lock: one pipeline per data folder.

    Raises:
        UsageError: `pipeline.running`.
        StorageError: `pipeline.storage`, the folder cannot be written.
    """
    path = folder(data) / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path)
    except BlockingIOError as error:
        text = f"another pipeline runs on {data}: polybus pipeline stop ends it"
        raise UsageError("pipeline.running", text) from error
    except OSError as error:
        raise StorageError("pipeline.storage", f"cannot write {path}: {error.strerror}") from error


def socket_path(data: Path) -> Path:
    return layout.socket_path(folder(data.resolve()) / "pipeline.sock")


def write_note(data: Path, *, master: str, jvm: int) -> None:
    """Tell other processes that this one runs the pipeline."""
    note = Note(pid=os.getpid(), socket=str(socket_path(data)), master=master, jvm=jvm)
    _replace(folder(data) / "pipeline.json", note)


def read_note(data: Path) -> Note | None:
    """The note, whether its pipeline still runs or was killed."""
    return _read(folder(data) / "pipeline.json", Note)


def remove_note(data: Path) -> None:
    (folder(data) / "pipeline.json").unlink(missing_ok=True)


def running(data: Path) -> Note | None:
    """The note of the pipeline that runs on the folder now, if one does."""
    note = read_note(data)
    return note if note is not None and is_alive(note.pid) else None


def write_status(data: Path, state: str, flows: list[dict[str, Any]], problems: list[str]) -> None:
    """Replace status.json, if the disk has room for it."""
    status = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "state": state,
        "flows": flows,
        "problems": problems,
    }
    # Flows report a full disk; a missing status is no reason to end them.
    with contextlib.suppress(OSError):
        _replace(folder(data) / "status.json", status)


def read_status(data: Path) -> dict[str, Any] | None:
    """The last status; None if no pipeline ever ran here."""
    return _read(folder(data) / "status.json", dict[str, Any])


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def _replace(path: Path, content: Any) -> None:
    """Replace a file as a whole, without fsync: after a power cut no pipeline runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(content))
    temporary.rename(path)


# The pipeline's side of the socket.


class ServiceRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    verb: str
    query: str = ""
    rows_max: int = ROWS_MAX


class Service(socketserver.ThreadingUnixStreamServer):
    """Answers on the socket, in its own threads, until `stop`.

    Args:
        status: returns the answer of the verb `status`.
        stop: called by the verb `stop`; must return at once.
        run_sql: runs a query; returns at most the given number of rows, and whether there are more.
    """

    daemon_threads = True
    # A client may wait for a long query when the pipeline stops: nobody waits for it.
    block_on_close = False

    def __init__(
        self,
        data: Path,
        *,
        status: Callable[[], dict[str, Any]],
        stop: Callable[[], None],
        run_sql: RunSql,
    ) -> None:
        self.socket_path = socket_path(data)
        self.free_connections = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._status = status
        self._stop_pipeline = stop
        self._run_sql = run_sql
        self.socket_path.parent.mkdir(parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            super().__init__(str(self.socket_path), _Connection)
        finally:
            os.umask(before)
        threading.Thread(
            target=self.serve_forever, args=(STOP_INTERVAL_S,), name="polybus-service", daemon=True
        ).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self.socket_path.unlink(missing_ok=True)

    def answer(self, line: bytes, out: Any) -> None:
        """Answer one request. Raises PolybusError, the refusal."""
        if not line.endswith(b"\n"):
            text = f"a request is a line of at most {LINE_BYTES_MAX} bytes"
            raise UsageError("pipeline.request-invalid", text)
        try:
            request = msgspec.json.decode(line, type=ServiceRequest)
        except msgspec.MsgspecError as error:
            raise UsageError("pipeline.request-invalid", str(error)) from error
        if request.verb == "status":
            _write_line(out, self._status())
        elif request.verb == "stop":
            _write_line(out, {"stopping": True})
            self._stop_pipeline()
        elif request.verb == "sql":
            self._answer_sql(request, out)
        else:
            text = f"unknown verb {request.verb[:40]!r}; the verbs are status, stop and sql"
            raise UsageError("pipeline.request-invalid", text)

    def _answer_sql(self, request: ServiceRequest, out: Any) -> None:
        if not 0 < request.rows_max <= ROWS_MAX_LIMIT:
            text = f"rows-max is {request.rows_max}; it must be 1 to {ROWS_MAX_LIMIT}"
            raise UsageError("pipeline.request-invalid", text)
        started_s = time.monotonic()
        table, truncated = self._run_sql(request.query, request.rows_max)
        seconds = round(time.monotonic() - started_s, 3)
        _write_line(out, {"rows": table.num_rows, "truncated": truncated, "seconds": seconds})
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
        out.flush()


class _Connection(socketserver.StreamRequestHandler):
    wbufsize = -1
    server: Service

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            if not self.server.free_connections.acquire(blocking=False):
                text = f"{CONNECTIONS_MAX} connections are open already"
                return self._refuse(PolybusError("pipeline.busy", text))
            try:
                for line in iter(lambda: self.rfile.readline(LINE_BYTES_MAX), b""):
                    try:
                        self.server.answer(line, self.wfile)
                    except PolybusError as error:
                        self._refuse(error)
                    if not line.endswith(b"\n"):
                        break
            finally:
                self.server.free_connections.release()

    def _refuse(self, error: PolybusError) -> None:
        _write_line(self.wfile, {"error": {"code": error.code, "text": error.text}})

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().finish()


def _write_line(out: Any, answer: dict[str, Any]) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")
    out.flush()


# The clients' side of the socket.


def ask(note: Note, verb: str) -> dict[str, Any]:
    """Send the verb `status` or `stop`, and return the answer.

    Raises:
        PolybusError: its refusal, or `pipeline.unreachable`.
    """
    with _asked(note, {"verb": verb}) as (answer, _):
        return answer


def query(note: Note, sql: str, *, rows_max: int = ROWS_MAX) -> tuple[pa.Table, dict[str, Any]]:
    """Run SQL on the pipeline's session: the rows, and `rows`, `truncated`, `seconds`.

    Raises:
        PolybusError: `sql.failed` with Spark's own text, or `pipeline.unreachable`.
    """
    with _asked(note, {"verb": "sql", "query": sql, "rows-max": rows_max}) as (answer, stream):
        try:
            with pa.ipc.open_stream(stream) as rows:
                return rows.read_all(), answer
        except (OSError, pa.ArrowInvalid) as error:
            text = f"the pipeline (process {note.pid}) ended in the middle of an answer: {error}"
            raise PolybusError("pipeline.unreachable", text) from error


@contextlib.contextmanager
def _asked(note: Note, request: dict[str, Any]) -> Iterator[tuple[dict[str, Any], BufferedReader]]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(note.socket)
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as answers:
                answer = msgspec.json.decode(answers.readline(), type=dict[str, Any])
                if "error" in answer:
                    raise PolybusError(answer["error"]["code"], answer["error"]["text"])
                yield answer, answers
    except (OSError, msgspec.DecodeError) as error:
        text = f"the pipeline (process {note.pid}) does not answer at {note.socket}: {error}"
        raise PolybusError("pipeline.unreachable", text) from error
