"""The pipeline's socket, without a pipeline behind it."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pytest
from spark_kit import eventually

from polybus.client.http import blocking
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.layout import SOCKET_PATH_BYTES_MAX
from polybus.spark.pipelines.running import service
from polybus.spark.pipelines.running.service import PipelineStatus, Service


class Answers:
    """What the driver would give."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def run_sql(self, query: str, rows_max: int) -> tuple[pa.Table, bool]:
        if query == "bad":
            raise UsageError("sql.failed", "no such table")
        rows = pa.table({"n": list(range(1000))})
        return rows.slice(0, rows_max), rows_max < 1000


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def status(tmp_path: Path, answers: Answers) -> Iterator[PipelineStatus]:
    served = Service(
        tmp_path,
        stop=answers.stopped.set,
        run_sql=answers.run_sql,
    )
    yield PipelineStatus(state="running", time="now", socket=str(served.socket_path))
    served.stop()


def test_rows_come_as_arrow_and_within_the_limit(status: PipelineStatus) -> None:
    table, head = service.query(status, "SELECT", rows_max=3)
    assert table["n"].to_pylist() == [0, 1, 2]
    assert (head["rows"], head["truncated"]) == (3, True)
    table, head = service.query(status, "SELECT")
    assert (table.num_rows, head["truncated"]) == (1000, False)


def test_a_refused_query_has_the_engines_error(
    status: PipelineStatus,
) -> None:
    with pytest.raises(PolybusError, match="sql.failed: no such table"):
        service.query(status, "bad")
    url = f"http+unix://{quote(status.socket, safe='')}"
    for path, body, code in (
        ("/sql", b"no json", "pipeline.request-invalid"),
        ("/dance", None, "pipeline.request-invalid"),
        ("/sql", b'{"query": "x", "rows-max": 0}', "pipeline.request-invalid"),
        ("/sql", b" " * (service.REQUEST_BYTES_MAX + 1), "pipeline.request-invalid"),
        ("/sql", b'{"query": "bad"}', "sql.failed"),
    ):
        with pytest.raises(PolybusError, match=code):
            blocking.request(url, "POST", path, body)


def test_connections_are_bounded(status: PipelineStatus) -> None:
    crowd = []
    for _ in range(service.CONNECTIONS_MAX):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(status.socket)
        crowd.append(connection)
    with pytest.raises(PolybusError, match="pipeline.busy"):
        eventually(lambda: not service.query(status, "SELECT"))
    for connection in crowd:
        connection.close()


def test_only_the_owner_can_stop_the_pipeline_by_its_socket(
    status: PipelineStatus, answers: Answers
) -> None:
    assert stat.S_IMODE(Path(status.socket).stat().st_mode) == 0o600
    service.stop(status)
    assert answers.stopped.wait(5)


def test_a_pipeline_runs_until_its_status_or_its_process_ends(tmp_path: Path) -> None:
    assert service.running(tmp_path) is None
    service.write_status(tmp_path, "running", master="local")
    found = service.running(tmp_path)
    assert found is not None and (found.pid, found.master) == (os.getpid(), "local")
    service.write_status(tmp_path, "stopped")
    assert service.running(tmp_path) is None
    gone = msgspec.structs.replace(found, pid=2**22 - 1)
    (service.folder(tmp_path) / "status.json").write_bytes(msgspec.json.encode(gone))
    assert service.running(tmp_path) is None
    with pytest.raises(PolybusError, match="pipeline.unreachable"):
        service.stop(gone)


@pytest.mark.parametrize("temporary", ["t", "t" * 120])
def test_a_long_path_gets_a_short_socket(
    temporary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/{temporary}")
    path = service.socket_path(tmp_path / ("x" * 120))
    assert len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def test_a_lock_that_cannot_be_written_is_an_error_of_the_pipelines_storage(tmp_path: Path) -> None:
    service.folder(tmp_path).touch()
    with pytest.raises(StorageError, match="pipeline.storage: cannot write"):
        service.only_one(tmp_path)
