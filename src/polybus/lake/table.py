"""LakeTable: a folder of Parquet files, and a list of versions that says which of them count.

A reader takes the files of one version and reads them with any engine. A writer puts new files into
the folder, where no reader looks, and then commits: one small file is renamed into place, and
readers that ask from then on see the new version.

    DATA/tables/<table>/<anything>.parquet                    rows
    DATA/tables/<table>/topic=orders/<anything>.parquet       rows of a partition
    DATA/tables/<table>/_polybus/                             versions, checkpoint, lock
    DATA/tables/<table>/_staging/                             uncommitted files of writers

Order of writes of a commit: row files, their fsync, fsync of their folders, version file (then
perhaps a checkpoint, see lake/versions.py). A crash before the version file leaves the old version
and files that no version names, which `vacuum` (lake/compact.py) removes. A crash after it leaves
the new version. A writer that repeats its batch after a crash is recognised by its batch number,
which is in the version file itself.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from polybus import names
from polybus.errors import BusyError, StorageError, UsageError
from polybus.lake import files as lake_files
from polybus.lake import versions
from polybus.lake.files import FileNote, TableFile, new_path, note_of
from polybus.lake.versions import TableState, Version, merged_schema
from polybus.log.disk import Disk, FileLock, sync_path

STAGING = "_staging"
LOCK_TIMEOUT_S = 30.0
WRITER_NAME_BYTES_MAX = 255


class Conflict(BusyError):
    """Another writer changed the table meanwhile: read it and do the work again."""

    def __init__(self, table: str) -> None:
        super().__init__("lake.conflict", f"table {table} was changed meanwhile", retry_after_s=0.1)


def table_error(error: OSError, what: str) -> StorageError:
    """The StorageError for an error of the disk under a table."""
    return StorageError("lake.storage", f"{what}: {error.strerror or error}")


class LakeTable:
    """A table of the lake, for any number of readers and writers in any process.

    An object caches the newest version that it has seen; every property looks for a newer one.
    """

    def __init__(self, path: Path, *, disk: Disk | None = None) -> None:
        """Open a table's folder. It need not exist: the first commit creates it."""
        self.path = Path(path).absolute()
        self.folder = self.path / versions.FOLDER
        self.disk = disk or Disk()
        self._state = TableState()

    @property
    def name(self) -> str:
        return unquote(self.path.name)

    @property
    def state(self) -> TableState:
        """The newest version. Raises StorageError `lake.damaged`."""
        self._state = versions.refreshed(self.folder, self._state)
        return self._state

    @property
    def exists(self) -> bool:
        return self.state.version > 0

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.state.files.values())

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.state.files.values())

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of the newest version and of folder names; None before a commit."""
        text = self.state.schema
        return None if text is None else versions.decode_schema(text)

    def files(self, **ranges: tuple[int | None, int | None]) -> list[Path]:
        """The files of the newest version, in the order of their commits.

        `offset=(10, None)` or `timestamp=(from_us, to_us)` leaves out files whose statistics show
        that they have no row within these bounds, both included.
        """
        return [
            self.path / file.path for file in self.state.files.values() if _may_hold(file, ranges)
        ]

    def last_batch(self, writer: str) -> int | None:
        """The last batch that a writer has committed."""
        return self.state.batches.get(writer)

    def read(self) -> pa.Table:
        """All rows through pyarrow, for small tables."""
        return self.read_version(self.state)

    def read_version(self, state: TableState) -> pa.Table:
        """All rows of a version whose files still exist."""
        # Slow to import, and only needed here.
        import pyarrow.dataset as ds

        if state.schema is None:
            raise unknown_table(self.name)
        schema = pa.schema(
            [field.remove_metadata() for field in versions.decode_schema(state.schema)]
        )
        paths = [str(self.path / path) for path in state.files]
        partitioning = ds.partitioning(schema=_partition_schema(schema, state), flavor="hive")
        dataset = ds.dataset(
            paths,
            schema=schema,
            format="parquet",
            partitioning=partitioning,
            partition_base_dir=str(self.path),
        )
        return dataset.to_table()

    # Writing.

    def append(
        self,
        rows: pa.Table,
        *,
        writer: str,
        batch_id: int | None,
        partition_by: Sequence[str] = (),
    ) -> bool:
        """Add rows from memory, one file per partition; as `commit`."""
        if self._is_done(self.state, writer, batch_id):
            return False
        notes = [
            self.write(part, values, partition_types={n: rows.schema.field(n).type for n in values})
            for values, part in _partitions(rows, partition_by)
        ]
        return self.commit(notes, writer=writer, batch_id=batch_id)

    def write(
        self,
        rows: pa.Table,
        values: Mapping[str, object] | None = None,
        *,
        partition_types: Mapping[str, pa.DataType] | None = None,
    ) -> FileNote:
        """Write rows to a new file in the folder, to be committed."""
        path = new_path(values)
        full = self.path / path
        try:
            self.disk.make_folder(full.parent)
            lake_files.write_file(full, rows.schema, rows.to_batches())
        except OSError as error:
            raise table_error(error, f"table {self.name}: cannot write {full}") from error
        return note_of(self.path, path, partition_types)

    def commit(
        self,
        add: Sequence[FileNote],
        *,
        remove: Collection[str] = (),
        writer: str,
        batch_id: int | None,
        based_on: int | None = None,
    ) -> bool:
        """Add and remove files in a new version; False if this batch was committed before.

        Commits are idempotent: a writer's batches have ascending numbers, and a batch at or below
        its last one is not committed again. A writer that restarts its numbers needs a new name.
        When this returns True the version is durable. `add` are complete files in the folder;
        they are fsynced here. With `based_on` the table must still be at that version.

        Raises:
            Conflict: a file to remove is gone, or the version is not `based_on`. Nothing changed.
            UsageError: `lake.schema`, a column has another type than in the table.
            StorageError: `lake.storage`: the old version is still in place, or the new one if only
                the last fsync failed.
        """
        if len(writer.encode()) > WRITER_NAME_BYTES_MAX or not writer:
            text = f"table {self.name}: a writer's name has 1 to {WRITER_NAME_BYTES_MAX} bytes"
            raise UsageError("lake.writer", text)
        try:
            self._sync(add)
            with self._locked():
                state = self.state
                if self._is_done(state, writer, batch_id):
                    return False
                missing = [path for path in remove if path not in state.files]
                if missing or (based_on is not None and based_on != state.version):
                    raise Conflict(self.name)
                self._save(self._change(state, add, remove, writer, batch_id), state)
        except OSError as error:
            raise table_error(error, f"table {self.name}: cannot commit") from error
        return True

    def _change(
        self,
        state: TableState,
        add: Sequence[FileNote],
        remove: Collection[str],
        writer: str,
        batch_id: int | None,
    ) -> Version:
        # If no old file stays, its columns need not stay either.
        kept = state.schema if len(remove) < len(state.files) or not add else None
        known = None if kept is None else versions.decode_schema(kept)
        schema = merged_schema(self.name, known, [note.schema for note in add])
        text = None if schema is None else versions.encode_schema(schema)
        return Version(
            version=state.version + 1,
            time_us=time.time_ns() // 1000,
            writer=writer,
            batch=batch_id,
            schema=None if text == state.schema else text,
            add=tuple(note.file for note in add),
            remove=tuple(remove),
        )

    def _save(self, change: Version, state: TableState) -> None:
        for path in change.remove:
            # Readers may still use older versions: `vacuum` counts their grace period from here.
            os.utime(self.path / path)
        versions.save(self.folder, change, self.disk)
        self._state = state.after(change)
        if change.version % versions.CHECKPOINT_EVERY == 0:
            versions.checkpoint(self.folder, self._state, self.disk)

    def _sync(self, add: Sequence[FileNote]) -> None:
        """Make the new files and their names durable, before a version names them."""
        self.disk.make_folder(self.folder)
        for note in add:
            sync_path(self.path / note.file.path)
        for folder in {(self.path / note.file.path).parent for note in add}:
            self.disk.sync_folder(folder)

    def _is_done(self, state: TableState, writer: str, batch_id: int | None) -> bool:
        last = state.batches.get(writer)
        return batch_id is not None and last is not None and batch_id <= last

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the right to commit, which takes milliseconds."""
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                lock = FileLock(self.folder / "lock")
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    text = f"table {self.name}: another writer held its lock {LOCK_TIMEOUT_S:.0f} s"
                    raise BusyError("lake.busy", text) from error
                time.sleep(0.002)
        with lock:
            yield


