"""Spark Connect (`sc://`): prepares new sessions on a server, and checks whether it can run flows.

The files of a session reach the processes of a batch query, so a server without Polybus can read a
topic. They do not reach the processes of streams: for these, Polybus must be installed.
"""

import contextlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from polybus import __version__
from polybus.errors import UsageError
from polybus.spark import shipping
from polybus.spark.internals import STREAM_SETTINGS

# The settings of queries: a Spark Connect server accepts no others.
QUERY_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    **STREAM_SETTINGS,
}

_opened: list[Any] = []


def equip(spark: Any, conf: Mapping[str, str] | None = None) -> Any:
    """Give a session of Spark Connect our settings and our code; a new one has neither."""
    for name, value in {**QUERY_SETTINGS, **(conf or {})}.items():
        spark.conf.set(name, value)
    spark.addArtifacts(str(shipping.package()), pyfile=True)
    register_source(spark)
    return spark


def register_source(spark: Any) -> None:
    """Make `format("polybus")` known together with the files that were added to the session.

    A source that PySpark finds by itself does not send added files to the workers.
    """
    from polybus.spark.source import PolybusDataSource

    spark.dataSource.register(PolybusDataSource)


def new_session(spark: Any) -> Any:
    """Another equipped session on the same server; `end_all` ends it."""
    opened = spark.newSession()
    _opened.append(opened)
    return equip(opened)


def end_all() -> None:
    """End the sessions of `new_session`."""
    while _opened:
        _opened.pop().stop()


def check_server(spark: Any, data: Path) -> None:
    """Check that streams can run on the server and write to our tables.

    Raises:
        UsageError: `spark.server` if it has no Polybus, another version, or not the data folder.
    """
    folder = (data / "pipeline").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f"{uuid.uuid4().hex}.shared"
    mark.touch()
    # A session without our files, like the processes of a stream.
    bare = spark.newSession()
    try:
        schema = "version string, shared boolean"
        (row,) = bare.range(1).mapInArrow(_probe(str(mark)), schema).collect()
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
        bare.stop()
    if row.version != __version__:
        has = f"Polybus {row.version}, not {__version__}" if row.version else "no Polybus"
        text = f"the Spark Connect server has {has}, and streams need it in their processes"
        raise UsageError("spark.server", f"{text}; pip install polybus=={__version__} there")
    if not row.shared:
        text = f"the Spark Connect server cannot access {folder}, where tables and checkpoints are"
        raise UsageError("spark.server", f"{text}; mount it there at the same path")


def _probe(mark: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    # A nested function is sent to the server by value, and needs no module of ours there.
    def probe(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os

        import pyarrow

        try:
            from polybus import __version__ as version
        except ImportError:
            version = ""
        for batch in batches:
            rows = batch.num_rows
            columns = {"version": [version] * rows, "shared": [os.path.exists(mark)] * rows}
            yield pyarrow.record_batch(columns)

    return probe
