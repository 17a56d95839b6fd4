"""Staged files, as a producer writes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from uuid import uuid4

import pyarrow as pa

from polybus.services.transactions.staging import SCHEMA


def stage(
    data: Path, producer: str, batch: int, rows: Sequence[tuple[str, str]], *, name: str = ""
) -> str:
    """Stage one record batch for each (topic, value), fsynced; return the file's name."""
    name = name or f"{batch}-{uuid4().hex}.arrows"
    folder = data / "staging" / producer
    with _created(folder / name) as file:
        with pa.ipc.new_stream(file, SCHEMA) as writer:
            for topic, value in rows:
                arrays = [[topic], [None], [value.encode()], [None]]
                columns = [pa.array(one, of.type) for one, of in zip(arrays, SCHEMA, strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, folder.parent, data):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return name


def _created(path: Path) -> IO[bytes]:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The bus removes a producer's empty folder, perhaps just now.
        with contextlib.suppress(FileNotFoundError):
            return path.open("xb")
