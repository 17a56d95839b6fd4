"""A task's rows on their way to the bus: staged under a name nobody else has, safe on disk.

With the bus's data folder at hand the file is written into it; else it is written here and
uploaded. Either way nothing is visible to anybody until the driver commits it.
"""

from __future__ import annotations

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

from polybus.client.http.blocking import bus_url, persist, read_token, request
from polybus.errors import PolybusError, UsageError
from polybus.log.topics import storage_error
from polybus.services.transactions.staging import SCHEMA, staging_folder
from polybus.spark.sink.columns import SinkColumns
from polybus.spark.where import Where

PIECE_BYTES = 4 << 20
PATIENCE_S = 30.0
"""How long a task, or the driver, waits for a bus that is away."""
_TRIES = 5
OCTETS = "application/octet-stream"


@dataclass
class Staged(WriterCommitMessage):
    """What a task has staged: a file, or none if it had no rows."""

    file: str | None
    rows: int
    query: str
    batch: int


def url_of(where: Where) -> str:
    """The bus's address now; a bus that is started again may have another."""
    if where.url is not None:
        return where.url
    assert where.data is not None
    return bus_url(where.data)


def token_of(where: Where) -> str | None:
    if where.token is not None or where.data is None:
        return where.token
    return read_token(where.data)


def stage(
    rows: Iterator[pa.RecordBatch], columns: SinkColumns, where: Where, producer: str, batch: int
) -> tuple[str | None, int]:
    """Stage all rows; return the file's name, None if there are no rows, and how many there are.

    When this returns they survive a power cut. If it raises, nothing is left behind.

    Raises:
        UsageError: `sink.column`; `topic.invalid`; `data.not-found`.
        StorageError: the disk is full or fails; the text names the file.
        PolybusError: the bus is away.
    """
    name = f"{batch}-{uuid4().hex}.arrows"
    if where.data is None:
        with tempfile.TemporaryFile() as file:
            count = _write(file, Path(tempfile.gettempdir()), rows, columns)
            if count:
                file.seek(0)
                _upload(file, where, f"/v1/staging/{producer}/{name}")
        return (name if count else None), count
    if not (where.data / "polybus.json").exists():
        text = (
            f"{where.data} is no data folder on this machine; where tasks run elsewhere, write "
            "with the option url of the bus instead of data"
        )
        raise UsageError("data.not-found", text)
    folder = staging_folder(where.data) / producer
    path = folder / name
    try:
        with _created(path) as file:
            count = _write(file, path, rows, columns)
            os.fsync(file.fileno())
        if not count:
            path.unlink()
            return None, 0
        for one in (folder, folder.parent):
            sync_folder(one)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise storage_error(error, f"cannot stage {path}") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return name, count


def unstage(where: Where, producer: str, file: str) -> None:
    """Remove a staged file that will not be committed, through the bus: it knows if that is so.

    One that stays because the bus is away is removed by it later.
    """
    with contextlib.suppress(PolybusError):
        request(url_of(where), "DELETE", f"/v1/staging/{producer}/{file}", token=token_of(where))


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _created(path: Path) -> IO[bytes]:
    for _ in range(_TRIES):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The bus removes a producer's folder when it is empty, just now perhaps.
        with contextlib.suppress(FileNotFoundError):
            return path.open("xb")
    return path.open("xb")


def _write(
    file: IO[bytes], path: Path, rows: Iterator[pa.RecordBatch], columns: SinkColumns
) -> int:
    count = 0
    try:
        with pa.ipc.new_stream(file, SCHEMA) as writer:
            for batch in rows:
                for part in columns.staged(batch):
                    writer.write_batch(part)
                    count += part.num_rows
        file.flush()
    except OSError as error:
        raise storage_error(error, f"cannot stage {path}") from error
    return count


def _upload(file: IO[bytes], where: Where, path: str) -> None:
    position = 0
    piece = file.read(PIECE_BYTES)
    while piece:
        more = file.read(PIECE_BYTES)
        query = f"?position={position}&end={'false' if more else 'true'}"
        _send(where, path + query, piece)
        position += len(piece)
        piece = more


def _send(where: Where, path: str, piece: bytes) -> None:
    def send() -> bytes:
        token = token_of(where)
        return request(url_of(where), "POST", path, piece, token=token, content_type=OCTETS)

    persist(send, timeout_s=PATIENCE_S)
