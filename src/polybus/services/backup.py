"""Backup and restore: a consistent copy of the data folder of a running or stopped bus.

Each part is copied before the parts that it refers to, so that the copy never refers to missing
data. The copy may have extra data, as after a crash, which a start accepts:

1. Spark's checkpoints and the tables, only while no pipeline runs. They refer to offsets.
2. state.db. Packs and producers refer to the log. Of a running bus through SQLite's backup; of a
   stopped one by copying the files with the write-ahead log: opening them would hide damage.
3. Staged files, again after the journal: an intent in the journal refers to them.
4. The journal. A sealed segment does not change any more. Of the last one the copy has a prefix,
   with everything that had a receipt when the copy began; recovery cuts off the rest.
5. The blobs, before the topics and after the journal: a message is in the journal after its blob is
   stored, and a blob is removed after its topic, or after retention.
6. The topics. A topic exists before the journal has a row of it, and the trash, copied before the
   journal and after the topics, proves that others were deleted. Hand-over and retention wait for
   `history.lock`, which is held throughout: so the manifests already have a segment that the bus
   deletes meanwhile, no manifest changes, and no tombstone goes. The hand-over releases it after
   each segment.
7. polybus.json: a folder without it is not a whole backup.

`unfinished-copy` is written before everything else and removed last: a bus does not start on a
folder that has it. Otherwise a start on a backup, or a restored folder, whose copy was killed would
lack messages. `restore` copies the parts in any order, because its source does not change.

Files that never change again are hard links where the file system allows it (backup_files.py).
"""

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote

import msgspec

from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.blobs import CONTENT, SUMS, accounts_with_blobs, blobs_folder, find_blobs
from polybus.log.disk import Disk, FileLock, replace_file, sync_path
from polybus.log.history.exposed import GONE, TABLE
from polybus.log.history.manifest import HistoryLock
from polybus.log.journal.floor import NAME as FLOOR
from polybus.log.journal.recovery import recover
from polybus.log.journal.segment import Segment
from polybus.log.topics import epoch_of, read_data_metadata
from polybus.processes import is_alive
from polybus.services.accounts.store import damaged_accounts
from polybus.services.backup_files import put
from polybus.services.state_rows import NAME as STATE
from polybus.services.state_rows import files_of as state_files

WAIT_S = 600.0
POLL_S = 0.05
TRIES = 3
NOTE = "polybus.json"
IMMUTABLE = (".parquet",)
# Files of a running process, or unfinished files.
LEFT_OUT = ("lock", "history.lock", "history.queue", "run.json", "status.json", "errors.json")
LEFT_OUT_ENDS = (".tmp", ".sock", ".writing")
# Folders inside that of a topic or a table. A topic, a table or a flow may itself have any of these
# names.
FOLDERS_LEFT_OUT = ("scratch", "_staging")
# The history as a Delta table: the next hand-over makes it again.
OF_TOPICS_LEFT_OUT = (*FOLDERS_LEFT_OUT, TABLE, GONE)
# Errors of opening or creating a lock file on a read-only file system.
ONLY_READ = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)


def backup(data: Path, target: Path, *, tables: bool = True, base: Path | None = None) -> None:
    """Copy a data folder to a new or empty folder, durably. The caller verifies the copy.

    `base` is an earlier backup: unchanged files become links to its files, so that the copy takes
    space only for new ones. It is complete without the base.

    Raises:
        UsageError: `backup.target` if the target cannot be used; `backup.incomplete` if the base is
        not a complete backup; `pipeline.running` if the tables are changing; `log.no-data`.
        BusyError: the hand-over of a segment did not end within WAIT_S. StorageError: a file cannot
        be read or written; `log.locked` if a start or another command did not end within WAIT_S.
    """
    if read_data_metadata(data) is None:
        raise UsageError("log.no-data", f"{data} is not a data folder")
    if base is not None:
        check_whole(base)
        _check_outside(base, target)
    _make_target(data, target)
    copy = _Copy(data, target, base)
    try:
        if tables:
            with _no_pipeline(data):
                copy.tree("pipeline")
                for table in layout.folders_in(data / "tables"):
                    copy.tree(f"tables/{table.name}", without=FOLDERS_LEFT_OUT)
        with _no_handover(data):
            copy.state()
            copy.tree("staging", link=True)
            copy.tombstones()
            copy.journal()
            copy.tree("staging", link=True)
            copy.accounts()
            copy.tombstones()
        copy.root_files()
        copy.end()
    except OSError as error:
        raise _copy_error(error, f"cannot copy {data} to {target}") from error


