"""manifest.json: which Parquet files are a topic's history, and where the journal takes over.

The manifest is the only truth about history: a file it does not name is not there. It is replaced
as a whole, in one rename, so a reader sees the history before or after a change and never between.
It ends with a checksum of itself: a flipped digit in an offset would be served as the wrong row.

One writer at a time: the hand-over and retention both hold `HistoryLock` while they change
manifests. (They run one after the other anyway; the lock is for the hand-over process that
outlives a killed bus.)
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from polybus.errors import BusyError, StorageError
from polybus.log.disk import replace_file
from polybus.log.topics import TopicNote

NAME = "manifest.json"
SMALL_FILE_BYTES = 16 << 20
"""The hand-over merges a day's last file below this size with the rows that follow it."""
_BLANK = b"0" * 16
_TAIL = re.compile(rb'"xxh3":"([0-9a-f]{16})"}\n\Z')
_DIGITS_END = len(b'"}\n')


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
    """A topic's history: offsets `start` (included) to `handed_over` (excluded) of `epoch`."""

    epoch: int
    handed_over: int = 0
    start: int = 0
    files: tuple[HistoryFile, ...] = ()
    xxh3: str = "0" * 16

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def settled_files(self) -> tuple[HistoryFile, ...]:
        """The files without a small last one, which the next hand-over may replace."""
        if self.files and self.files[-1].bytes < SMALL_FILE_BYTES:
            return self.files[:-1]
        return self.files


def load(folder: Path) -> Manifest | None:
    """The manifest in a topic's folder, checked; None if there is none.

    Raises:
        StorageError: `log.damaged`; nothing of the history may be trusted.
    """
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError("log.damaged", f"{path}: cannot be read: {error.strerror}") from error
    tail = _TAIL.search(content)
    if tail is None:
        raise StorageError("log.damaged", f"{path}: cut off or not a manifest")
    blanked = content[: tail.start(1)] + _BLANK + content[tail.end(1) :]
    if xxhash.xxh3_64_hexdigest(blanked).encode() != tail[1]:
        raise StorageError("log.damaged", f"{path}: its checksum is wrong")
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.DecodeError as error:
        raise StorageError("log.damaged", f"{path}: {error}") from error
    check(manifest, path)
    return manifest


def load_for_epoch(folder: Path, epoch: int) -> Manifest:
    """The manifest if it is of this epoch, else an empty one: an older topic's is never used.

    Raises:
        StorageError: `log.damaged`.
    """
    manifest = load(folder)
    if manifest is None or manifest.epoch != epoch:
        return Manifest(epoch=epoch)
    return manifest


def check(manifest: Manifest, path: Path) -> None:
    """Raise StorageError `log.damaged` unless the files are one row of offsets without a gap."""
    expected = manifest.start
    for file in manifest.files:
        if file.first != expected or file.rows != file.last - file.first + 1 or file.rows <= 0:
            text = f"{path}: {file.path} does not begin at offset {expected} or has wrong rows"
            raise StorageError("log.damaged", text)
        if Path(file.path).is_absolute() or ".." in Path(file.path).parts:
            raise StorageError("log.damaged", f"{path}: {file.path} is outside of the topic")
        expected = file.last + 1
    if expected != manifest.handed_over:
        text = f"{path}: files end at offset {expected}, hand-over is at {manifest.handed_over}"
        raise StorageError("log.damaged", text)


def save(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest; when this returns the new one survives a power cut.

    Raises:
        OSError: the old manifest is still in place (or, if only the last fsync failed, the new).
    """
    check(manifest, folder / NAME)
    blanked = msgspec.json.encode(msgspec.structs.replace(manifest, xxh3=_BLANK.decode())) + b"\n"
    digits = xxhash.xxh3_64_hexdigest(blanked).encode()
    at = len(blanked) - _DIGITS_END - len(_BLANK)
    content = blanked[:at] + digits + blanked[at + len(_BLANK) :]
    replace_file(folder / NAME, content)


def topic_note(folder: Path) -> TopicNote | None:
    """What topic.json says; None if the topic is not there (deleted, or not yet created).

    Raises:
        StorageError: `log.damaged`.
    """
    path = folder / "topic.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=TopicNote)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise StorageError("log.damaged", f"{path}: {error}") from error


def epoch_of(folder: Path) -> int | None:
    """The epoch in topic.json, as `topic_note`."""
    note = topic_note(folder)
    return None if note is None else note.epoch


class HistoryLock:
    """The right to change manifests in a data directory: a context manager.

    Raises:
        BusyError: `log.history-busy`, another process has it.
    """

    def __init__(self, data: Path) -> None:
        self._path = data / "history.lock"
        self._descriptor = -1

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            text = f"{self._path}: another hand-over or retention is at work"
            raise BusyError("log.history-busy", text, retry_after_s=5.0) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
