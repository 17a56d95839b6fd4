"""The pipeline's socket, without a pipeline behind it."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.layout import SOCKET_PATH_BYTES_MAX
from polybus.spark.pipelines.running import service
from polybus.spark.pipelines.running.service import Note, Service


class Answers:
    """What the driver would give."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def status(self) -> dict[str, Any]:
        return {"pid": 1, "flows": []}

    def run_sql(self, query: str, rows_max: int) -> tuple[pa.Table, bool]:
        if query == "bad":
            raise UsageError("sql.failed", "no such table")
        rows = pa.table({"n": list(range(1000))})
        return rows.slice(0, rows_max), rows_max < 1000


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def note(tmp_path: Path, answers: Answers) -> Iterator[Note]:
    served = Service(
        tmp_path,
        status=answers.status,
        stop=answers.stopped.set,
        run_sql=answers.run_sql,
    )
    yield Note(pid=os.getpid(), socket=str(served.socket_path), master="local")
    served.stop()


def test_rows_come_as_arrow_and_within_the_limit(note: Note) -> None:
    table, head = service.query(note, "SELECT", rows_max=3)
    assert table["n"].to_pylist() == [0, 1, 2]
    assert (head["rows"], head["truncated"]) == (3, True)
    table, head = service.query(note, "SELECT")
    assert (table.num_rows, head["truncated"]) == (1000, False)


def test_a_refused_query_has_the_engines_error_and_the_connection_stays(note: Note) -> None:
    with pytest.raises(PolybusError, match="sql.failed: no such table"):
        service.query(note, "bad")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(note.socket)
        lines = connection.makefile("rb")
        for request, code in (
            (b"no json", "pipeline.request-invalid"),
            (b'{"verb": "dance"}', "pipeline.request-invalid"),
            (b'{"verb": "sql", "query": "x", "rows-max": 0}', "pipeline.request-invalid"),
            (b'{"verb": "sql", "query": "bad"}', "sql.failed"),
        ):
            connection.sendall(request + b"\n")
            assert msgspec.json.decode(lines.readline())["error"]["code"] == code
        connection.sendall(b'{"verb": "status"}\n')
        assert msgspec.json.decode(lines.readline()) == {"pid": 1, "flows": []}
        lines.close()


def test_a_line_without_end_is_refused_and_closed(note: Note) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(note.socket)
        connection.sendall(b"x" * service.LINE_BYTES_MAX)
        with connection.makefile("rb") as lines:
            answer = msgspec.json.decode(lines.readline())
            assert answer["error"]["code"] == "pipeline.request-invalid"
            assert lines.read() == b""


def test_connections_are_bounded(note: Note) -> None:
    crowd = []
    for _ in range(service.CONNECTIONS_MAX):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(note.socket)
        connection.sendall(b'{"verb": "status"}\n')
        assert connection.recv(1000)
        crowd.append(connection)
    with pytest.raises(PolybusError, match="pipeline.busy"):
        service.ask(note, "status")
    for connection in crowd:
        connection.close()


def test_only_the_owner_can_stop_the_pipeline_by_its_socket(note: Note, answers: Answers) -> None:
    assert stat.S_IMODE(Path(note.socket).stat().st_mode) == 0o600
    assert service.ask(note, "stop") == {"stopping": True}
    assert answers.stopped.wait(5)


def test_the_note_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    assert service.running(tmp_path) is None
    folder = service.folder(tmp_path)
    folder.mkdir()
    gone = Note(pid=2**22 - 1, socket=str(tmp_path / "no.sock"), master="local")
    (folder / "pipeline.json").write_bytes(msgspec.json.encode(gone))
    assert service.running(tmp_path) is None
    with pytest.raises(PolybusError, match="pipeline.unreachable"):
        service.ask(gone, "status")


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    path = service.socket_path(tmp_path / ("x" * 120))
    assert len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def test_a_lock_that_cannot_be_written_is_an_error_of_the_pipelines_storage(tmp_path: Path) -> None:
    service.folder(tmp_path).touch()
    with pytest.raises(StorageError, match="pipeline.storage: cannot write"):
        service.only_one(tmp_path)
