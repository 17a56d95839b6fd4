"""A Spark session with our settings: quick to start, with bounded memory, on loopback only."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from polybus.errors import PolybusError
from polybus.spark import shipping
from polybus.spark.internals import (
    CHECKPOINT_FILES,
    WORKER_PARENT,
    is_connect,
    java_errors,
    knows_source,
    set_python_sources,
)
from polybus.spark.session.connect import QUERY_SETTINGS, equip, register_source
from polybus.spark.session.gateway import Jvm
from polybus.spark.session.worker_python import check_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2,3]"
"""Two threads; a failed task is tried three times, as on a cluster."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class _CallableSession(ModuleType):
    """Makes `polybus.spark.session()` the function, although the package has the same name."""

    def __call__(self, **options: Any) -> SparkSession:
        return session(**options)


sys.modules[__name__].__class__ = _CallableSession

# The JVM of this process: PySpark accepts only one.
_jvms: list[Jvm] = []
# The buses to which queries are already reported.
_reported: set[tuple[Path | None, str | None]] = set()

EMBEDDED_SETTINGS = {
    **CHECKPOINT_FILES,
    # A pipeline runs for weeks: Spark's records of finished work must not grow.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.sql.streaming.numRecentProgressUpdates": "20",
}


def session(
    *,
    data: Path | None = None,
    url: str | None = None,
    master: str = MASTER,
    app: str = "polybus",
    memory: str = "1g",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """The Spark session of this process: created by the first call, returned by later ones.

    `data` or `url` locate the bus, which lists the session's queries as consumers. Readers and
    writers without these options use the folder `data` of the first call; programs with several
    folders set the options.
    `master` is `local[…]` for an embedded session, `spark://…` for a cluster, or `sc://…` for a
    Spark Connect server. `memory` is the heap of the embedded JVM: with the default of 1 GiB, all
    of Spark stays within 2 GiB. `conf` overrides our settings.

    Raises:
        PolybusError: `spark.no-pyspark`, `spark.no-java`, `spark.start-failed`; `spark.python`, the
            Python of Spark's processes on this machine has no Polybus.
    """
    if importlib.util.find_spec("pyspark") is None:
        text = "PySpark is not installed: pip install polybus[spark]"
        raise PolybusError("spark.no-pyspark", text)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if data is not None:
        # The Python processes that plan and read inherit it from the JVM.
        os.environ["POLYBUS_DATA"] = str(data.absolute())
    if master.startswith("sc://"):
        from pyspark.sql import SparkSession

        spark = equip(SparkSession.builder.remote(master).appName(app).getOrCreate(), conf)
    else:
        spark = _beside_jvm(master, settings(master, app) | dict(conf or {}), memory, data)
    # Over Spark Connect, PySpark 4.3 drops a listener at the first event of a Python source.
    is_new = (data, url) not in _reported and not is_connect(spark)
    if is_new and (data is not None or url is not None):
        from polybus.spark.listener import install

        _reported.add((data, url))
        install(spark, data=data, url=url)
    return spark


def jvms() -> list[Jvm]:
    """The JVM of this process, if it has one, also while Spark starts in it."""
    return [*_jvms]


def watch_java_yourself() -> None:
    """The caller will end this process when its JVM has ended."""
    for jvm in _jvms:
        jvm.leave_alone()


def settings(master: str, app: str) -> dict[str, str]:
    """Our settings of a session with its own JVM."""
    cores = str(_cores(master))
    chosen = {
        "spark.master": master,
        "spark.app.name": app,
        "spark.sql.shuffle.partitions": cores,
        "spark.default.parallelism": cores,
        **QUERY_SETTINGS,
        **EMBEDDED_SETTINGS,
    }
    # The host of `spark://host:port`; empty if there is none, or several.
    host = master.partition("://")[2].rpartition(":")[0]
    if is_local(master) or host in LOOPBACK:
        chosen["spark.driver.host"] = chosen["spark.driver.bindAddress"] = "127.0.0.1"
    return chosen


def is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _cores(master: str) -> int:
    """The number of parallel tasks, if the master's address says it."""
    if not is_local(master):
        return max(2, os.cpu_count() or 1)
    count = master.removeprefix("local").strip("[]").partition(",")[0]
    return (os.cpu_count() or 1) if count == "*" else int(count or 1)


def _beside_jvm(
    master: str, chosen: dict[str, str], memory: str, data: Path | None
) -> SparkSession:
    """The session of the JVM of this process, with our source."""
    python = chosen.get("spark.pyspark.python", os.environ["PYSPARK_PYTHON"])
    is_ours = is_local(master) and python == sys.executable
    if is_ours:
        chosen.setdefault(WORKER_PARENT, "polybus.spark.worker_parent")
    is_first = not _jvms
    is_foreign = is_first and _has_session()
    if is_local(master) and is_first and not is_foreign:
        check_python(os.environ["PYSPARK_PYTHON"])
    spark = _embedded(chosen, memory, data)
    if is_foreign and not is_connect(spark):
        master = spark.sparkContext.master
        if is_local(master):
            check_python(spark.sparkContext.pythonExec)
            # It looks for sources with another Python, PYSPARK_DRIVER_PYTHON.
            if not knows_source(spark, "polybus"):
                register_source(spark)
    if is_ours and is_first and _jvms and not _has_other_sources():
        from polybus.spark.source import PolybusDataSource

        # If this Spark does it otherwise, it looks for them as ever.
        with contextlib.suppress(java_errors()):
            set_python_sources(spark, [PolybusDataSource])
    if not is_local(master):
        spark.sparkContext.addPyFile(str(shipping.package()))
        register_source(spark)
    return spark


def _embedded(chosen: dict[str, str], memory: str, data: Path | None) -> SparkSession:
    """The session of a JVM that we start, or the session that the process already has."""
    jvm = None
    if not _jvms and not _has_session():
        # Spark's log is beside the checkpoints of the pipeline, if there is a data folder.
        log = None if data is None else data / "pipeline" / "spark.log"
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        jvm = Jvm(
            memory=memory,
            loopback="spark.driver.bindAddress" in chosen,
            log=log,
            jars={name: value for name, value in chosen.items() if name.split(".")[1] == "jars"},
        )
        _jvms.append(jvm)
    # The import of PySpark takes as long as the start of the JVM: both happen at once.
    from pyspark.sql import SparkSession

    from polybus.spark.session.topic_session import as_topic_session

    folders = {}
    if _jvms:
        scratch = str(_jvms[0].scratch)
        folders = {"spark.local.dir": scratch, "spark.sql.warehouse.dir": f"{scratch}/warehouse"}
    builder = SparkSession.builder.config(map=folders | chosen)
    if jvm is None:
        return as_topic_session(builder.getOrCreate())
    try:
        with jvm.offered():
            return as_topic_session(builder.getOrCreate())
    except BaseException:
        _jvms.remove(jvm)
        raise


def _has_other_sources() -> bool:
    """Whether there are modules besides ours that Spark would look for and register."""
    found = {one.name for one in pkgutil.iter_modules([*sys.path, os.getcwd()])}
    return any(name.startswith("pyspark_") for name in found - {"pyspark_polybus"})


def _has_session() -> bool:
    """Whether the process has a session that other code created."""
    pyspark = sys.modules.get("pyspark.sql")
    return pyspark is not None and pyspark.SparkSession.getActiveSession() is not None
