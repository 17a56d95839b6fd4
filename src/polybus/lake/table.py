"""LakeTable: a Delta table, which is a folder of Parquet files and a log that says which count.

A reader takes the files of one version and reads them with any engine. A writer puts new files into
the folder, which readers ignore, and then commits: one small file is linked into the log, and later
readers see the new version.

    DATA/tables/<table>/<anything>.parquet                    rows
    DATA/tables/<table>/topic=orders/<anything>.parquet       rows of a partition
    DATA/tables/<table>/_delta_log/                           versions, checkpoints
    DATA/tables/<table>/_staging/                             uncommitted files of writers

Order of writes of a commit: row files, their fsync, fsync of their folders, the version
(log/delta.py). A crash before the version leaves the old one and files that no version names,
which `vacuum` (lake/compact.py) removes. A crash after it leaves the new version. A writer that
repeats its batch after a crash is recognised by its batch number, which is in the version itself.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from polybus.errors import BusyError, StorageError, UsageError
from polybus.lake import delta_actions
from polybus.lake import files as lake_files
from polybus.lake.fields import TableFields, arrow_schema, fields_of, merged_fields
from polybus.lake.files import NewFile, new_path, note_of, parted
from polybus.lake.folders import check_format, name_in, table_folder, table_folders
from polybus.lake.table_state import TableState, state_of, writers_in
from polybus.log import delta
from polybus.log.delta import LOG, version_path
from polybus.log.disk import Disk, sync_path

ATTEMPTS_MAX = 100
WRITER_NAME_BYTES_MAX = 255


class Conflict(BusyError):
    """Another writer changed the table meanwhile: read it again and retry."""

    def __init__(self, table: str) -> None:
        super().__init__("lake.conflict", f"table {table} was changed meanwhile", retry_after_s=0.1)


def table_error(error: OSError, what: str) -> StorageError:
    """The StorageError for an error of the disk under a table."""
    return StorageError("lake.storage", f"{what}: {error.strerror or error}")


@dataclass(frozen=True)
class TableChange:
    """The changes of a commit: files, and whether rows change; `batch` of `writer` is then done.

    `feed` has the changed rows, for a table with a change data feed. `settings` are added to those
    of the table.
    """

    add: Sequence[NewFile] = ()
    remove: Collection[str] = ()
    writer: str = ""
    batch: int | None = None
    based_on: int | None = None
    is_change: bool = True
    feed: NewFile | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


class LakeTable:
    """A table of the lake, for any number of readers and writers in any process.

    An object caches the newest version that it has seen; every property checks for a newer one.
    """

    def __init__(
        self,
        path: Path,
        *,
        disk: Disk | None = None,
        at: int | datetime | None = None,
        is_fed: bool = False,
    ) -> None:
        """Open a table's folder. It need not exist: the first commit creates it.

        With `at` it shows the table at a version or a time. With `is_fed` the table gets a change
        data feed with the next commit.
        """
        self.path = Path(path).absolute()
        self.folder = self.path / LOG
        self.disk = disk or Disk()
        self._at = at
        self.is_fed = is_fed
        self._state = TableState()
        self._delta: DeltaTable | None = None
        # Versions that this process committed after that of `_delta`.
        self._batches: dict[str, int] = {}

    @property
    def name(self) -> str:
        return name_in(self.path)

    @property
    def state(self) -> TableState:
        """The newest version.

        Raises:
            StorageError: `lake.damaged`.
            UsageError: `lake.old-format`; `lake.version`, it has no such version.
        """
        version = self._state.version
        is_there = version >= 0 and version_path(self.folder, version).exists()
        if is_there and not version_path(self.folder, version + 1).exists():
            return self._state
        if self._at is not None and self._delta is not None:
            return self._state
        self._load(is_there=is_there)
        return self._state

    def _load(self, *, is_there: bool) -> None:
        """Let delta-rs read the newest version."""
        # Before it reads the log, because another writer may make a version meanwhile.
        last = delta.newest(self.path) if self._at is None else -1
        try:
            known = -1
            if self._delta is None or not is_there:
                # delta-rs may raise any error for a damaged table.
                if (found := delta.damaged_checkpoint(self.folder)) is not None:
                    raise OSError(": ".join(map(str, found)))
                self._delta = self._opened()
            else:
                known = self._delta.version()
                self._delta.update_incremental()
            is_newest = self._delta is not None and self._at is None
            damaged = delta.damaged_version(self.folder, known) if is_newest else None
            if damaged is not None:
                raise OSError(f"{damaged}: its checksum is wrong")
            if last > (-1 if self._delta is None else self._delta.version()):
                raise OSError(f"{version_path(self.folder, last)}: is missing")
        except (DeltaError, OSError) as error:
            self._delta, self._state = None, TableState()
            raise StorageError("lake.damaged", f"table {self.name}: {error}") from error
        self._batches = {}
        self._state = TableState() if self._delta is None else state_of(self._delta)

    def _opened(self) -> DeltaTable | None:
        check_format(self.path)
        if not self.folder.is_dir():
            return None
        try:
            if not isinstance(self._at, datetime):
                return DeltaTable(self.path, version=self._at)
            opened = DeltaTable(self.path)
            opened.load_as_version(self._at)
            self._check_time(opened.version(), self._at)
            return opened
        except TableNotFoundError:
            return None
        except DeltaError as error:
            if self._at is None:
                raise
            text = f"table {self.name}: version {self._at} does not exist, or was removed"
            raise UsageError("lake.version", text) from error

    def _check_time(self, version: int, at: datetime) -> None:
        """Refuse a time before the first version that is there, which delta-rs gives for it."""
        try:
            made_s = version_path(self.folder, version).stat().st_mtime
        except FileNotFoundError:  # A checkpoint sums it up.
            return
        if int(made_s * 1000) > at.timestamp() * 1000:
            made = datetime.fromtimestamp(made_s, UTC).isoformat(timespec="milliseconds")
            text = f"table {self.name}: its first version that is still there is of {made}"
            raise UsageError("lake.version", text)

    @property
    def exists(self) -> bool:
        return self.state.version >= 0

    @property
    def version(self) -> int:
        """The newest version, from 0; -1 before the first commit."""
        return self.state.version

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.state.files.values())

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of the newest version and of folder names; None before a commit."""
        return arrow_schema(self.state.fields) if self.exists else None

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings of the table; none before a commit."""
        identity = self.state.identity
        return {} if identity is None else identity["configuration"]

    def files(self, **ranges: tuple[int | None, int | None]) -> list[Path]:
        """The files of the newest version, in the order of their commits.

        `offset=(10, None)` or `timestamp=(from_us, to_us)` leaves out files whose statistics show
        that they have no row within these bounds, both included.
        """
        return [
            self.path / file.path for file in self.state.files.values() if file.may_hold(ranges)
        ]

    def last_batch(self, writer: str) -> int | None:
        """The last batch that a writer has committed."""
        if not self.exists:
            return None
        if writer in self._batches:
            return self._batches[writer]
        if self._delta is None:
            self._load(is_there=True)
        return None if self._delta is None else self._delta.transaction_version(writer)

    def writers(self) -> set[str]:
        """All writers that have committed a batch, from the log: delta-rs needs a name."""
        return writers_in(self.folder, self.version) if self.exists else set()

    def read(self) -> pa.Table:
        """All rows through pyarrow, in the order of their commits; for small tables.

        Raises:
            UsageError: `lake.unknown`.
            StorageError: `lake.damaged`.
        """
        # Slow to import, and only needed here.
        import pyarrow.dataset as ds

        state = self.state
        if state.version < 0:
            raise unknown_table(self.name)
        schema = arrow_schema(state.fields)
        folders = pa.schema([schema.field(name) for name in state.partition_by])
        # delta-rs would give the rows in another order.
        try:
            dataset = ds.dataset(
                [str(self.path / path) for path in state.files],
                schema=schema,
                format=lake_files.page_checked(),
                partitioning=ds.partitioning(schema=folders, flavor="hive"),
                partition_base_dir=str(self.path),
            )
            return dataset.to_table()
        except (OSError, pa.ArrowException) as error:
            raise StorageError("lake.damaged", f"table {self.name}: {error}") from error

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
        if self.has_batch(writer, batch_id):
            return False
        fields = fields_of(self.name, rows.schema)
        notes = [self.write(part, values, fields) for values, part in parted(rows, partition_by)]
        return self.commit(notes, writer=writer, batch_id=batch_id)

    def write(
        self,
        rows: pa.Table,
        values: Mapping[str, object] | None = None,
        fields: TableFields | None = None,
        *,
        folder: str = "",
    ) -> NewFile:
        """Write rows to a new file in the folder, to be committed.

        `fields` are the columns with those of the partition, whose `values` are in folder names.
        """
        path = f"{folder}{new_path(values)}"
        full = self.path / path
        try:
            self.disk.make_folder(full.parent)
            lake_files.write_file(full, rows.schema, rows.to_batches())
        except OSError as error:
            raise table_error(error, f"table {self.name}: cannot write {full}") from error
        return note_of(self.path, path, fields or fields_of(self.name, rows.schema))

    def commit(
        self,
        add: Sequence[NewFile],
        *,
        remove: Collection[str] = (),
        writer: str,
        batch_id: int | None,
        based_on: int | None = None,
        feed: pa.Table | None = None,
    ) -> bool:
        """Add and remove files in a new version; False if this batch was committed before.

        Commits are idempotent: a writer's batches have ascending numbers, and a batch at or below
        its last one is not committed again. A writer that restarts its numbers needs a new name.
        When this returns True the version is durable. `add` are complete files in the folder;
        they are fsynced here. With `based_on` the table must still be at that version. `feed` has
        the rows that change, and how, in `_change_type`; without it, readers of the feed take all
        rows of the files that are added and removed.

        Raises:
            Conflict: a file to remove is gone, or the version is not `based_on`. Nothing changed.
            UsageError: `lake.schema`, a column has another type than in the table.
            StorageError: `lake.storage`: the old version is still in place, or the new one if only
                the last fsync failed.
        """
        if len(writer.encode()) > WRITER_NAME_BYTES_MAX or not writer:
            text = f"table {self.name}: a writer's name needs 1 to {WRITER_NAME_BYTES_MAX} bytes"
            raise UsageError("lake.writer", text)
        changed = None
        if feed is not None and feed.num_rows:
            changed = self.write(feed, folder=delta_actions.FEED)
        return self.change(TableChange(add, remove, writer, batch_id, based_on, feed=changed))

    def change(self, change: TableChange) -> bool:
        """As `commit`."""
        try:
            self._sync([*change.add, *([change.feed] if change.feed else [])])
            for _ in range(ATTEMPTS_MAX):
                state = self.state
                if self.has_batch(change.writer, change.batch):
                    return False
                missing = [path for path in change.remove if path not in state.files]
                if missing or change.based_on not in (None, state.version):
                    raise Conflict(self.name)
                actions, after = self._actions(state, change)
                try:
                    delta.publish(self.path, after.version, actions, self.disk)
                except FileExistsError:
                    continue  # Another writer was faster: read its changes.
                # Known without asking delta-rs, which costs more than the commit.
                self._state = after
                if change.batch is not None:
                    self._batches[change.writer] = change.batch
                return True
        except OSError as error:
            raise table_error(error, f"table {self.name}: cannot commit") from error
        text = f"table {self.name}: other writers changed it during {ATTEMPTS_MAX} attempts"
        raise BusyError("lake.busy", text)

    def has_batch(self, writer: str, batch: int | None) -> bool:
        last = self.last_batch(writer)
        return batch is not None and last is not None and batch <= last

    def _actions(
        self, state: TableState, change: TableChange
    ) -> tuple[list[delta.Action], TableState]:
        """The actions of a commit, and the table after it."""
        is_change = change.is_change
        # If no old file stays, its columns need not stay either.
        is_kept = len(change.remove) < len(state.files) or not change.add
        known = state.fields if is_kept else ()
        fields = merged_fields(self.name, known, [note.fields for note in change.add])
        partition_by = state.partition_by
        for note in change.add:
            given = tuple(lake_files.partition_values(note.file.path))
            if is_kept and state.version >= 0 and given != state.partition_by:
                text = (
                    f"table {self.name}: new rows are partitioned by {given}, not by {partition_by}"
                )
                raise UsageError("lake.schema", text)
            partition_by = given
        operation = "WRITE" if is_change and not change.remove else "REPLACE"
        actions = [delta.info(operation if is_change else "OPTIMIZE", change.batch)]
        identity = dict(state.identity or delta.new_identity())
        is_new = delta_actions.add_feed(identity, is_fed=self.is_fed) or state.version < 0
        if change.settings.items() - identity["configuration"].items():
            identity["configuration"] = {**identity["configuration"], **change.settings}
            is_new = True
        if is_new or (fields, partition_by) != (state.fields, state.partition_by):
            actions += delta_actions.metadata(fields, partition_by, identity)
        if change.batch is not None:
            actions.append(delta.done(change.writer, change.batch))
        actions += [
            delta_actions.removed(state.files[p], is_change=is_change) for p in change.remove
        ]
        actions += [delta_actions.added(note.file, is_change=is_change) for note in change.add]
        actions += [delta_actions.fed(change.feed.file)] if change.feed else []
        files = {path: file for path, file in state.files.items() if path not in change.remove}
        files |= {note.file.path: note.file for note in change.add}
        return actions, TableState(
            state.version + 1, fields, partition_by, identity=identity, kept=files
        )

    def _sync(self, add: Sequence[NewFile]) -> None:
        """Make the new files and their names durable, before a version names them."""
        for note in add:
            sync_path(self.path / note.file.path)
        for folder in {(self.path / note.file.path).parent for note in add}:
            self.disk.sync_folder(folder)


def open_table(
    data: Path, name: str, *, at: int | datetime | None = None, is_fed: bool = False
) -> LakeTable:
    """The table of that name in a data folder, whether it exists or not."""
    return LakeTable(table_folder(data, name), at=at, is_fed=is_fed)


def table_names(data: Path) -> list[str]:
    """The tables of a data folder that have a version, the damaged ones included.

    Raises UsageError `lake.old-format`.
    """
    return sorted(name_in(entry) for entry in table_folders(data) if _has_version(entry))


def _has_version(folder: Path) -> bool:
    try:
        return LakeTable(folder).exists
    except StorageError:
        # Whoever reads it gets the error, and others are not affected.
        return True


def unknown_table(name: str) -> UsageError:
    return UsageError("lake.unknown", f"there is no table {name}")
