"""The running pipeline's socket: its status, SQL on its warm session, and an end.

A Unix socket in the data folder, for its owner only. One JSON object a line:

    {"verb": "status"}                           → {"pid": …, "flows": […]}
    {"verb": "sql", "query": …, "rows-max": …}   → {"rows": …, "truncated": …, "seconds": …},
                                                   then the rows as an Arrow IPC stream
    {"verb": "stop"}                             → {"stopping": true}

A refusal is `{"error": {"code": …, "text": …}}`; the connection stays. A connection is answered one
request at a time. `pipeline.json` names the process and the socket while the pipeline runs.

Nothing here imports PySpark: clients of the socket use `running`, `ask` and `query` without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from polybus.errors import PolybusError, UsageError
from polybus.processes import is_alive

LINE_BYTES_MAX = 1 << 20
CONNECTIONS_MAX = 16
ROWS_MAX = 10_000
"""Rows of an answer when the request does not say."""
ROWS_MAX_LIMIT = 1_000_000
"""The most a request may ask for: an answer is held in memory as a whole."""
ANSWER_TIMEOUT_S = 600.0
STOP_INTERVAL_S = 0.1
"""How long `stop` may have to wait for the socket's thread."""
# Linux allows 108 bytes with the closing NUL, others 104.
SOCKET_PATH_BYTES_MAX = 100


class Note(msgspec.Struct, frozen=True):
    """What pipeline.json says of the pipeline that runs on the data folder."""

    pid: int
    socket: str
    master: str
    jvm: int = 0
    """The Java process, which may outlive a killed driver by a moment; 0 where it is not ours."""


