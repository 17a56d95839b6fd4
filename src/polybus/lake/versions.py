"""The versions of a lake table on disk: small files, each replaced atomically.

`_polybus/<version>.json` records what a version changed: files added and removed, new columns, and
which batch of which writer it was. `_polybus/checkpoint.json` sums up all versions, every
CHECKPOINT_EVERY versions, so that opening a table reads a bounded number of files. Each file ends
with a checksum of itself.

Order of writes: version file; then, when one is due, the checkpoint; then the removal of version
files up to the checkpoint before, oldest first. After the first write the version exists. A
checkpoint that is missing, or older than the newest version, is followed by the version files
(`follow`). Version files that a crash kept from being removed are removed by the next checkpoint.
Because removal is oldest first, a reader whose version file still exists and that finds no next
one has the newest version.
"""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa
import xxhash

from polybus.errors import StorageError, UsageError
from polybus.lake.files import TableFile
from polybus.log.disk import Disk, replace_file

FOLDER = "_polybus"
CHECKPOINT = "checkpoint.json"
CHECKPOINT_EVERY = 20
_DIGEST_BYTES = 17  # Sixteen digits and a line feed.
_LOAD_TRIES_MAX = 100

T = TypeVar("T")


class Version(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What one commit changed. `schema` is None if the columns did not change."""

    version: int
    time_us: int
    writer: str
    batch: int | None = None
    schema: str | None = None
    add: tuple[TableFile, ...] = ()
    remove: tuple[str, ...] = ()


class TableState(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A table at a version: its files in the order of their commits, each writer's last batch."""

    version: int = 0
    schema: str | None = None
    files: dict[str, TableFile] = msgspec.field(default_factory=dict)
    batches: dict[str, int] = msgspec.field(default_factory=dict)

    def after(self, change: Version) -> "TableState":
        """The state after the next version."""
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


def load(folder: Path) -> TableState:
    """The newest state in a table's `_polybus` folder; an empty one without a table.

    Raises:
        StorageError: `lake.damaged`, naming the file.
    """
    for _ in range(_LOAD_TRIES_MAX):
        checkpoint = _read(folder / CHECKPOINT, TableState)
        state = follow(folder, checkpoint or TableState())
        if state.version == 0 or version_path(folder, state.version).exists():
            return state
        # A writer removed the version files that we were about to read: begin again.
        if checkpoint is not None and _read(folder / CHECKPOINT, TableState) == checkpoint:
            break
    text = f"{version_path(folder, state.version)}: missing, though the checkpoint names it"
    raise StorageError("lake.damaged", text)


def follow(folder: Path, state: TableState) -> TableState:
    """The state after all later versions on disk."""
    while True:
        change = _read(version_path(folder, state.version + 1), Version)
        if change is None:
            return state
        state = state.after(change)


def refreshed(folder: Path, state: TableState) -> TableState:
    """The newest state, given an earlier one: reads only the versions in between."""
    if state.version == 0:
        return load(folder)
    newer = follow(folder, state)
    if version_path(folder, newer.version).exists():
        return newer
    return load(folder)


def save(folder: Path, change: Version, disk: Disk) -> None:
    """Write a version durably. Only under the table's lock."""
    replace_file(version_path(folder, change.version), _sealed(change), disk)


def checkpoint(folder: Path, state: TableState, disk: Disk) -> None:
    """Write a checkpoint, and remove versions up to the one before. Under the table's lock."""
    last = _read(folder / CHECKPOINT, TableState)
    previous = 0 if last is None else last.version
    replace_file(folder / CHECKPOINT, _sealed(state), disk)
    # Find the oldest, then remove upwards; this includes leftovers of a crash.
    oldest = previous
    while oldest > 0 and version_path(folder, oldest).exists():
        oldest -= 1
    for version in range(oldest + 1, previous + 1):
        disk.unlink(version_path(folder, version))


def encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def merged_schema(
    table: str, known: pa.Schema | None, additions: Iterable[pa.Schema]
) -> pa.Schema | None:
    """The columns of a table after it takes files with these columns; None if there are none.

    New columns come at the end; known ones keep their type.

    Raises:
        UsageError: `lake.schema`, the table has the column with another type or spelling.
    """
    fields: dict[str, pa.Field] = {}
    if known is not None:
        fields = {field.name: field for field in known}
    spellings = {name.lower(): name for name in fields}
    seen_any = known is not None
    for schema in additions:
        seen_any = True
        for field in schema:
            spelling = spellings.setdefault(field.name.lower(), field.name)
            if spelling != field.name:
                text = f"table {table} has a column {spelling}, new rows have {field.name}"
                raise UsageError("lake.schema", text)
            there = fields.setdefault(field.name, field)
            if there.type != field.type:
                text = (
                    f"table {table}: column {field.name} is {there.type}, "
                    f"in the new rows it is {field.type}"
                )
                raise UsageError("lake.schema", text)
    return pa.schema(list(fields.values())) if seen_any else None


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError("lake.damaged", f"{path}: {error}") from error
