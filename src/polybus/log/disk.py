"""The few things the log asks of a disk when it writes, so that tests can pass in a bad one.

Reading goes to the files themselves: only writing has moments at which a crash can come between.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol

from polybus.batch import Buffer

CACHED_BYTES_MAX = 64 << 20
"""The end of a file that is left to the system's cache: what readers close behind want."""
DROP_STEP_BYTES = 8 << 20


class DiskFile(Protocol):
    """A file that grows at its end."""

    def append(self, data: Buffer) -> None:
        """Write all of `data` at the end. On OSError some of it may have been written."""
        ...

    def sync(self) -> None:
        """What was appended survives a power cut when this returns."""
        ...

    def rewrite(self, position: int, data: Buffer) -> None:
        """Write bytes that are in the file already once more, in their place."""
        ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """Files and folders. Names (created, renamed, removed) are safe after `sync_folder`."""

    def open(self, path: Path) -> DiskFile:
        """Open for appending; create if it is not there."""
        ...

    def rename(self, source: Path, target: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def make_folder(self, path: Path) -> None:
        """Create a folder and those above it, safely; nothing happens if it is there."""
        ...

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and all in it. A crash may leave some of it."""
        ...

    def sync_folder(self, path: Path) -> None: ...


class OsFile:
    """A file of the operating system."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path, flags, 0o644)
        self._dropped_bytes = 0

    def append(self, data: Buffer) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        # What is appended after this line may not be safe afterwards: it must stay cached.
        size = self.size()
        os.fdatasync(self._descriptor)
        self._drop_behind(size - CACHED_BYTES_MAX)

    def _drop_behind(self, stop: int) -> None:
        """Give back the memory of what is on disk and will not be read again soon.

        A log is written once and read rarely, but the system caches all of it: each write then has
        to find fresh memory, which on virtual machines costs ten times as much as the copy.
        """
        if stop - self._dropped_bytes >= DROP_STEP_BYTES:
            length = stop - self._dropped_bytes
            os.posix_fadvise(self._descriptor, self._dropped_bytes, length, os.POSIX_FADV_DONTNEED)
            self._dropped_bytes = stop

    def rewrite(self, position: int, data: Buffer) -> None:
        # A descriptor opened for appending appends, whatever position it is told.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            view = memoryview(data)
            while view.nbytes:
                written = os.pwrite(descriptor, view, position)
                view = view[written:]
                position += written
        finally:
            os.close(descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class OsDisk:
    """The disk of the operating system."""

    def open(self, path: Path) -> DiskFile:
        return OsFile(path)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def make_folder(self, path: Path) -> None:
        if path.is_dir():
            return
        self.make_folder(path.parent)
        path.mkdir(exist_ok=True)
        self.sync_folder(path.parent)

    def remove_folder(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace_file(path: Path, content: bytes, disk: Disk | None = None) -> None:
    """Replace a small file as a whole: after a crash it is the old one or the new one."""
    disk = disk or OsDisk()
    temporary = path.with_name(path.name + ".tmp")
    disk.unlink(temporary)
    file = disk.open(temporary)
    try:
        file.append(content)
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_folder(path.parent)