def find_base(folder: Path) -> Path | None:
    """The backup that `--base` means: the folder itself, or the newest complete backup in it.

    Raises StorageError `backup.storage` if it cannot be read.
    """
    if (folder / NOTE).exists() or layout.unfinished_copy_path(folder).exists():
        return folder
    newest, newest_ns = None, -1
    try:
        for one in layout.folders_in(folder):
            # A backup with a damaged polybus.json, or of a newer version, cannot be used.
            with contextlib.suppress(StorageError):
                # A copy gets its polybus.json last.
                if _is_whole(one) and (ended_ns := (one / NOTE).stat().st_mtime_ns) > newest_ns:
                    newest, newest_ns = one, ended_ns
    except OSError as error:
        raise _copy_error(error, f"cannot read {folder}") from error
    return newest


def restore(source: Path, data: Path) -> None:
    """Copy a backup to a new or empty folder, durably. The caller verifies both.

    Raises:
        UsageError: `backup.target`; `backup.incomplete` if the source is not a complete backup.
        StorageError: a file cannot be read or written.
    """
    check_whole(source)
    _make_target(source, data)
    copy = _Copy(source, data)
    try:
        for folder in layout.folders_in(source):
            copy.tree(folder.name, link=False)
        copy.root_files(with_state=True)
        copy.end()
    except OSError as error:
        raise _copy_error(error, f"cannot copy {source} to {data}") from error


def _copy_error(error: OSError, what: str) -> StorageError:
    """The StorageError for an error of a disk that a copy reads or writes."""
    return StorageError("backup.storage", f"{what}: {error.strerror or error}")


def check_whole(source: Path) -> None:
    """Raises UsageError `backup.incomplete`."""
    if not _is_whole(source):
        text = f"{source} has no {NOTE}, or its copy is unfinished: it is not a complete backup"
        raise UsageError("backup.incomplete", text)


def _is_whole(source: Path) -> bool:
    is_unfinished = layout.unfinished_copy_path(source).exists()
    return not is_unfinished and read_data_metadata(source) is not None


class _Copy:
    """Copies files of one folder to the same places in another."""

    def __init__(self, data: Path, target: Path, base: Path | None = None) -> None:
        self._data = data
        self._target = target
        self._base = base

    def file(self, path: Path, *, link: bool = False) -> None:
        """Copy a file; `link`: it never changes again. Replaces an earlier copy."""
        place = path.relative_to(self._data)
        base = self._base and self._base / place
        put(path, self._target / place, is_final=link, base=base)

    def state(self) -> None:
        lock = _lock_of_stopped(self._data)
        if lock is None:
            _copy_live_state(self._data / STATE, self._target / STATE)
            return
        with lock:
            for path in state_files(self._data):
                self.file(path)

    def tombstones(self) -> None:
        """Copy the tombstones of deleted topics of which the journal may have rows."""
        for path in layout.trash_folder(self._data).glob("*/topic.json"):
            with contextlib.suppress(FileNotFoundError):
                self.file(path)

    def tree(self, name: str, *, link: bool | None = None, without: tuple[str, ...] = ()) -> None:
        """Copy a folder; `link`: whether its files never change, by default as their names say."""
        for path in _files(self._data / name, without):
            is_final = path.suffix in IMMUTABLE if link is None else link
            # Staged files, logs and the like may be removed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                self.file(path, link=is_final)

    def journal(self) -> None:
        for path in layout.segments(self._data):
            index = layout.index_path(path)
            try:
                # Its index first: it must not list commits that the copy of the segment lacks.
                with contextlib.suppress(FileNotFoundError):
                    self.file(index)
                self.file(path, link=Segment(path).sealed)
            except FileNotFoundError:
                # Handed over meanwhile.
                (self._target / index.relative_to(self._data)).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.file(layout.journal_folder(self._data) / FLOOR)
        Disk().make_folder(layout.journal_folder(self._target))
        # Cuts off an unfinished write, and makes the index of the last segment.
        recover(self._target, Disk())

    def accounts(self) -> None:
        topics = layout.topic_folders(self._data)
        inside = {folder.parent for folder in topics}
        for path in _files(layout.accounts_folder(self._data), ("blobs",)):
            if inside.isdisjoint(path.parents):
                self.file(path)
        for path in damaged_accounts(self._data):
            if path.parent.is_dir():  # An account without its file still has its folder.
                Disk().make_folder(self._target / path.parent.relative_to(self._data))
        for account in accounts_with_blobs(self._data):
            for blob in find_blobs(blobs_folder(self._data, account)):
                self._blob(blob.path)
        Disk().make_folder(layout.topics_folder(self._target))
        for folder in topics:
            self._topic(folder)

    def _blob(self, folder: Path) -> None:
        """Copy a blob with its marks, unless it is removed meanwhile. A mark may be renamed."""
        while (before := _names(folder)) is not None:
            with contextlib.suppress(FileNotFoundError):
                for name in before:
                    self.file(folder / name, link=name in (CONTENT, SUMS))
                return
            Disk().remove_folder(self._target / folder.relative_to(self._data))

    def _topic(self, folder: Path) -> None:
        """Copy a topic, unless it is deleted meanwhile."""
        for _ in range(TRIES):
            before = _epoch(folder)
            try:
                for path in _files(folder, OF_TOPICS_LEFT_OUT):
                    self.file(path, link=path.suffix in IMMUTABLE)
            except FileNotFoundError:
                if _epoch(folder) == before is not None:
                    raise
            if _epoch(folder) == before:
                return
            Disk().remove_folder(self._target / folder.relative_to(self._data))

    def root_files(self, *, with_state: bool = False) -> None:
        for path in sorted(self._data.iterdir()):
            is_state = path.name.startswith(STATE)
            if _is_kept(path) and path.is_file() and path.name != NOTE:
                if with_state or not is_state:
                    self.file(path)

    def end(self) -> None:
        """Make the names of all files durable, then mark the copy as complete."""
        for folder, _, _ in os.walk(self._target, topdown=False):
            sync_path(Path(folder))
        replace_file(self._target / NOTE, (self._data / NOTE).read_bytes())
        layout.unfinished_copy_path(self._target).unlink()
        sync_path(self._target)


