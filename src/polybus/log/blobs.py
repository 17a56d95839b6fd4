"""Blobs: payloads that are too large for a row of the log, each in its own folder.

    accounts/<account>/blobs/<sha256>/content             the payload
                                      sums                XXH3 of each block of it
                                      <epoch>-<offset>    the last message of a topic that refers to
                                      it <epoch>-<offset>.pending   such a message may exist from
                                      this offset on <epoch>-<offset>.memory    the same, for a log
                                      in memory
    accounts/<account>/blobs/incoming-<unique>/           a payload that is arriving
    accounts/<account>/blobs/unfinished-<digest>/         one that its sender may continue

A payload that arrives twice is stored once: its folder has the name of its SHA-256. Empty files
mark the topics that need it, one for each, so that a start need not read the log to know.

The order of writes, and how a start recovers from each prefix:

1. `incoming-…/content`, as it arrives, then `sums`; fsync of both. A start removes the folder. In
   `unfinished-…` it is the same, but a start keeps the folder: only its `content` counts, and its
   SHA-256 is compared with the announced one before step 2.
2. The pending mark, and an fsync of the folder: in `incoming-…`, which is then renamed to its id,
   or in a blob that already exists, whose files the new ones replace, as they have the same bytes
   or repair it; fsync of `blobs`. A start looks for the message from the mark's offset on. If it
   finds none, it removes the mark. It removes a blob without marks, but first searches the log for
   messages that refer to it, because marks are files without a checksum.
3. The message, whose commit the log makes durable as any other. A start that finds it renames the
   mark.
4. After that, the mark gets the message's offset; marks of the topic with smaller ones are removed.
   Messages that are published at the same time may share a pending mark: then the last of them does
   this.
   This is not synced: a mark that a crash restores is either pending, or that of an older message.

So a message that is in the log always has its blob, and a blob that no message needs is gone after
the next sweep. `content` never changes; a block is checked against `sums` whenever it is read, so
damaged bytes are not served. Symbolic links are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from polybus.batch import Buffer
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log import layout
from polybus.log.disk import Disk
from polybus.log.topics import storage_error
from polybus.references import is_blob_id

T = TypeVar("T")
BLOCK_BYTES = 256 << 10
SYNC_BYTES = 32 << 20
"""What a writer has written is synced in steps of this size, not all at the end."""
CONTENT = "content"
SUMS = "sums"
INCOMING = "incoming-"
UNFINISHED = "unfinished-"
COPY_BYTES = 1 << 20
PENDING = ".pending"
MEMORY = ".memory"
_SUM = struct.Struct("<Q")
_MARK = re.compile(r"(\d{1,18})-(\d{1,18})(\.pending|\.memory)?")


@dataclass(frozen=True, slots=True)
class BlobMark:
    """A topic's need of a blob: its epoch, and the offset of its last message that points there.

    If it is pending, the message is at the offset or after it, if it exists.
    """

    epoch: int
    offset: int
    suffix: str = ""

    @property
    def name(self) -> str:
        return f"{self.epoch}-{self.offset}{self.suffix}"

    def keeps(self, epoch: int, offset: int) -> bool:
        """Whether it keeps the blob as long as the topic has its message at this offset."""
        is_behind = self.suffix == PENDING or self.offset >= offset
        return self.epoch == epoch and self.suffix != MEMORY and is_behind


@dataclass(frozen=True, slots=True)
class FoundBlob:
    """A blob in its folder."""

    path: Path
    size: int
    marks: tuple[BlobMark, ...]

    @property
    def id(self) -> str:
        return self.path.name


def blobs_folder(data: Path, account: str) -> Path:
    return layout.account_folder(data, account) / "blobs"


def accounts_with_blobs(data: Path) -> list[str]:
    folders = layout.folders_in(layout.accounts_folder(data))
    return [folder.name for folder in folders if (folder / "blobs").is_dir()]


def find_blobs(folder: Path) -> Iterator[FoundBlob]:
    """The blobs in an account's folder; other files are ignored."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        if not is_blob_id(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        marks = [_MARK.fullmatch(name) for name in os.listdir(entry.path)]
        found = [BlobMark(int(one[1]), int(one[2]), one[3] or "") for one in marks if one]
        try:
            size = (Path(entry.path) / CONTENT).lstat().st_size
        except OSError:
            size = 0
        yield FoundBlob(Path(entry.path), size, tuple(found))


