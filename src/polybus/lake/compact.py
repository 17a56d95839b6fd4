"""Maintenance of a table by delta-rs: checkpoints, compaction, removal of old versions' files.

Streams add a small file and a version with every batch. `tidy` runs after a commit. A checkpoint
summarises all versions, so that opening a table reads few of them. `compact` merges small files, in
a version that adds the merged file and removes the small ones, so a crash leaves both or neither
change. `vacuum` removes files that no version has named for as long as the table keeps them
(`keep`), which is at least an hour, and `forget` removes older versions.

Order of writes: the checkpoint, then `_last_checkpoint`, which names it; readers without the second
read the versions. The merged file, then the version that names it; without a version nobody reads
the file, and `vacuum` removes it.

delta-rs never calls fsync. So it works on hard links in a folder below `_staging`, and what it has
written there is fsynced before it is moved into the table.
"""

import json
import logging
import math
import os
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deltalake import DeltaTable, WriterProperties
from deltalake.exceptions import DeltaError

from polybus.errors import StorageError
from polybus.lake.files import NewFile, TableFile, new_path, note_of, partition_values
from polybus.lake.table import Conflict, LakeTable, TableChange, table_error
from polybus.lake.table_state import checksums_in
from polybus.log.delta import (
    CHECKPOINT_EVERY,
    KEPT,
    LAST_CHECKPOINT,
    LOG,
    RETENTION_S,
    STAGING,
    hint,
    kept_s,
)
from polybus.log.disk import replace_file, sync_path
from polybus.log.verify.tables import wrong_content

logger = logging.getLogger("polybus.lake")

WRITER = "polybus-compact"
COMPACT_EVERY = 32
VACUUM_EVERY = 256
SMALL_BYTES = 32 << 20
TARGET_BYTES = 128 << 20
RUN_BYTES_MAX = 256 << 20
"""The most that one run of `tidy` merges, because a run delays the next batch of a stream."""
STAGING_GRACE_S = 86_400.0