def _epoch(folder: Path) -> int | None:
    try:
        return epoch_of(folder)
    except StorageError:
        return -1  # Damaged: so is the copy, and `verify` reports it.


def _names(folder: Path) -> list[str] | None:
    """The files in a blob's folder, immutable ones first; None without a folder."""
    try:
        return sorted(os.listdir(folder), key=lambda name: name not in (CONTENT, SUMS))
    except FileNotFoundError:
        return None


def _is_kept(path: Path) -> bool:
    return path.name not in LEFT_OUT and not path.name.endswith(LEFT_OUT_ENDS)


def _files(folder: Path, without: tuple[str, ...] = ()) -> Iterator[Path]:
    """The regular files below a folder and its folders, except some; none if it is missing."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in without)
        for name in sorted(names):
            path = Path(parent) / name
            if _is_kept(path) and path.is_file() and not path.is_symlink():
                yield path


def _check_outside(folder: Path, target: Path) -> None:
    if target.resolve().is_relative_to(folder.resolve()):
        raise UsageError("backup.target", f"{target} is inside {folder}")


def _make_target(data: Path, target: Path) -> None:
    _check_outside(data, target)
    try:
        if not target.exists():
            Disk().make_folder(target.parent)
            target.mkdir(mode=0o700)
            sync_path(target.parent)
        note = layout.unfinished_copy_path(target)
        if any(path != note for path in target.iterdir()):
            raise UsageError("backup.target", f"{target} is not empty")
        note.touch(mode=0o600)
        sync_path(target)
    except OSError as error:
        raise _copy_error(error, f"cannot create {target}") from error


def _no_handover(data: Path) -> AbstractContextManager[object]:
    """Keep hand-over and retention away. Raises BusyError, StorageError."""
    try:
        return HistoryLock(data, shared=True, wait_s=WAIT_S)
    except OSError as error:
        if error.errno not in ONLY_READ:
            raise
    # Without a lock file, only a running bus could hand over.
    lock = _lock_of_stopped(data)
    if lock is None:
        text = f"{data} belongs to a running bus and can only be read: run this as the bus's user"
        raise StorageError("backup.storage", text)
    return lock


def _lock_of_stopped(data: Path) -> AbstractContextManager[object] | None:
    """Keep a bus from starting; None if one runs.

    Raises StorageError `log.locked` if neither happens within WAIT_S: a start may be checking the
    files.
    """
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return layout.DataLock(data, shared=True)
        except StorageError:
            if _is_running(data):
                return None
            if time.monotonic() >= until_s:
                raise
        except OSError as error:
            if error.errno not in ONLY_READ:
                raise
            # No bus has ever run on it, as on a backup, or it is not visible.
            return contextlib.nullcontext()
        time.sleep(POLL_S)


def _is_running(data: Path) -> bool:
    """Whether a bus has started and is not stopping: it writes run.json last."""
    try:
        note = msgspec.json.decode((data / "run.json").read_bytes())
        return is_alive(note["pid"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _copy_live_state(path: Path, target: Path) -> None:
    os.close(os.open(target, os.O_CREAT | os.O_RDWR, 0o600))
    try:
        # This changes nothing, even if the bus is killed meanwhile.
        url = f"file:{quote(str(path))}?mode=ro&readonly_shm=1"
        with (
            contextlib.closing(sqlite3.connect(url, uri=True)) as source,
            contextlib.closing(sqlite3.connect(target)) as copied,
        ):
            source.backup(copied)
            # One file, without a write-ahead log beside it.
            copied.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise StorageError("state.failed", f"{path}: {error}") from error
    sync_path(target)


@contextlib.contextmanager
def _no_pipeline(data: Path) -> Iterator[None]:
    path = data / "pipeline" / "lock"
    if not path.exists():
        yield
        return
    try:
        lock = FileLock(path, shared=True)
    except BlockingIOError as error:
        text = "a pipeline writes the tables: stop it, or leave the tables out (--no-tables)"
        raise UsageError("pipeline.running", text) from error
    with lock:
        yield
