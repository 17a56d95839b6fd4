"""A Spark session as Polybus wants it: quick to start, bounded, quiet, on loopback only."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from polybus.errors import PolybusError
from polybus.spark import shipping
from polybus.spark.session import gateway
from polybus.spark.session.connect import is_connect
from polybus.spark.session.gateway import Jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2,3]"
"""Two threads; a task that fails is tried three times, as on a cluster."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
NONE: Mapping[str, str] = MappingProxyType({})

# The process's JVM; PySpark takes no second one.
_made: list[Jvm] = []
# Where the session's queries are reported already.
_reported: set[tuple[Path | None, str | None]] = set()

# Settings that hold for a query; a Spark Connect server takes these and no others.
QUERY_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.pollingDelay": "50ms",
    "spark.sql.streaming.stateStore.rocksdb.boundedMemoryUsage": "true",
    "spark.sql.streaming.stateStore.rocksdb.maxMemoryUsageMB": "64",
}
# Without native Hadoop the default manager starts two processes for each file of a checkpoint.
FILE_SETTINGS = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}
# A pipeline runs for weeks: what Spark remembers of finished work must not grow.
MEMORY_SETTINGS = {
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
    conf: Mapping[str, str] = NONE,
) -> SparkSession:
    """The process's Spark session; made on the first call, the same one after that.

    `data` or `url` say where the bus is: it lists the session's queries as its consumers, and
    readers and writers that name neither take the folder `data` of the first call. Programs with
    several folders name them in the options.
    `master` is `local[…]` for an embedded session, `spark://…` for a cluster, or `sc://…` for a
    Spark Connect server. `memory` is the heap of the embedded JVM: at the default of 1 GiB all of
    Spark stays within 2 GiB. `conf` wins over our settings.

    Raises:
        PolybusError: `spark.no-pyspark`, `spark.no-java`, `spark.start-failed`.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise PolybusError("spark.no-pyspark", "PySpark is not installed")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if data is not None:
        # For the Python processes that plan and read: they inherit it from the JVM.
        os.environ["POLYBUS_DATA"] = str(data.absolute())
    if master.startswith("sc://"):
        spark = _connect(master, app, conf)
    else:
        spark = _embedded(settings(master, app) | dict(conf), memory, data)
        if not is_local(master):
            spark.sparkContext.addPyFile(str(shipping.package()))
            _register(spark)
    # Over Spark Connect, PySpark 4.3 gives a listener up at the first word of a source in Python.
    if (data is not None or url is not None) and not is_connect(spark):
        _report_queries(spark, data, url)
    return spark


def _register(spark: SparkSession) -> None:
    """Make `format("polybus")` known, with the code that was added to the session.

    A source that PySpark finds by itself does not take added files along to the workers; one that
    is registered after they were added does.
    """
    from polybus.spark.source import PolybusDataSource

    spark.dataSource.register(PolybusDataSource)


def _report_queries(spark: SparkSession, data: Path | None, url: str | None) -> None:
    """Let the bus list the session's queries as consumers; once a bus."""
    from polybus.spark.listener import install

    if (data, url) not in _reported:
        _reported.add((data, url))
        install(spark, data=data, url=url)


def settings(master: str, app: str) -> dict[str, str]:
    """Our settings of a session with a JVM of its own."""
    cores = _cores(master)
    chosen = {
        "spark.master": master,
        "spark.app.name": app,
        "spark.sql.shuffle.partitions": str(cores),
        "spark.default.parallelism": str(cores),
        **QUERY_SETTINGS,
        **FILE_SETTINGS,
        **MEMORY_SETTINGS,
    }
    if is_local(master) or _host(master) in LOOPBACK:
        chosen["spark.driver.host"] = "127.0.0.1"
        chosen["spark.driver.bindAddress"] = "127.0.0.1"
    return chosen


def is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def _host(master: str) -> str:
    """The host of `spark://host:port`; empty where there is none, or several."""
    return master.partition("://")[2].rpartition(":")[0]


def _cores(master: str) -> int:
    """How many tasks run at once, as far as the master's address tells."""
    if not is_local(master):
        return max(2, os.cpu_count() or 1)
    count = master.removeprefix("local").strip("[]").partition(",")[0]
    if count == "*":
        return os.cpu_count() or 1
    return int(count or 1)


def _embedded(chosen: dict[str, str], memory: str, data: Path | None) -> SparkSession:
    """The session of a JVM of ours, or the one that the process has already."""
    jvm = None
    if not _made and not _has_session():
        jvm = gateway.Jvm(
            memory=memory,
            loopback="spark.driver.bindAddress" in chosen,
            log=_log_path(data),
            jars={name: value for name, value in chosen.items() if name.split(".")[1] == "jars"},
        )
    # PySpark takes as long to import as the JVM takes to start: both happen at once.
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    ours = jvm or (_made[0] if _made else None)
    for name, value in ((_folders(ours) if ours else {}) | chosen).items():
        builder = builder.config(name, value)
    if jvm is None:
        return builder.getOrCreate()
    with jvm.offered():
        spark = builder.getOrCreate()
    _made.append(jvm)
    return spark


def _connect(url: str, app: str, conf: Mapping[str, str]) -> SparkSession:
    """A session on a Spark Connect server, which has our code from now on."""
    from pyspark.sql import SparkSession

    return equip(SparkSession.builder.remote(url).appName(app).getOrCreate(), conf)


def equip(spark: SparkSession, conf: Mapping[str, str] = NONE) -> SparkSession:
    """Give a session of Spark Connect what is ours: a new one on the server has nothing."""
    for name, value in {**QUERY_SETTINGS, **conf}.items():
        spark.conf.set(name, value)
    spark.addArtifacts(str(shipping.package()), pyfile=True)
    _register(spark)
    return spark


def _has_session() -> bool:
    """Whether the process has a session that somebody else made."""
    if "pyspark.sql" not in sys.modules:
        return False
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


def _folders(jvm: Jvm) -> dict[str, str]:
    return {
        "spark.local.dir": str(jvm.scratch),
        "spark.sql.warehouse.dir": str(jvm.scratch / "warehouse"),
    }


def _log_path(data: Path | None) -> Path | None:
    """Spark's log is kept beside the pipeline's checkpoints, if there is a data folder."""
    if data is None:
        return None
    folder = data / "pipeline"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "spark.log"