class Request(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    verb: str
    query: str = ""
    rows_max: int = ROWS_MAX


class Service:
    """Answers on the socket, in threads of its own, from `start` to `stop`.

    Args:
        status: gives what the verb `status` answers.
        stop_driver: called by the verb `stop`; must return at once.
        run_sql: runs a query and gives at most so many rows and whether there were more.
    """

    def __init__(
        self,
        data: Path,
        *,
        status: Callable[[], dict[str, Any]],
        stop_driver: Callable[[], None],
        run_sql: Callable[[str, int], tuple[pa.Table, bool]],
    ) -> None:
        self.socket = socket_path(data)
        self._verbs: dict[str, Callable[[Request, BufferedIOBase], None]] = {
            "status": lambda request, out: _say(out, status()),
            "stop": lambda request, out: self._stop_driver(stop_driver, out),
            "sql": lambda request, out: self._sql(run_sql, request, out),
        }
        self._server: _Server | None = None

    def start(self) -> None:
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = _Server(str(self.socket), self._converse)
        finally:
            os.umask(before)
        server = self._server
        threading.Thread(
            target=lambda: server.serve_forever(poll_interval=STOP_INTERVAL_S),
            name="polybus-service",
            daemon=True,
        ).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        self.socket.unlink(missing_ok=True)

    def _converse(self, requests: BufferedIOBase, out: BufferedIOBase) -> None:
        while line := requests.readline(LINE_BYTES_MAX):
            try:
                if not line.endswith(b"\n"):
                    text = f"a request is a line of at most {LINE_BYTES_MAX} bytes"
                    raise UsageError("pipeline.request-invalid", text)
                self._answer(line, out)
            except PolybusError as error:
                _say(out, {"error": {"code": error.code, "text": error.text}})
            if not line.endswith(b"\n"):
                return

    def _answer(self, line: bytes, out: BufferedIOBase) -> None:
        try:
            request = msgspec.json.decode(line, type=Request)
        except msgspec.MsgspecError as error:
            raise UsageError("pipeline.request-invalid", str(error)) from error
        verb = self._verbs.get(request.verb)
        if verb is None:
            text = f"no verb {request.verb[:40]!r}; verbs are {', '.join(self._verbs)}"
            raise UsageError("pipeline.request-invalid", text)
        verb(request, out)

    @staticmethod
    def _stop_driver(stop_driver: Callable[[], None], out: BufferedIOBase) -> None:
        _say(out, {"stopping": True})
        stop_driver()

    @staticmethod
    def _sql(
        run_sql: Callable[[str, int], tuple[pa.Table, bool]], request: Request, out: BufferedIOBase
    ) -> None:
        if not 0 < request.rows_max <= ROWS_MAX_LIMIT:
            text = f"rows-max is {request.rows_max}; it must be 1 to {ROWS_MAX_LIMIT}"
            raise UsageError("pipeline.request-invalid", text)
        started = time.monotonic()
        table, truncated = run_sql(request.query, request.rows_max)
        seconds = round(time.monotonic() - started, 3)
        _say(out, {"rows": table.num_rows, "truncated": truncated, "seconds": seconds})
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
        out.flush()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    # A client may be in the middle of a long query when the driver stops: nobody waits for it.
    block_on_close = False

    def __init__(
        self, path: str, converse: Callable[[BufferedIOBase, BufferedIOBase], None]
    ) -> None:
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        free = self._free

        class Handler(socketserver.StreamRequestHandler):
            wbufsize = -1

            def handle(self) -> None:
                if not free.acquire(blocking=False):
                    text = f"{CONNECTIONS_MAX} connections are open already"
                    _say(self.wfile, {"error": {"code": "pipeline.busy", "text": text}})
                    return
                try:
                    with contextlib.suppress(ConnectionError):
                        converse(self.rfile, self.wfile)
                finally:
                    free.release()

            def finish(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().finish()

        super().__init__(path, Handler)


def _say(out: Any, answer: dict[str, Any]) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")
    out.flush()


def folder(data: Path) -> Path:
    """Where the pipeline keeps what is its own: checkpoints, socket, note."""
    return data / "pipeline"


def socket_path(data: Path) -> Path:
    """In the data folder; if that path is too long for a socket, in a folder of the user's own."""
    path = folder(data.resolve()) / "pipeline.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
        return path
    digest = hashlib.blake2b(os.fsencode(path), digest_size=10).hexdigest()
    return Path(tempfile.gettempdir()) / f"polybus-{os.getuid()}" / f"{digest}.sock"


def read_note(data: Path) -> Note | None:
    """What pipeline.json says, whether that pipeline still runs or not."""
    try:
        return msgspec.json.decode((folder(data) / "pipeline.json").read_bytes(), type=Note)
    except (OSError, msgspec.DecodeError):
        return None


def running(data: Path) -> Note | None:
    """The pipeline that runs on the folder now; None when there is none, or only its leftovers."""
    note = read_note(data)
    return note if note is not None and is_alive(note.pid) else None


def ask(note: Note, verb: str, **fields: Any) -> dict[str, Any]:
    """Ask the pipeline one thing: `status` or `stop`.

    Raises:
        PolybusError: its refusal, or `pipeline.unreachable`.
    """
    with _connected(note, verb, fields) as (answer, _):
        return answer


def query(note: Note, sql: str, *, rows_max: int = ROWS_MAX) -> tuple[pa.Table, dict[str, Any]]:
    """Run SQL on the pipeline's session: the rows, and `rows`, `truncated`, `seconds`.

    Raises:
        PolybusError: `sql.failed` with Spark's own text, or `pipeline.unreachable`.
    """
    with _connected(note, "sql", {"query": sql, "rows-max": rows_max}) as (answer, stream):
        try:
            with pa.ipc.open_stream(stream) as rows:
                return rows.read_all(), answer
        except (OSError, pa.ArrowInvalid) as error:
            text = f"the pipeline (process {note.pid}) ended in the middle of an answer: {error}"
            raise PolybusError("pipeline.unreachable", text) from error


@contextlib.contextmanager
def _connected(
    note: Note, verb: str, fields: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], BufferedReader]]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(note.socket)
            connection.sendall(msgspec.json.encode({"verb": verb, **fields}) + b"\n")
            with connection.makefile("rb") as answers:
                answer = msgspec.json.decode(answers.readline(), type=dict[str, Any])
                if "error" in answer:
                    error = answer["error"]
                    raise PolybusError(error["code"], error["text"])
                yield answer, answers
    except (OSError, msgspec.DecodeError) as error:
        text = f"the pipeline (process {note.pid}) does not answer at {note.socket}: {error}"
        raise PolybusError("pipeline.unreachable", text) from error
