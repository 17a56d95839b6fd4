"""How other processes find, watch and stop the pipeline of a data folder.

    DATA/pipeline/lock             held while a pipeline runs: two would share checkpoints
    DATA/pipeline/status.json      process, socket and progress of the pipeline that runs, written
                                   each second; or how the last one ended, see PipelineStatus
    DATA/pipeline/pipeline.sock    the socket, for its owner only

The socket speaks HTTP:

    POST /sql {"query": …, "rows-max": …}   → the rows as an Arrow IPC stream; the metadata `answer`
                                              of its schema has `rows`, `truncated` and `seconds`
    POST /stop                              → {"stopping": true}

A refusal has the form of the bus's: `{"code": …, "detail": …}`.

Nothing here imports PySpark.
"""

import contextlib
import datetime
import os
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa

from polybus.client.http import blocking as http
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log import file_modes, layout
from polybus.log.disk import Disk, FileLock
from polybus.log.topics import storage_error
from polybus.processes import is_alive
from polybus.structs import decode

REQUEST_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 16
ROWS_MAX = 10_000
"""Rows of an answer if the request does not say."""
ROWS_MAX_LIMIT = 1_000_000
"""The maximum number of rows of a request: an answer is completely in memory."""
ANSWER_TIMEOUT_S = 600.0
STOP_INTERVAL_S = 0.1
RunSql = Callable[[str, int], tuple[pa.Table, bool]]


# The files.


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The content of status.json."""

    state: str
    """`starting`, `running`, or how it ended: `done`, `failed` or `stopped`.

    A killed one stays `starting` or `running`.
    """
    time: str
    pid: int = 0
    socket: str = ""
    master: str = ""
    jvm: int = 0
    """The Java process, which may outlive its driver; 0 if it is elsewhere."""
    jvm_started: int = 0
    """When it started, in ticks since boot: another process may have its id later."""
    uptime_s: float = 0.0
    flows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    """The last batches that ended, the oldest first: see runs.py."""
    problems: list[str] = []
    pipelines: str = ""
    """The folder of the user's pipelines."""
    log: list[str] = []
    """The last events except progress, one line each."""


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