def find_unfinished(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Payloads that were interrupted: folder, size, and when they were written to last."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.startswith(UNFINISHED) and entry.is_dir(follow_symlinks=False):
                path = Path(entry.path)
                with contextlib.suppress(OSError):
                    found = (path / CONTENT).lstat()
                    yield path, found.st_size, found.st_mtime


def remove_incoming(folder: Path, disk: Disk) -> None:
    """Remove the incomplete payloads that a crash left."""
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            path = Path(entry.path)
            is_left = entry.name.startswith(INCOMING)
            # Its content is in a blob already.
            is_left |= entry.name.startswith(UNFINISHED) and not (path / CONTENT).exists()
            if is_left and entry.is_dir(follow_symlinks=False):
                disk.remove_folder(path)


class BlobWriter:
    """A payload while it arrives, in constant memory. Every method may block.

    It keeps no file open: thousands of peers may send at a time.
    """

    def __init__(self, folder: Path, disk: Disk, name: str = "") -> None:
        """`folder` has the blobs of the account. Nothing is written yet.

        One with a `name` may be continued by another writer with `resume`.
        """
        self.folder = folder / (name or f"{INCOMING}{secrets.token_hex(8)}")
        self._disk = disk
        self._hash = hashlib.sha256()
        self._block = xxhash.xxh3_64()
        self._sums = bytearray()
        self._synced_bytes = 0
        self._is_made = False
        self.size = 0

    def resume(self) -> int:
        """Continue after the bytes of an earlier writer; return their size. Raises StorageError."""
        with self._reported(), contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if name != CONTENT:
                    self._disk.unlink(self.folder / name)
            with open(self.folder / CONTENT, "rb") as file:
                while piece := file.read(COPY_BYTES):
                    self._add(piece)
        return self.size

    def write(self, data: Buffer) -> None:
        """Append to the payload. Raises StorageError; then only `discard` is possible."""
        with self._reported():
            if not self._is_made:
                self._disk.make_folder(self.folder)
                self._is_made = True
            file = self._disk.open(self.folder / CONTENT)
            try:
                file.append(data)
                self._add(data)
                if self.size - self._synced_bytes >= SYNC_BYTES:
                    file.sync()
                    self._synced_bytes = self.size
            finally:
                file.close()

    def _add(self, data: Buffer) -> None:
        view = memoryview(data)
        self._hash.update(view)
        start = 0
        while start < len(view):
            piece = view[start : start + BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._block.update(piece)
            start += len(piece)
            self.size += len(piece)
            if self.size % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._sums += _SUM.pack(self._block.intdigest())
        self._block = xxhash.xxh3_64()

    def finish(self) -> str:
        """The payload is complete: make its bytes durable; return its id. Raises StorageError."""
        self.write(b"")
        if self.size % BLOCK_BYTES:
            self._end_block()
        with self._reported():
            for name, rest in ((CONTENT, b""), (SUMS, bytes(self._sums))):
                file = self._disk.open(self.folder / name)
                try:
                    file.append(rest)
                    file.sync()
                finally:
                    file.close()
        return self._hash.hexdigest()

    def place(self, target: Path, mark: BlobMark) -> Path:
        """Give the blob its name, or repair an existing one, with a mark; return its folder.

        Durable when this returns. Raises StorageError.
        """
        with self._reported():
            _place(self.folder, target, mark, self._disk)
        return target

    def discard(self) -> None:
        """Remove what this writer, or an earlier one, has written."""
        if self._is_made or self.folder.name.startswith(UNFINISHED):
            self._disk.remove_folder(self.folder)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, f"cannot write {self.folder}") from error


def share(blob: Path, folder: Path, mark: BlobMark, disk: Disk) -> Path:
    """Put a blob into the folder of another account too, durably. Raises OSError."""
    target = folder / blob.name
    if target == blob:
        add_mark(target, mark, disk)
        return target
    incoming = folder / f"{INCOMING}{secrets.token_hex(8)}"
    disk.make_folder(incoming)
    for name in (CONTENT, SUMS):
        disk.link(blob / name, incoming / name)
    _place(incoming, target, mark, disk)
    return target


def _place(incoming: Path, target: Path, mark: BlobMark, disk: Disk) -> None:
    """Give a whole blob its name, with a mark, durably. Raises OSError.

    It replaces the files of a blob that already exists: they have the same bytes, unless they are
    damaged.
    """
    if _is_folder(target):
        for name in (CONTENT, SUMS):
            disk.rename(incoming / name, target / name)
        add_mark(target, mark, disk)
        disk.remove_folder(incoming)
        return
    add_mark(incoming, mark, disk)
    disk.make_folder(target.parent)
    disk.rename(incoming, target)
    for changed in {target.parent, incoming.parent}:
        disk.sync_folder(changed)


def add_mark(blob: Path, mark: BlobMark, disk: Disk) -> None:
    """Write a mark durably. Raises OSError."""
    disk.open(blob / mark.name).close()
    disk.sync_folder(blob)


def settle_mark(blob: Path, pending: BlobMark, mark: BlobMark, older: list[BlobMark]) -> None:
    """The message of a pending mark is durable, or found: remove marks of older messages.

    The new mark comes first. Nothing is synced.
    """
    with contextlib.suppress(FileNotFoundError):
        os.rename(blob / pending.name, blob / mark.name)
    drop_marks(blob, [one for one in older if one.name != mark.name])


def drop_marks(blob: Path, marks: list[BlobMark]) -> None:
    for mark in marks:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(blob / mark.name)


def remove_blob(blob: Path, disk: Disk) -> None:
    """Remove an unneeded blob. It is renamed first, so that no incomplete blob keeps its name.

    The rename is durable before the files are removed: otherwise a power cut restores an empty
    folder.
    """
    doomed = blob.with_name(f"{INCOMING}{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        disk.rename(blob, doomed)
        disk.sync_folder(blob.parent)
        disk.remove_folder(doomed)


class BlobReader:
    """Reads blocks of a blob, each checked. It keeps no file open. Every method may block."""

    def __init__(self, blob: Path) -> None:
        """Raises UsageError `blob.unknown`; StorageError `blob.damaged`, `log.failed` if the disk
        cannot read it.
        """
        self._blob = blob
        try:
            self.size = self._open(CONTENT, lambda file: os.fstat(file).st_size)
            sums = self._open(SUMS, _read_all)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(sums) != _SUM.size * -(-self.size // BLOCK_BYTES):
            raise self._damaged("its sums do not fit its size")
        self._sums = sums

    def block(self, index: int) -> bytes:
        """A block of the content. Raises as the constructor."""
        start = index * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.size - start)
        try:
            data = self._open(CONTENT, lambda file: os.pread(file, size, start))
        except OSError as error:
            raise self._unreadable(error) from error
        (expected,) = _SUM.unpack_from(self._sums, index * _SUM.size)
        if len(data) != size or xxhash.xxh3_64_intdigest(data) != expected:
            raise self._damaged(f"bytes {start} to {start + size}")
        return data

    def read(self, start: int, bytes_max: int) -> bytes:
        """Up to `bytes_max` bytes from `start` on. Raises as `block`."""
        stop = min(start + bytes_max, self.size)
        first = start // BLOCK_BYTES
        pieces = [self.block(index) for index in range(first, -(-stop // BLOCK_BYTES))]
        whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        begin = start - first * BLOCK_BYTES
        return whole if begin == 0 and len(whole) == stop - start else whole[begin:][: stop - start]

    def check(self) -> str | None:
        """Read everything; return why it is damaged, or None."""
        digest = hashlib.sha256()
        try:
            for index in range(-(-self.size // BLOCK_BYTES)):
                digest.update(self.block(index))
        except StorageError as error:
            return error.text
        return None if digest.hexdigest() == self._blob.name else "it is not the payload of its id"

    def _open(self, name: str, use: Callable[[int], T]) -> T:
        folder = os.open(self._blob, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            return use(file)
        finally:
            os.close(file)

    def _unreadable(self, error: OSError) -> PolybusError:
        # Symbolic links are not followed.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return unknown_blob()
        return storage_error(error, f"cannot read blob {self._blob.name}")

    def _damaged(self, what: str) -> StorageError:
        return StorageError("blob.damaged", f"blob {self._blob.name}: damaged: {what}")


def unknown_blob() -> UsageError:
    """The error for an id that does not exist or that the caller may not read: it is the same."""
    return UsageError("blob.unknown", "there is no such blob, or you may not read it")


def _read_all(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
