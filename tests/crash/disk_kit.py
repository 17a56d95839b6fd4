"""Watches every write of a process to one folder, and says what each end would leave of it.

`install` replaces the primitives by which Python changes a disk: `os.open`, `write`, `pwrite`,
`writev`, `fsync`, `fdatasync`, `truncate`, `ftruncate`, `rename`, `replace`, `link`, `unlink`,
`remove`, `mkdir`, `rmdir`; the log's `sync_file_system`; `open` with each `write` of its file;
Parquet writers and the log's compiled writer, which would write below Python; and the statements of
SQLite that change its files.
`shutil.rmtree` and `pathlib` are made of these. A write happens under one lock, and before each one
`before_write` is called.

Three ends, which differ in what is left of the writes so far:

    kill    everything: the process ends, the operating system lives on
    cut     what was synced: contents up to a file's last fsync, names up to its folder's
    torn    all names, and of the contents what was synced: a new file may be empty

SQLite syncs its files when it commits; every end leaves them as they are.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import queue
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow.parquet as pq

from polybus.log import disk as log_disk
from polybus.log.journal import direct

End = Literal["kill", "cut", "torn"]
Tree = dict[str, bytes | None]
"""Paths below the folder, each with its content; None for a folder."""
READS = ("SELECT", "PRAGMA JOURNAL_MODE", "PRAGMA SYNCHRONOUS", "PRAGMA QUICK_CHECK", "BEGIN")
ENDS_TRANSACTION = ("COMMIT", "ROLLBACK", "close")
_OS = {name: getattr(os, name) for name in dir(os)}
_OPEN = io.open
_PARQUET_WRITER: Any = pq.ParquetWriter
_WRITING: Any = direct._writing
_SYNC_ALL = log_disk.sync_file_system
_CONNECT: Any = sqlite3.connect


class WatchedDisk:
    """The writes of this process below `root`, which exists and is all synced."""

    def __init__(self, root: Path, before_write: Callable[[str], None]) -> None:
        self._root = str(root)
        self._before_write = before_write
        self._lock = threading.RLock()
        # What is synced, by inode: the content of a file; the names in a folder, each an inode.
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        # Folders between which something was moved: the fsync of one makes both safe.
        self._moved: list[set[str]] = []
        self._databases: set[str] = set()
        # Removed files stay open, so that their inodes are not given to others.
        self._removed: list[int] = []
        self._all_synced()

    # What is left.

    def left(self, end: End) -> Tree:
        """What the folder has after this end."""
        return dict(self._walk(self._root, _inode(self._root), end))

    def _walk(self, path: str, inode: int, end: End) -> Iterator[tuple[str, bytes | None]]:
        """`path` is where the folder was when its name was synced; it may be elsewhere by now."""
        names = _names(path) if end != "cut" else self._names.get(inode, {})
        if end == "cut" and path == self._root:
            files = {name: one for name, one in _names(path).items() if self._is_database(name)}
            names = {n: one for n, one in names.items() if not self._is_database(n)} | files
        for name, child in names.items():
            full = os.path.join(path, name)
            relative = os.path.relpath(full, self._root)
            if child in self._names:
                yield relative, None
                yield from self._walk(full, child, end)
            elif end == "kill" or self._is_database(relative):
                yield relative, _content(full)
            else:
                yield relative, self._contents.get(child, b"")

    def _is_database(self, relative: str) -> bool:
        return any(relative.startswith(one) for one in self._databases)

    # What is synced.

    def _sync_names(self, path: str) -> None:
        self._names[_inode(path)] = _names(path)

    def _synced(self, descriptor: int, path: str) -> None:
        inode = os.fstat(descriptor).st_ino
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self._contents[inode] = _content(path)
            return
        for folder in {path}.union(*(pair for pair in self._moved if path in pair)):
            if os.path.isdir(folder):
                self._sync_names(folder)
        self._moved = [pair for pair in self._moved if path not in pair]

    def _sync_all(self, path: Path) -> bool:
        return bool(self.act(f"syncfs {self._short(str(path))}", self._all_synced))

    def _all_synced(self) -> bool:
        for folder, _, files in os.walk(self._root):
            self._sync_names(folder)
            for name in files:
                path = os.path.join(folder, name)
                if os.path.isfile(path):
                    self._contents[_inode(path)] = _content(path)
        self._moved = []
        return True

    def _keep_inode(self, path: str) -> None:
        if os.path.lexists(path):
            self._removed.append(_OS["open"](path, os.O_RDONLY))

    # The primitives.

    def install(self) -> None:
        replacements: dict[str, Callable[..., Any]] = {
            "open": self._open,
            **dict.fromkeys(("rename", "replace"), self._rename),
            **dict.fromkeys(("unlink", "remove"), self._unlink),
            "link": self._link,
            "mkdir": self._mkdir,
            "rmdir": self._rmdir,
        }
        for name in ("write", "pwrite", "writev", "ftruncate", "truncate"):
            replacements[name] = self._writing(name)
        for name in ("fsync", "fdatasync"):
            replacements[name] = self._syncing(name)
        for name, replacement in replacements.items():
            setattr(os, name, replacement)
        log_disk.sync_file_system = self._sync_all
        builtins.open = io.open = self._open_file
        pq.ParquetWriter = _parquet_writer(_PARQUET_WRITER)
        direct._writing = SimpleNamespace(Writer=_Writer, Alarm=_WRITING.Alarm)
        sqlite3.connect = self._connect(_CONNECT)

    def uninstall(self) -> None:
        """Put the primitives back, and close what was kept open."""
        for name, original in _OS.items():
            if getattr(os, name) is not original:
                setattr(os, name, original)
        log_disk.sync_file_system = _SYNC_ALL
        builtins.open = io.open = _OPEN
        pq.ParquetWriter = _PARQUET_WRITER
        direct._writing = _WRITING
        sqlite3.connect = _CONNECT
        while self._removed:
            os.close(self._removed.pop())

    def act(self, what: str, operation: Callable[[], Any]) -> Any:
        with self._lock:
            self._before_write(what)
            return operation()

    def path_of(self, path: Any, folder: int | None = None) -> str | None:
        """The absolute path if it is below the root."""
        if isinstance(path, int):
            path = _OS["readlink"](f"/proc/self/fd/{path}")
        path = os.fsdecode(path)
        if folder is not None:
            path = os.path.join(_OS["readlink"](f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        return path if path.startswith(self._root + "/") or path == self._root else None

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self._root)

    def _writing(self, name: str) -> Callable[..., Any]:
        def write(file: Any, *arguments: Any) -> Any:
            path = self.path_of(file)
            if path is None:
                return _OS[name](file, *arguments)
            return self.act(f"{name} {self._short(path)}", lambda: _OS[name](file, *arguments))

        return write

    def _syncing(self, name: str) -> Callable[..., Any]:
        def sync(file: Any) -> Any:
            descriptor = file if isinstance(file, int) else file.fileno()
            path = self.path_of(descriptor)
            if path is None:
                return _OS[name](descriptor)
            # The folder goes when the test ends: nobody has to wait for a disk.
            return self.act(f"{name} {self._short(path)}", lambda: self._synced(descriptor, path))

        return sync

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def perform() -> int:
            return int(_OS["open"](path, flags, mode, dir_fd=dir_fd))

        full = self.path_of(path, dir_fd)
        if full is None or not flags & (os.O_WRONLY | os.O_RDWR):
            return perform()
        if os.path.exists(full) and not flags & os.O_TRUNC:
            return perform()
        return int(self.act(f"create {self._short(full)}", perform))

    def _rename(self, source: Any, target: Any) -> Any:
        start, end = self.path_of(source), self.path_of(target)
        if start is None or end is None:
            return _OS["rename"](source, target)

        def perform() -> None:
            if os.path.isfile(end):
                self._keep_inode(end)
            _OS["rename"](start, end)
            self._moved.append({os.path.dirname(start), os.path.dirname(end)})

        return self.act(f"rename {self._short(start)} to {self._short(end)}", perform)

    def _link(self, source: Any, target: Any) -> Any:
        return self.act(f"link {target}", lambda: _OS["link"](source, target))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> Any:
        full = self.path_of(path, dir_fd)
        if full is None or not os.path.lexists(full):
            return _OS["unlink"](path, dir_fd=dir_fd)

        def perform() -> None:
            if os.path.isfile(full):
                self._keep_inode(full)
            _OS["unlink"](full)

        return self.act(f"unlink {self._short(full)}", perform)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        full = self.path_of(path, dir_fd)
        if full is None or os.path.exists(full):
            return _OS["mkdir"](path, mode, dir_fd=dir_fd)

        def perform() -> None:
            _OS["mkdir"](full, mode)
            self._names[_inode(full)] = {}

        return self.act(f"mkdir {self._short(full)}", perform)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> Any:
        full = self.path_of(path, dir_fd)
        if full is None or not os.path.isdir(full) or os.listdir(full):
            return _OS["rmdir"](path, dir_fd=dir_fd)

        def perform() -> None:
            self._keep_inode(full)
            _OS["rmdir"](full)

        return self.act(f"rmdir {self._short(full)}", perform)

    def _open_file(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        """As `open`; what is written to the file goes through `os.write`."""
        path = self.path_of(file)
        if path is None or not set(mode) & set("wax+"):
            return _OPEN(file, mode, *arguments, **named)
        raw_mode = mode.replace("b", "").replace("t", "")
        if isinstance(file, int):
            raw = _RawFile(file, raw_mode)
        else:
            # FileIO would create the file below Python.
            raw = _RawFile(path, raw_mode, opener=lambda name, flags: os.open(name, flags, 0o666))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

    def _connect(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        disk = self

        class Connection(sqlite3.Connection):
            def _act(self, text: str, operation: Callable[[], Any]) -> Any:
                """Within a transaction only its end changes the disk."""
                is_read = text.strip().upper().startswith(READS)
                if is_read or (self.in_transaction and text not in ENDS_TRANSACTION):
                    return operation()
                return disk.act(f"sqlite {' '.join(text.split())[:40]}", operation)

            def execute(self, sql: str, *arguments: Any) -> Any:
                return self._act(sql, lambda: super(Connection, self).execute(sql, *arguments))

            def executemany(self, sql: str, *arguments: Any) -> Any:
                return self._act(sql, lambda: super(Connection, self).executemany(sql, *arguments))

            def executescript(self, sql: str) -> Any:
                return self._act(sql, lambda: super(Connection, self).executescript(sql))

            def close(self) -> None:
                self._act("close", super().close)

        def connected(database: Any, *arguments: Any, **named: Any) -> Any:
            path = disk.path_of(database)
            if path is None or named.get("uri"):
                return connect(database, *arguments, **named)
            disk._databases.add(disk._short(path))
            return connect(database, *arguments, factory=Connection, **named)

        return connected


class _Writer:
    """The `Writer` of the log's compiled module, in Python."""

    def __init__(self, event: int) -> None:
        self._event = event
        self._todo: queue.SimpleQueue[tuple[int, int, Any, bytes] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, int, int, float]] = queue.SimpleQueue()

    def run(self) -> None:
        while (job := self._todo.get()) is not None:
            self._done.put(self._do(*job))
            if job[3]:
                os.eventfd_write(self._event, 1)

    def _do(
        self, file: int, index: int, message: Any, records: bytes
    ) -> tuple[int, int, int, float]:
        errors = [0, 0, 0]
        steps: list[Callable[[], Any]] = (
            [lambda: os.write(file, message)] if len(message) else [int]
        )
        if records:
            steps += [lambda: os.fdatasync(file), lambda: os.write(index, records)]
        for at, step in enumerate(steps):
            try:
                step()
            except OSError as error:
                errors[at] = error.errno or errno.EIO
                break
        return errors[0], errors[1], errors[2], 0.0

    def begin(self, file: int, index: int, message: Any, records: bytes) -> None:
        self._todo.put((file, index, message, records))

    def is_done(self) -> bool:
        return not self._done.empty()

    def result(self) -> tuple[int, int, int, float]:
        return self._done.get()

    def stop(self) -> None:
        self._todo.put(None)


class _RawFile(io.FileIO):
    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        os.ftruncate(self.fileno(), size)
        return size


def _parquet_writer(base: Any) -> Any:
    class ParquetWriter(base):  # type: ignore[misc]
        """Writes through a file of Python, also where it is given a path."""

        def __init__(self, where: Any, *arguments: Any, **named: Any) -> None:
            self._own = open(where, "wb") if isinstance(where, str | Path) else None
            super().__init__(self._own or where, *arguments, **named)

        def close(self) -> None:
            super().close()
            if self._own is not None:
                self._own.close()

    return ParquetWriter


def _inode(path: str | Path) -> int:
    return os.stat(path).st_ino


def _names(path: str) -> dict[str, int]:
    """What is in a folder, sockets left out."""
    with os.scandir(path) as found:
        return {entry.name: entry.inode() for entry in found if entry.is_file() or entry.is_dir()}


def _content(path: str) -> bytes:
    descriptor = _OS["open"](path, os.O_RDONLY)
    try:
        return os.read(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
