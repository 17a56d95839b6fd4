"""Uploads of staged files: which are being written or committed, and their total size.

Order of writes: the folders, the file, its bytes; then fsyncs of the file and of every folder up to
DATA, and only then the answer. No transaction names a file that a crash left unfinished, so it
expires.

A file that is being committed must not change: it is checked as a whole, then read again part by
part. `StagingRoom` and `StagedUpload` run on the threads of `StagedUploads`, the rest on that of
the loop.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from polybus.errors import UsageError
from polybus.log.disk import Disk, sync_path
from polybus.log.topics import storage_error
from polybus.services.threads import in_thread
from polybus.services.transactions import staging

T = TypeVar("T")

FILES_MAX = 100_000
THREADS = 2
TRIES = 5
LOOK_AGAIN_S = 1.0
LOOKING_SHARE = 0.05
"""The share of the time that counting staged files may take."""


class StagingRoom:
    """The size of staged files, in total and by account; recounted on the disk from time to time.

    `own_bytes_max` is how much an account may stage; None means all of the room. Its share of the
    number of files is the same.
    """

    def __init__(
        self,
        data: Path,
        *,
        bytes_max: int,
        own_bytes_max: Callable[[str], int | None] = lambda account: None,
    ) -> None:
        self._data = data
        self._bytes_max = bytes_max
        self._own_bytes_max = own_bytes_max
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._files: Counter[str] = Counter()
        self._look_at_s = 0.0

    def take(self, path: Path, size: int, *, is_new: bool) -> None:
        """Add a piece of a file. Raises UsageError `staging.full`. May block."""
        account = staging.account_of(path)
        with self._lock:
            if time.monotonic() >= self._look_at_s or self._lacking(account, size, is_new):
                self._look()
            lacking = self._lacking(account, size, is_new)
            if lacking:
                raise UsageError("staging.full", lacking)
            self._bytes[account] += size
            self._files[account] += is_new

    def _lacking(self, account: str, size: int, is_new: bool) -> str:
        own_max = self._own_bytes_max(account)
        if is_new and self._files.total() >= FILES_MAX:
            return f"{FILES_MAX} files are staged and not committed"
        if self._bytes.total() + size > self._bytes_max:
            limit = "limits.staging-bytes-max"
            return f"over {self._bytes_max} bytes are staged and not committed ({limit})"
        if own_max is None:
            return ""
        own_files_max = max(1, FILES_MAX * own_max // self._bytes_max)
        if self._bytes[account] + size > own_max or (
            is_new and self._files[account] >= own_files_max
        ):
            text = f"your account has staged {own_max} bytes or {own_files_max} files"
            return f"{text} and not committed them (account-staging-bytes-max)"
        return ""

    def _look(self) -> None:
        began_s = time.monotonic()
        self._bytes, self._files = staging.staged(self._data)
        taken_s = time.monotonic() - began_s
        self._look_at_s = began_s + max(LOOK_AGAIN_S, taken_s / LOOKING_SHARE)


class StagedUpload:
    """One piece of a staged file while it arrives. Every method may block.

    A piece that is sent again, because its answer was lost, is overwritten.
    """

    def __init__(self, path: Path, position: int, room: StagingRoom) -> None:
        """Raises UsageError `staging.position`, `staging.full`; StorageError."""
        self._path = path
        self._room = room
        with self._reported():
            room.take(path, 0, is_new=not path.exists())
            self._file = _opened(path)
            size = self._file.seek(0, os.SEEK_END)
        if position > size:
            self._file.close()
            text = f"{path.name} has {size} bytes; a piece cannot begin at byte {position}"
            raise UsageError("staging.position", text)
        self._file.truncate(position)
        self.size = self._file.seek(position)

    def write(self, some: bytes) -> None:
        """Raises UsageError `staging.full`; StorageError."""
        self._room.take(self._path, len(some), is_new=False)
        with self._reported():
            self._file.write(some)
            self._file.flush()
        self.size += len(some)

    def sync(self) -> None:
        """Make the whole file durable. Raises StorageError."""
        with self._reported():
            os.fsync(self._file.fileno())
            # The producer's folder, `staging` and DATA: any of them may be new.
            for folder in self._path.parents[:3]:
                sync_path(folder)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, f"cannot stage {self._path}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _opened(path: Path) -> IO[bytes]:
    for _ in range(TRIES):
        Disk().make_folder(path.parent)
        # A sweep may remove a producer's empty folder right now.
        with contextlib.suppress(FileNotFoundError):
            return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
    raise FileNotFoundError(path)


class StagedUploads:
    """All uploads of a bus, on their own threads, so that slow disks delay no reader of the log."""

    def __init__(self, room: StagingRoom) -> None:
        self.room = room
        self._writing: set[Path] = set()
        self._committing: set[Path] = set()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="polybus-staging")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await in_thread(self._threads, work, *arguments)

    def is_committing(self, path: Path) -> bool:
        return path in self._committing

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Raises UsageError `staging.in-use` if another request writes the file."""
        if path in self._writing:
            raise UsageError("staging.in-use", f"{path.name} is being written")
        self._writing.add(path)
        try:
            yield
        finally:
            self._writing.discard(path)

    @contextlib.contextmanager
    def committing(self, paths: Sequence[Path]) -> Iterator[None]:
        """Raises UsageError `staging.in-use` if a file is still being written."""
        for path in paths:
            if path in self._writing:
                raise UsageError("staging.in-use", f"{path.name} is still being written")
        self._committing.update(paths)
        try:
            yield
        finally:
            self._committing.difference_update(paths)

    def close(self) -> None:
        self._threads.shutdown(wait=False)