def write_status(data: Path, state: str, **about: Any) -> None:
    """Replace status.json, without fsync: after a power cut no pipeline runs."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    where = str(socket_path(data))
    status = PipelineStatus(state=state, time=now, pid=os.getpid(), socket=where, **about)
    path = folder(data) / "status.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(status))
    temporary.rename(path)


def read_status(data: Path) -> PipelineStatus | None:
    """The last status; None if no pipeline ever ran here.

    Raises StorageError `log.denied`, `log.failed`: it is unknown.
    """
    path = folder(data) / "status.json"
    try:
        return decode(path.read_bytes(), PipelineStatus)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise storage_error(error, f"cannot read {path}") from error


def running(data: Path) -> PipelineStatus | None:
    """The status of the pipeline that runs on the folder now, if one does and it can be read."""
    status = None
    # The callers have another way without it: the figures of no flow, or a Spark of their own.
    with contextlib.suppress(StorageError):
        status = present(data)
    return None if status is None or status.state != "running" else status


def present(data: Path) -> PipelineStatus | None:
    """The status of the pipeline that runs or starts on the folder now, if one does."""
    status = read_status(data)
    if status is None or status.state not in ("starting", "running") or not status.pid:
        return None
    return status if is_alive(status.pid) else None


# The pipeline's side of the socket.


class SqlRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    query: str
    rows_max: int = ROWS_MAX


class Service(socketserver.ThreadingUnixStreamServer):
    """Answers on the socket, in its own threads, until `stop`.

    Args:
        stop: called by /stop; must return at once.
        run_sql: runs a query; returns at most the given number of rows, and whether there are more.
    """

    daemon_threads = True
    # Connections over the limit wait to be refused.
    request_queue_size = 2 * CONNECTIONS_MAX
    # A stop does not wait for clients with long queries.
    block_on_close = False

    def __init__(self, data: Path, *, stop: Callable[[], None], run_sql: RunSql) -> None:
        self.socket_path = socket_path(data)
        self.free_connections = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self.stop_pipeline = stop
        self.run_sql = run_sql
        own = folder(data.resolve())
        if self.socket_path.parent == own:
            Disk().make_folder(own)
        else:
            file_modes.prepare_socket_folder(self.socket_path)
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


class _Connection(BaseHTTPRequestHandler):
    server: Service

    def handle(self) -> None:
        self._is_free = self.server.free_connections.acquire(blocking=False)
        try:
            with contextlib.suppress(ConnectionError):
                super().handle()
        finally:
            if self._is_free:
                self.server.free_connections.release()

    def do_POST(self) -> None:
        try:
            self._answer(self._body())
        except PolybusError as error:
            problem = {"code": error.code, "detail": error.text}
            self._send(msgspec.json.encode(problem), HTTPStatus.BAD_REQUEST)

    def _body(self) -> bytes:
        if not self._is_free:
            raise PolybusError("pipeline.busy", f"over {CONNECTIONS_MAX} connections; try later")
        size = self.headers.get("content-length", "0")
        if not size.isdecimal() or int(size) > REQUEST_BYTES_MAX:
            text = f"content-length is {size[:20]!r}; it must be at most {REQUEST_BYTES_MAX}"
            raise UsageError("pipeline.request-invalid", text)
        return self.rfile.read(int(size))

    def _answer(self, body: bytes) -> None:
        if self.path == "/stop":
            self._send(b'{"stopping": true}')
            self.server.stop_pipeline()
        elif self.path == "/sql":
            self._send(self._rows(body))
        else:
            text = f"{self.path[:40]!r} is unknown; the requests are /stop and /sql"
            raise UsageError("pipeline.request-invalid", text)

    def _rows(self, body: bytes) -> memoryview:
        try:
            request = decode(body, SqlRequest)
        except msgspec.MsgspecError as error:
            raise UsageError("pipeline.request-invalid", str(error)) from error
        if not 0 < request.rows_max <= ROWS_MAX_LIMIT:
            text = f"rows-max is {request.rows_max}; it must be 1 to {ROWS_MAX_LIMIT}"
            raise UsageError("pipeline.request-invalid", text)
        started_s = time.monotonic()
        table, truncated = self.server.run_sql(request.query, request.rows_max)
        seconds = round(time.monotonic() - started_s, 3)
        answer = {"rows": table.num_rows, "truncated": truncated, "seconds": seconds}
        table = table.replace_schema_metadata({"answer": msgspec.json.encode(answer)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        return memoryview(sink.getvalue())

    def _send(self, body: bytes | memoryview, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *message: Any) -> None:
        """Standard error belongs to Spark and to the pipeline's own events."""


# The clients' side of the socket.


def stop(status: PipelineStatus) -> None:
    """Ask the pipeline to end. Raises PolybusError, `pipeline.unreachable` or its refusal."""
    _ask(status, "/stop", None)


def query(
    status: PipelineStatus, sql: str, *, rows_max: int = ROWS_MAX
) -> tuple[pa.Table, dict[str, Any]]:
    """Run SQL on the pipeline's session: the rows, and `rows`, `truncated`, `seconds`.

    Raises:
        PolybusError: `sql.failed` with Spark's own text, or `pipeline.unreachable`.
    """
    request = msgspec.json.encode({"query": sql, "rows-max": rows_max})
    table = pa.ipc.open_stream(_ask(status, "/sql", request)).read_all()
    answer = decode(table.schema.metadata[b"answer"], dict[str, Any])
    return table.replace_schema_metadata(None), answer


def _ask(status: PipelineStatus, path: str, body: bytes | None) -> bytes:
    url = f"http+unix://{quote(status.socket, safe='')}"
    try:
        return http.request(url, "POST", path, body, timeout_s=ANSWER_TIMEOUT_S)
    except PolybusError as error:
        if error.code not in http.GONE:
            raise
        text = f"the pipeline (process {status.pid}) does not answer at {status.socket}: {error}"
        raise PolybusError("pipeline.unreachable", text) from error