def tables_folder(data: Path) -> Path:
    return data / "tables"


def open_table(data: Path, name: str) -> LakeTable:
    """The table of that name in a data folder, whether it exists or not."""
    return LakeTable(tables_folder(data) / names.folder_of(name))


def table_names(data: Path) -> list[str]:
    """The tables of a data folder that have a version."""
    folder = tables_folder(data)
    if not folder.is_dir():
        return []
    return sorted(unquote(entry.name) for entry in folder.iterdir() if LakeTable(entry).exists)


def unknown_table(name: str) -> UsageError:
    return UsageError("lake.unknown", f"there is no table {name}")


def _may_hold(file: TableFile, ranges: Mapping[str, tuple[int | None, int | None]]) -> bool:
    for column, (low, high) in ranges.items():
        known = file.ranges.get(column)
        if known is None:
            continue
        if (low is not None and known[1] < low) or (high is not None and known[0] > high):
            return False
    return True


def _partition_schema(schema: pa.Schema, state: TableState) -> pa.Schema:
    used = {name for path in state.files for name in lake_files.partition_values(path)}
    return pa.schema([field for field in schema if field.name in used])


def _partitions(
    rows: pa.Table, partition_by: Sequence[str]
) -> Iterator[tuple[dict[str, object], pa.Table]]:
    """The rows by the values of some columns, which are then only in the folder names."""
    if not partition_by:
        yield {}, rows
        return
    unique = rows.select(partition_by).group_by(list(partition_by)).aggregate([])
    for values in unique.to_pylist():
        mask = None
        for name, value in values.items():
            column = rows.column(name)
            same = pc.is_null(column) if value is None else pc.equal(column, value)
            same = pc.fill_null(same, False)
            mask = same if mask is None else pc.and_(mask, same)
        yield values, rows.filter(mask).drop_columns(list(partition_by))