def tidy(table: LakeTable, *, merge: bool = True) -> None:
    """Do the maintenance that is due. A failure is logged; a later call tries again."""
    version = table.version
    if version <= 0:
        return
    try:
        if version % CHECKPOINT_EVERY == 0:
            checkpoint(table)
        if merge and version % COMPACT_EVERY == 0:
            compact(table, files_min=COMPACT_EVERY // 2, bytes_max=RUN_BYTES_MAX)
        if version % VACUUM_EVERY == 0:
            vacuum(table)
            forget(table)
    except Exception as error:
        # The batch is committed: a failure here must not make the stream repeat it.
        logger.warning("table %s: upkeep failed: %s", table.name, error)


def checkpoint(table: LakeTable) -> None:
    """Write a checkpoint of all versions."""
    done = sorted(table.folder.glob("*.checkpoint.parquet"))[-1:]
    first = done[0].name if done else ""
    if first.startswith(f"{table.version:020d}."):
        return  # A crash came before the hint, which is optional.
    with _workshop(table) as folder:
        log = folder / LOG
        log.mkdir()
        for path in [*done, *(one for one in table.folder.glob("*.json") if one.name > first)]:
            os.link(path, log / path.name)
        delta = DeltaTable(folder)
        delta.create_checkpoint()
        name = f"{delta.version():020d}.checkpoint.parquet"
        sync_path(log / name)
        table.disk.rename(log / name, table.folder / name)
        table.disk.sync_folder(table.folder)
        # Only a hint, so that a reader need not list the folder.
        known = json.loads((log / LAST_CHECKPOINT).read_bytes())
        replace_file(table.folder / LAST_CHECKPOINT, hint(known, table.folder / name), table.disk)


def compact(table: LakeTable, *, files_min: int = 2, bytes_max: int | None = None) -> int:
    """Merge the small files of each partition with at least `files_min`; return how many.

    Returns 0 if another writer removed one of the files meanwhile; a later call tries again.

    Raises:
        StorageError: `lake.damaged`, a file is damaged; the table is unchanged.
    """
    state = table.state
    small = _small_files(list(state.files.values()), files_min, bytes_max)
    if not small:
        return 0
    try:
        with _workshop(table) as folder:
            merged = _merged(table, small, folder)
            remove = [file.path for file in small if file.path not in merged]
            wanted = merged.keys() - {file.path for file in small}
            add = [_moved(folder, path, table) for path in sorted(wanted)]
            try:
                table.change(TableChange(add, remove, is_change=False))
            except Conflict:
                for note in add:
                    (table.path / note.file.path).unlink(missing_ok=True)
                return 0
    except OSError as error:
        raise table_error(error, f"table {table.name}: cannot compact") from error
    return len(remove)


def _merged(table: LakeTable, small: list[TableFile], folder: Path) -> dict[str, TableFile]:
    """Make a table of only these files, let delta-rs merge them, and return the merged files.

    Raises:
        StorageError: `lake.damaged`, a file is damaged.
    """
    part = LakeTable(folder)
    known = checksums_in(table.folder, table.state.version)
    for file in small:
        # delta-rs verifies no checksum, and the merged file gets one of its own.
        if reason := wrong_content(table.path / file.path, known.get(file.uri)):
            raise StorageError("lake.damaged", f"{table.path / file.path}: {reason}")
        (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
        os.link(table.path / file.path, folder / file.path)
    part.change(TableChange([NewFile(file, table.state.fields) for file in small], writer=WRITER))
    try:
        DeltaTable(folder).optimize.compact(
            target_size=TARGET_BYTES,
            max_concurrent_tasks=1,
            writer_properties=WriterProperties(compression="ZSTD", compression_level=3),
        )
    except DeltaError as error:
        raise StorageError("lake.damaged", f"table {table.name}: {error}") from error
    return part.state.files


def keep(table: LakeTable, seconds: float) -> None:
    """Set how long older versions of a table stay readable, from its next maintenance on."""
    table.change(TableChange(settings=dict.fromkeys(KEPT, f"interval {int(seconds)} seconds")))


def vacuum(table: LakeTable, *, grace_s: float | None = None) -> int:
    """Remove files that no version has named for `grace_s`, or as long as the table keeps them.

    Returns how many; 0 if the table's own setting cannot be parsed.
    """
    now = time.time()
    if grace_s is None:
        table_s = kept_s(table.settings)
        if table_s is None:
            logger.warning(
                "table %s: %s cannot be parsed, so files of older versions stay: "
                "run `polybus tables keep %s HOURS`",
                *(table.name, " or ".join(KEPT), table.name),
            )
            return 0
        # Writers have at least an hour to commit a file, and readers to end, whatever the setting.
        grace_s = max(table_s, RETENTION_S)
    removed = 0
    found = DeltaTable(table.path).vacuum(
        retention_hours=math.ceil(max(grace_s, 0) / 3600),
        dry_run=True,
        enforce_retention_duration=False,
        full=True,
    )
    for path in found:
        with suppress(FileNotFoundError):
            # The change time: a file may just have been renamed here for a commit.
            if (table.path / path).stat().st_ctime <= now - grace_s:
                (table.path / path).unlink()
                removed += 1
    with suppress(FileNotFoundError):
        for entry in os.scandir(table.path / STAGING):
            if entry.stat().st_mtime <= now - max(grace_s, STAGING_GRACE_S):
                shutil.rmtree(entry.path) if entry.is_dir() else os.unlink(entry.path)
    return removed


def forget(table: LakeTable) -> None:
    """Remove versions that a checkpoint covers and that are older than the table keeps them."""
    DeltaTable(table.path).cleanup_metadata()


@contextmanager
def _workshop(table: LakeTable) -> Iterator[Path]:
    """A folder for delta-rs; leftovers are removed, at the latest by `vacuum`."""
    folder = table.path / STAGING / uuid.uuid4().hex
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _small_files(files: list[TableFile], files_min: int, bytes_max: int | None) -> list[TableFile]:
    """Small files of partitions that have enough of them, up to `bytes_max`."""
    partitions: dict[Path, list[TableFile]] = defaultdict(list)
    for file in files:
        if file.bytes < SMALL_BYTES:
            partitions[Path(file.path).parent].append(file)
    found: list[TableFile] = []
    left_bytes = float("inf") if bytes_max is None else bytes_max
    for small in partitions.values():
        for file in small if len(small) >= files_min else ():
            left_bytes -= file.bytes
            if left_bytes < 0:
                return found
            found.append(file)
    return found


def _moved(folder: Path, path: str, table: LakeTable) -> NewFile:
    target = new_path(partition_values(path))
    table.disk.make_folder((table.path / target).parent)
    table.disk.rename(folder / path, table.path / target)
    return note_of(table.path, target, table.state.fields)
