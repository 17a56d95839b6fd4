"""Spark sessions of a pipeline: one application, and separate sessions within it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybus.processes import started_ticks
from polybus.spark import internals
from polybus.spark.session import connect

MASTER = "local[2,3]"
MEMORY = "1g"
SOURCE = "polybus"
LOOKUPS_MAX = 5


@contextlib.contextmanager
def open_session(
    data: Path, *, url: str | None = None, master: str = MASTER, memory: str = MEMORY
) -> Iterator[Any]:
    """The session of a pipeline. It ends with the block, and so do sessions derived from it.

    Raises:
        PolybusError: Java or PySpark is missing; `spark.server` if the server cannot run flows.
    """
    from polybus.spark.session import session, watch_java_yourself

    spark = session(data=data, url=url, master=master, app="polybus pipeline", memory=memory)
    watch_java_yourself()  # It reports the end in an event.

    try:
        if internals.is_connect(spark):
            connect.check_server(spark, data)
        register_source(spark)
        yield spark
    finally:
        connect.end_all()
        # Its JVM may have ended already.
        with contextlib.suppress(internals.java_errors(), ConnectionError):
            spark.stop()


def end_java() -> None:
    """Kill the JVM of this process, if it has one: calls to it fail."""
    from polybus.spark.session import jvms

    for jvm in jvms():
        jvm.kill()


def another_session(spark: Any) -> Any:
    """A session of the same application with its own views and settings."""
    if internals.is_connect(spark):
        return connect.new_session(spark)
    session = spark.newSession()
    register_source(session)
    return session


def register_source(spark: Any) -> None:
    """Make `format("polybus")` known to the session.

    Spark searches for Python data sources in a separate process. If that process is killed, Spark
    assumes that there are none, and searches again at the next lookup.
    """
    if internals.is_connect(spark):  # the server searches by itself
        return
    from pyspark.errors import AnalysisException

    from polybus.spark.source import PolybusDataSource

    for _ in range(LOOKUPS_MAX):
        if internals.knows_source(spark, SOURCE):
            return
        # Registering searches too, and may find the source that the last search missed.
        with contextlib.suppress(AnalysisException):
            spark.dataSource.register(PolybusDataSource)


@dataclass(frozen=True, slots=True)
class JvmProcess:
    """A JVM by its process id, and when it started; `pid` is 0 if it is on another machine."""

    pid: int = 0
    started: int = 0

    def is_alive(self) -> bool:
        return bool(self.pid and self.started) and started_ticks(self.pid) == self.started


def jvm_of(spark: Any) -> JvmProcess:
    """The JVM of a session; `pid` is 0 with Spark Connect."""
    with contextlib.suppress(Exception):
        pid = internals.jvm_pid(spark)
        return JvmProcess(pid, started_ticks(pid))
    return JvmProcess()
