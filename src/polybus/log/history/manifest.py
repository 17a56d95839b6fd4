"""manifest.json: which Parquet files are a topic's history, and where the journal takes over.

The manifest alone decides what history is: a file that it does not name does not count. It is
replaced atomically, so a reader sees the history before or after a change. Its checksum
(log/checked_json.py) is there because a flipped digit in an offset would serve the wrong row.

Order of writes: the files that a manifest names are durable before the manifest; files that it no
longer names are removed after it. So a crash can leave files that no manifest names, which the next
hand-over sweeps, but never a name without a file. A manifest of another epoch than topic.json's
counts as empty if the trash proves that this topic was deleted (log/topics.py), else as damage.

The first hand-over makes the folder `history` before the manifest, and nothing removes it. So the
folder without a manifest shows that one was lost, unless the journal has all rows from offset 0 on.

Manifests have one writer at a time: the hand-over and retention hold `HistoryLock`. In one bus they
run one after the other; the lock is for a hand-over process that outlives a killed bus, and for
backups, which share it.
"""

import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import msgspec

from polybus.errors import BusyError, StorageError
from polybus.log import checked_json
from polybus.log.disk import FileLock, replace_file
from polybus.log.topics import epoch_of, was_deleted

NAME = "manifest.json"
HISTORY = "history"
QUEUE = "history.queue"
WAIT_S = 10.0
POLL_S = 0.02
SMALL_FILE_BYTES = 16 << 20
"""The hand-over merges a day's last file below this size with the rows that follow it."""


class HistoryFile(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One Parquet file: offsets `first` to `last`, both included, of one UTC day."""

    path: str
    first: int
    last: int
    min_timestamp_us: int
    max_timestamp_us: int
    rows: int
    bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A topic's history: offsets `start` (included) to `handed_over` (excluded) of `epoch`.

    `exposed`: it is a Delta table, too (log/history/exposed.py).
    """

    epoch: int
    handed_over: int = 0
    start: int = 0
    files: tuple[HistoryFile, ...] = ()
    exposed: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def settled_files(self) -> tuple[HistoryFile, ...]:
        """The files, except a small last one, which the next hand-over may replace."""
        if self.files and self.files[-1].bytes < SMALL_FILE_BYTES:
            return self.files[:-1]
        return self.files


def load(folder: Path) -> Manifest | None:
    """The manifest in a topic's folder, checked, or None.

    Raises StorageError `log.damaged`: no part of the history can be trusted.
    """
    path = folder / NAME
    manifest = checked_json.read(path, Manifest)
    if manifest is not None:
        check(manifest, path)
    return manifest


def of_epoch(folder: Path, found: Manifest | None, epoch: int) -> Manifest:
    """The manifest if it has this epoch, else an empty one: a deleted topic's is never used.

    Raises StorageError `log.damaged` if no tombstone proves that the other topic was deleted.
    """
    if found is None:
        return Manifest(epoch=epoch)
    if found.epoch != epoch and not was_deleted(folder, found.epoch):
        text = f"{folder / NAME}: it has epoch {found.epoch}, topic.json has {epoch}"
        raise StorageError("log.damaged", text)
    return found if found.epoch == epoch else Manifest(epoch=epoch)


def is_lost(folder: Path) -> bool:
    """Whether the topic had a manifest, or the first hand-over of its rows was interrupted."""
    return (folder / HISTORY).is_dir() and not (folder / NAME).exists()


def load_for_epoch(folder: Path, epoch: int) -> Manifest:
    """The manifest, as from `load` and `of_epoch`."""
    return of_epoch(folder, load(folder), epoch)


def load_current(folder: Path) -> Manifest | None:
    """The manifest of the current topic, as from `load_for_epoch`; None without a topic."""
    epoch = epoch_of(folder)
    return None if epoch is None else load_for_epoch(folder, epoch)


def check(manifest: Manifest, path: Path) -> None:
    """Raise StorageError `log.damaged` unless the files cover the offsets without a gap."""
    expected = manifest.start
    for file in manifest.files:
        if file.first != expected or file.rows != file.last - file.first + 1 or file.rows <= 0:
            text = f"{path}: {file.path}: does not begin at offset {expected}, or wrong row count"
            raise StorageError("log.damaged", text)
        if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
            raise StorageError("log.damaged", f"{path}: {file.path} is outside the topic's folder")
        expected = file.last + 1
    if expected != manifest.handed_over:
        text = f"{path}: files end at offset {expected}, hand-over is at {manifest.handed_over}"
        raise StorageError("log.damaged", text)


def save(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest durably.

    After an OSError the old one is still in place, or the new one if only the last fsync failed.
    """
    check(manifest, folder / NAME)
    replace_file(folder / NAME, checked_json.encode(manifest))


class HistoryLock(FileLock):
    """The right to change manifests in a data directory: a context manager."""

    def __init__(self, data: Path, *, shared: bool = False, wait_s: float = 0.0) -> None:
        """Take the lock, or wait for it: the hand-over of a killed bus ends within a second.

        A hand-over takes it for each segment, and would take it again before a waiting backup looks
        again. So a process that wants to share it holds `history.queue` meanwhile, and the others
        take the lock only while no process does.

        Raises BusyError `log.history-busy` if another process holds it or waits for it.
        """
        path = data / "history.lock"
        until_s = time.monotonic() + wait_s
        with ExitStack() as queue:
            is_queued = False
            while True:
                try:
                    if not is_queued and shared:
                        _queue(data, queue)
                        is_queued = True
                    with nullcontext() if shared else FileLock(data / QUEUE):
                        super().__init__(path, shared=shared)
                    return
                except BlockingIOError as error:
                    if time.monotonic() >= until_s:
                        text = f"{path}: a hand-over, retention or backup is running"
                        raise BusyError("log.history-busy", text, retry_after_s=5.0) from error
                time.sleep(POLL_S)


def _queue(data: Path, queue: ExitStack) -> None:
    """Make others wait until `queue` is closed. Raises BlockingIOError if one checks right now."""
    try:
        queue.enter_context(FileLock(data / QUEUE, shared=True))
    except BlockingIOError:
        raise
    except OSError:
        pass  # The folder is read-only.
