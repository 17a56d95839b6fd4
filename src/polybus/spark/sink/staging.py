"""Staging: the rows of a task, durable in a file of their own, not yet visible.

If the data folder of the bus is on this machine, the file is written into it. Otherwise it is
written to a temporary file and uploaded. The driver's commit makes the rows visible.

Order of writes: the folders, the file, its rows; then fsyncs of the file and of every folder up to
the data folder, and only then the name goes to the driver. A file that a crash leaves unfinished
has a name that nobody knows, and the bus removes it after a day.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from polybus.errors import PolybusError, UsageError
from polybus.log.disk import sync_path
from polybus.log.topics import storage_error
from polybus.services.transactions.staging import SCHEMA, staging_folder
from polybus.spark.location import BusLocation
from polybus.spark.sink.columns import SinkColumns

PIECE_BYTES = 4 << 20
PATIENCE_S = 30.0
"""How long a task, or the driver, waits for a bus that is away."""
_CREATE_ATTEMPTS = 5


@dataclass
class StagedFile(WriterCommitMessage):
    """What a task of a query has staged: a file, or None if it had no rows."""

    name: str | None
    query: str


def stage(
    rows: Iterator[pa.RecordBatch],
    columns: SinkColumns,
    location: BusLocation,
    producer: str,
    batch: int,
) -> str | None:
    """Stage all rows; return the name of the file, or None if there are no rows.

    When this returns, the rows survive a power cut. If it raises, nothing is left behind.

    Raises:
        UsageError: `sink.column`; `topic.invalid`; `data.not-found`.
        StorageError: the disk is full or fails; the text names the file.
        PolybusError: the bus is away.
    """
    name = f"{batch}-{uuid4().hex}.arrows"
    if location.url is not None:
        with tempfile.TemporaryFile() as file:
            if not _write(file, Path(tempfile.gettempdir()), rows, columns):
                return None
            file.seek(0)
            _upload(file, location, f"/v1/staging/{producer}/{name}")
        return name
    if not (location.data / "polybus.json").exists():
        text = f"{location.data} is not a data folder on this machine"
        advice = "if tasks run on other machines, set option url instead of data"
        raise UsageError("data.not-found", f"{text}; {advice}")
    folder = staging_folder(location.data) / producer
    path = folder / name
    try:
        with _created(path) as file:
            has_rows = _write(file, path, rows, columns)
            os.fsync(file.fileno())
        if not has_rows:
            path.unlink()
            return None
        for one in (folder, folder.parent, location.data):
            sync_path(one)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise storage_error(error, f"cannot stage {path}") from error
        raise
    return name


def unstage(location: BusLocation, producer: str, name: str) -> None:
    """Ask the bus to remove a staged file; it does not if the file is committed.

    While the bus is away the file stays, and the bus removes it later.
    """
    with contextlib.suppress(PolybusError):
        location.call("DELETE", f"/v1/staging/{producer}/{name}")


def _created(path: Path) -> IO[bytes]:
    for _ in range(_CREATE_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The bus removes the empty folder of a producer, perhaps at this moment.
        with contextlib.suppress(FileNotFoundError):
            return path.open("xb")
    return path.open("xb")


def _write(
    file: IO[bytes], path: Path, rows: Iterator[pa.RecordBatch], columns: SinkColumns
) -> bool:
    """Write the rows; return whether there were any."""
    has_rows = False
    try:
        with pa.ipc.new_stream(file, SCHEMA) as writer:
            for batch in rows:
                for part in columns.staged(batch):
                    writer.write_batch(part)
                    has_rows = True
        file.flush()
    except OSError as error:
        raise storage_error(error, f"cannot stage {path}") from error
    return has_rows


def _upload(file: IO[bytes], location: BusLocation, path: str) -> None:
    position = 0
    piece = file.read(PIECE_BYTES)
    while piece:
        following = file.read(PIECE_BYTES)
        query = f"?position={position}&end={'false' if following else 'true'}"
        # Idempotent: the bus ignores a piece that it has at that position.
        location.call("POST", path + query, piece, patience_s=PATIENCE_S)
        position += len(piece)
        piece = following
