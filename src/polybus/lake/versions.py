"""The versions of a lake table on disk: small files, each whole or not there.

`_polybus/<version>.json` says what a version changed: files that came and went, columns that came,
which batch of which writer it was. `_polybus/checkpoint.json` says what all of them came to, every
CHECKPOINT_EVERY versions, so opening a table reads a bounded number of files however old it is.
Version files are kept back to the checkpoint before the last, and removed oldest first. So whoever
holds a version whose file is still there, and finds no next one, holds the newest.

Each file ends with a checksum of itself and is put in place by one rename.

Order of writes: the rows' files and their folders, fsynced; the version; every CHECKPOINT_EVERY
versions the checkpoint, then the removal of versions that the checkpoint before it covers. After a
crash the table is at the last version in place: files that no version names are not in it, a
missing checkpoint is made by a later commit, and old versions go with the next checkpoint.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa
import xxhash

from polybus.errors import StorageError
from polybus.lake.files import TableFile
from polybus.log.disk import Disk, replace_file

FOLDER = "_polybus"
CHECKPOINT = "checkpoint.json"
CHECKPOINT_EVERY = 20
_DIGEST_BYTES = 17  # Sixteen digits and a line feed.
_LOAD_TRIES_MAX = 100

T = TypeVar("T")


class Version(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What one commit changed. `schema` is None if the columns stay as they are."""

    version: int
    time_us: int
    writer: str
    batch: int | None = None
    schema: str | None = None
    add: tuple[TableFile, ...] = ()
    remove: tuple[str, ...] = ()


class State(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What a table is at a version: its files in the order they came, and its writers' batches."""

    version: int = 0
    schema: str | None = None
    files: dict[str, TableFile] = msgspec.field(default_factory=dict)
    batches: dict[str, int] = msgspec.field(default_factory=dict)

    def after(self, change: Version) -> State:
        """The state that a version makes of this one."""
        gone = set(change.remove)
        files = {path: file for path, file in self.files.items() if path not in gone}
        files |= {file.path: file for file in change.add}
        batches = self.batches
        if change.batch is not None:
            batches = batches | {change.writer: change.batch}
        return msgspec.structs.replace(
            self,
            version=change.version,
            schema=self.schema if change.schema is None else change.schema,
            files=files,
            batches=batches,
        )


def version_path(folder: Path, version: int) -> Path:
    return folder / f"{version:020d}.json"


def load(folder: Path) -> State:
    """The newest state in a table's `_polybus` folder; an empty one if there is no table.

    Raises:
        StorageError: `lake.damaged`, naming the file.
    """
    for _ in range(_LOAD_TRIES_MAX):
        checkpoint = _read(folder / CHECKPOINT, State)
        state = follow(folder, checkpoint or State())
        if state.version == 0 or version_path(folder, state.version).exists():
            return state
        # A writer went past us and removed what we were about to read: begin again.
        if checkpoint is not None and _read(folder / CHECKPOINT, State) == checkpoint:
            break
    text = f"{version_path(folder, state.version)}: missing, though the checkpoint names it"
    raise StorageError("lake.damaged", text)


def follow(folder: Path, state: State) -> State:
    """The state after all versions that follow it on disk."""
    while True:
        change = _read(version_path(folder, state.version + 1), Version)
        if change is None:
            return state
        state = state.after(change)


def refreshed(folder: Path, state: State) -> State:
    """The newest state, for one that was the newest some time ago: reads only what is new."""
    if state.version == 0:
        return load(folder)
    newer = follow(folder, state)
    if version_path(folder, newer.version).exists():
        return newer
    return load(folder)


def save(folder: Path, change: Version, disk: Disk) -> None:
    """Put a version in place; when this returns it survives a power cut. Only under the lock."""
    replace_file(version_path(folder, change.version), _sealed(change), disk)


def checkpoint(folder: Path, state: State, disk: Disk) -> None:
    """Sum up the versions so far, and remove those before the last checkpoint. Under the lock."""
    last = _read(folder / CHECKPOINT, State)
    previous = 0 if last is None else last.version
    replace_file(folder / CHECKPOINT, _sealed(state), disk)
    # Down to the first that is missing, then upwards: oldest first, and leftovers go too.
    oldest = previous
    while oldest > 0 and version_path(folder, oldest).exists():
        oldest -= 1
    for version in range(oldest + 1, previous + 1):
        disk.unlink(version_path(folder, version))


def encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def _sealed(value: object) -> bytes:
    content = msgspec.json.encode(value) + b"\n"
    return content + xxhash.xxh3_64_hexdigest(content).encode() + b"\n"


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        sealed = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError("lake.damaged", f"{path}: {error.strerror}") from error
    content, digest = sealed[:-_DIGEST_BYTES], sealed[-_DIGEST_BYTES:]
    if xxhash.xxh3_64_hexdigest(content).encode() + b"\n" != digest:
        raise StorageError("lake.damaged", f"{path}: its checksum is wrong")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise StorageError("lake.damaged", f"{path}: {error}") from error
