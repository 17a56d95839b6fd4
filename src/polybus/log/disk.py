"""Durable writes: the file operations of the log, fsync, and the atomic replacement of a file.

The log writes through a `Disk`, so that tests can pass one that fails or loses power
(polybus.testing.faulty_disk). It reads files directly: a crash can only come between writes.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from polybus.batch import Buffer

CACHED_BYTES_MAX = 64 << 20
"""How much of a file's end stays in the page cache, for readers that are close to the end."""
DROP_STEP_BYTES = 8 << 20
TOGETHER_MIN = 64
"""From this number of files and folders on, the whole file system is synced instead of each one."""


class DiskFile:
    """A file that grows at its end."""

    def __init__(self, path: Path, mode: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path, flags, mode & _mode_of(path.parent))
        self._bytes = self.size()
        self._dropped_bytes = 0

    def append(self, data: Buffer) -> None:
        """Write all of `data` at the end. On OSError some of it may have been written."""
        view = memoryview(data)
        while view.nbytes:
            written = os.write(self._descriptor, view)
            self._bytes += written
            view = view[written:]

    @property
    def descriptor(self) -> int:
        """For writing at the end with C functions; then call `appended`."""
        return self._descriptor

    def appended(self, size: int) -> None:
        self._bytes += size

    def is_drop_due(self) -> bool:
        """Whether the next sync drops bytes from the page cache."""
        return self._bytes - CACHED_BYTES_MAX - self._dropped_bytes >= DROP_STEP_BYTES

    def sync(self) -> None:
        """Make everything appended so far survive a power cut."""
        # Bytes appended from here on may miss this fsync, so they must stay in the cache.
        size = self._bytes
        os.fdatasync(self._descriptor)
        self._drop_behind(size - CACHED_BYTES_MAX)

    def _drop_behind(self, stop: int) -> None:
        """Drop synced bytes from the page cache that will hardly be read again soon.

        A log is written once and read rarely, but the kernel caches all of it. Each write then
        needs fresh pages, which on virtual machines costs ten times as much as the copy.
        """
        if stop - self._dropped_bytes >= DROP_STEP_BYTES:
            length = stop - self._dropped_bytes
            os.posix_fadvise(self._descriptor, self._dropped_bytes, length, os.POSIX_FADV_DONTNEED)
            self._dropped_bytes = stop

    def rewrite(self, position: int, data: Buffer) -> None:
        """Write bytes again that the file already has at this position."""
        # Linux ignores the position of pwrite on a descriptor opened with O_APPEND.
        with self._path.open("r+b") as file:
            file.seek(position)
            file.write(data)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self._bytes = size

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Disk:
    """Files and folders. A created, renamed or removed name is durable after `sync_folder`."""

    def __init__(self) -> None:
        self._durable: set[Path] = set()

    def open(self, path: Path, mode: int = 0o660) -> DiskFile:
        """Open for appending; create a missing file with this mode, or less as in its folder."""
        return DiskFile(path, mode)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. Raises FileExistsError if the name is taken."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def add_folder(self, path: Path) -> None:
        """Create a folder in an existing one; durable after `sync_below`."""
        path.mkdir(mode=_mode_of(path.parent))

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents durably.

        An existing one is made durable too: its creator may have failed, or been killed, before
        that. Its parent is durable, because that came first.
        """
        exists = path.is_dir()
        if exists and path in self._durable:
            return
        if not exists:
            self.make_folder(path.parent)
            path.mkdir(exist_ok=True, mode=_mode_of(path.parent))
        # A user of the folder may not be allowed to read its parent.
        with contextlib.suppress(*((PermissionError,) if exists else ())):
            self.sync_folder(path.parent)
        self._durable.add(path)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder with its content. A crash may leave a part of it."""
        shutil.rmtree(path, ignore_errors=True)

    def sync_folder(self, path: Path) -> None:
        sync_path(path)

    def sync_below(self, folder: Path) -> None:
        """Make everything in a folder durable: names, and contents of files."""
        found = [folder, *folder.rglob("*")]
        if len(found) >= TOGETHER_MIN and sync_file_system(folder):
            return
        for path in found:
            sync_path(path)


class FileLock:
    """An exclusive or shared lock on a file, held until `release`; a context manager.

    The system releases it when the process ends.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Take the lock. Raises BlockingIOError if another process holds it; OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags, 0o660 & _mode_of(path.parent))
        except OSError:
            # In a read-only folder: a reader can still lock an existing file.
            if not shared:
                raise
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self._descriptor, mode | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def sync_path(path: Path) -> None:
    """Fsync a file, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(path: Path) -> bool:
    """Make everything on the file system of a path durable; False if the system cannot do that.

    Only Linux has the call. Raises OSError.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if syncfs(descriptor):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)
    return True


def _mode_of(folder: Path) -> int:
    """The mode of a folder for its owner and group, without the bits for others."""
    return folder.stat().st_mode & 0o770


def replace_file(
    path: Path, content: bytes, disk: Disk | None = None, *, mode: int = 0o660
) -> None:
    """Replace a small file atomically: after a crash it has the old content or the new.

    Order of writes: temporary file, fsync, rename, fsync of the folder. A temporary file that a
    crash leaves is removed by the next replacement.
    """
    disk = disk or Disk()
    temporary = path.with_name(path.name + ".tmp")
    disk.unlink(temporary)
    file = disk.open(temporary, mode)
    try:
        file.append(content)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)


def write_together(folder: Path, contents: Mapping[Path, bytes], disk: Disk) -> None:
    """Write new files durably, each into its own new folder below `folder`.

    A crash may leave any part of them. Many files cost hardly more than one.
    """
    for path, content in contents.items():
        disk.add_folder(path.parent)
        file = disk.open(path)
        try:
            file.append(content)
        finally:
            file.close()
    disk.sync_below(folder)
