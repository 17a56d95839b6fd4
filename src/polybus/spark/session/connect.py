"""Spark Connect (`sc://`): what a session there lacks, and whether its server can run flows.

A session's files reach the processes of a batch query, and so a topic can be read by a server that
has no Polybus. Streams run in processes that do not get them: there it must be installed.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from polybus import __version__
from polybus.errors import UsageError

_made: list[Any] = []


def is_connect(spark: Any) -> bool:
    """Whether the session is one of Spark Connect: its plans and its Java are out of reach."""
    return getattr(spark, "_jsparkSession", None) is None


def new_session(spark: Any) -> Any:
    """A session of its own on the same server, with what is ours; it ends with `end_all`."""
    from polybus.spark.session import equip

    made = spark.newSession()
    _made.append(made)
    return equip(made)


def end_all() -> None:
    """End the sessions of `new_session`."""
    while _made:
        _made.pop().stop()


def check_server(spark: Any, data: Path) -> None:
    """See to it that streams can run on the server, and write to our tables.

    Raises:
        UsageError: `spark.server`, it has no Polybus, another version, or not the data folder.
    """
    folder = (data / "pipeline").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f"{uuid.uuid4().hex}.shared"
    mark.touch()
    # Not ours: in a session without our files, as a stream's processes are.
    bare = spark.newSession()
    try:
        (row,) = (
            bare.range(1).mapInArrow(_look(str(mark)), "version string, shared boolean").collect()
        )
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
        bare.stop()
    if row.version != __version__:
        has = (
            f"has Polybus {row.version}, this is {__version__}" if row.version else "has no Polybus"
        )
        text = f"the Spark Connect server {has}: streams run in processes of its own"
        raise UsageError("spark.server", f"{text}; pip install polybus=={__version__} there")
    if not row.shared:
        text = f"the Spark Connect server does not see {folder}, where tables and checkpoints are"
        raise UsageError("spark.server", f"{text}; mount it there at the same path")


def _look(mark: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    # A function within a function goes to the server as it is, and needs no module of ours there.
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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

    return look
