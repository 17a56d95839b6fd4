"""What every process that runs flows on a data folder needs: to be alone there, and to be found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from polybus.client.http import blocking as bus_http
from polybus.errors import StorageError, UsageError
from polybus.spark.pipelines.running import service
from polybus.spark.session import connect

MASTER = "local[2,3]"
MEMORY = "1g"
SOURCE = "polybus"
LOOKUPS_MAX = 5
TOKEN_VARIABLE = "POLYBUS_TOKEN"
"""For a bus elsewhere (--url), whose token is not in the data folder."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the driver was asked to run."""

    data: Path
    url: str | None = None
    master: str = MASTER
    memory: str = MEMORY
    pipelines: Path | None = None
    standard: bool = True

    @property
    def token(self) -> str | None:
        """What makes us the bus's administrator, who alone writes system topics."""
        return os.environ.get(TOKEN_VARIABLE) or bus_http.read_token(self.data)


@contextlib.contextmanager
def only_one(data: Path) -> Iterator[None]:
    """One pipeline a data folder: two would take the same checkpoints.

    Raises:
        UsageError: `pipeline.running`.
        StorageError: `pipeline.storage`, the folder cannot be written.
    """
    path = service.folder(data) / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise StorageError("pipeline.storage", f"cannot write {path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"another pipeline runs on {data}: polybus pipeline stop ends it"
            raise UsageError("pipeline.running", text) from error
        yield


def write_note(options: Options, socket: Path, jvm: int) -> None:
    """Tell others how to reach the pipeline: pipeline.json."""
    note = service.Note(pid=os.getpid(), socket=str(socket), master=options.master, jvm=jvm)
    path = service.folder(options.data) / "pipeline.json"
    fresh = path.with_suffix(".tmp")
    fresh.write_bytes(msgspec.json.encode(note))
    fresh.rename(path)


def jvm_pid(spark: Any) -> int:
    """The process of the session's Java, 0 where it runs elsewhere (Spark Connect)."""
    with contextlib.suppress(Exception):
        return int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # noqa: SLF001
    return 0


def is_jvm(pid: int) -> bool:
    """Whether the process is alive and Java: its number may be another's by now."""
    try:
        return b"java" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False


class SqlRunner:
    """Queries on the pipeline's warm session, beside its flows.

    They run in a session of their own, so that a `SET` or a view of one does not reach the flows.
    """

    def __init__(self, spark: Any, data: Path) -> None:
        self._spark = another_session(spark)
        self._data = data
        # Views belong to the session, and are made anew for each query.
        self._one_at_a_time = threading.Lock()

    def __call__(self, query: str, rows_max: int) -> tuple[Any, bool]:
        from polybus.spark.views import collect

        with self._one_at_a_time:
            table = collect(self._spark, query, self._data, rows_max=rows_max + 1)
        return table.slice(0, rows_max), table.num_rows > rows_max


def another_session(spark: Any) -> Any:
    """A session of the same application with views and settings of its own."""
    if connect.is_connect(spark):
        return connect.new_session(spark)
    made = spark.newSession()
    know_source(made)
    return made


def end_session(spark: Any) -> None:
    """Stop the session of `open_session`, and all that `another_session` made of it."""
    connect.end_all()
    spark.stop()


def know_source(spark: Any) -> None:
    """Make sure that the session knows `format("polybus")`.

    Spark looks for sources in Python in a process of its own. Should that be killed in the middle,
    Spark takes it that there are none, and looks again when it is asked the next time.
    """
    if connect.is_connect(spark):  # the server looks for itself
        return
    from pyspark.errors import AnalysisException

    from polybus.spark.source import PolybusDataSource

    manager = spark._jsparkSession.sessionState().dataSourceManager()  # noqa: SLF001
    for _ in range(LOOKUPS_MAX):
        if manager.dataSourceExists(SOURCE):
            return
        # To register looks again too, and may find what the look before did not.
        with contextlib.suppress(AnalysisException):
            spark.dataSource.register(PolybusDataSource)


def open_session(options: Options) -> Any:
    """The session of the flows.

    Raises:
        PolybusError: Java or PySpark is missing; `spark.server`, no flow can run over there.
    """
    from polybus.spark.session import session

    made = session(
        data=options.data,
        url=options.url,
        master=options.master,
        app="polybus pipeline",
        memory=options.memory,
    )
    if connect.is_connect(made):
        try:
            connect.check_server(made, options.data)
        except BaseException:
            made.stop()
            raise
    know_source(made)
    return made
