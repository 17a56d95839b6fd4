"""FaultyDisk: a disk for tests that loses unsynced bytes in a crash, and fails on request.

It works on real files. Reads see every write at once, as in the page cache of an operating system;
`crash()` changes the files as a power cut does:

- appended bytes that were not synced are lost, kept in part, or kept with holes (zeros or garbage);
- bytes whose fsync failed are not synced by the next fsync, unless they were written again;
- a truncation that was not synced may be undone;
- a file that was created, renamed or removed without a sync of its folder may be as before: of the
  changes to one folder, a prefix survives and the rest is undone.

The seed decides what survives, so a failure can be reproduced.

    disk = FaultyDisk(seed=7)
    log = FileLog(data, ..., disk=disk)
    disk.fail("fsync", errno.EIO, after=3)      # the fourth fsync fails, and all later ones
    disk.heal()
    disk.crash()                                # cut the power; then open a new log on the files
"""

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from polybus.batch import Buffer
from polybus.log.disk import Disk, DiskFile

DiskOperation = Literal["write", "fsync", "open", "rename"]


class FaultyFile(DiskFile):
    """A file of a FaultyDisk; unsynced changes may be lost."""

    def __init__(self, disk: "FaultyDisk", path: Path, mode: int) -> None:
        self._disk = disk
        self._state = disk.state_of(path)
        super().__init__(path, mode)

    def append(self, data: Buffer) -> None:
        with self._disk.lock:
            part = self._disk.allow_write(memoryview(data).cast("B"))
            os.write(self._descriptor, part)
            self._disk.check("write")

    def sync(self) -> None:
        with self._disk.lock:
            state = self._state
            try:
                self._disk.check("fsync")
            except OSError:
                state.doubtful_bytes = self.size()
                state.rewritten_bytes = 0
                raise
            if state.doubtful_bytes <= state.safe_bytes:
                state.safe_bytes = self.size()
                state.cut_off = b""

    def rewrite(self, position: int, data: Buffer) -> None:
        with self._disk.lock:
            self._disk.check("write")
            state = self._state
            view = memoryview(data).cast("B")
            if os.pread(self._descriptor, len(view), position) != view:
                raise AssertionError("rewrite must not change the content of the file")
            if position <= max(state.safe_bytes, state.rewritten_bytes):
                state.rewritten_bytes = max(state.rewritten_bytes, position + len(view))
            if state.rewritten_bytes >= state.doubtful_bytes:
                state.doubtful_bytes = state.rewritten_bytes = 0

    def truncate(self, size: int) -> None:
        with self._disk.lock:
            self._disk.check("write")
            state = self._state
            if size < state.safe_bytes:
                lost = os.pread(self._descriptor, state.safe_bytes - size, size)
                state.cut_off = lost + state.cut_off
                state.safe_bytes = size
            state.doubtful_bytes = min(state.doubtful_bytes, size)
            super().truncate(size)


@dataclass
class _FileState:
    """What a power cut leaves of a file: `safe_bytes`, and perhaps the truncated `cut_off`.

    After a failed fsync the operating system treats the bytes up to `doubtful_bytes` as written.
    Another fsync does not write them; only a rewrite does, which has reached `rewritten_bytes`.
    """

    path: Path
    safe_bytes: int
    doubtful_bytes: int = 0
    rewritten_bytes: int = 0
    cut_off: bytes = b""


class FaultyDisk(Disk):
    """A disk whose power can be cut and whose operations can fail."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._states: dict[Path, _FileState] = {}
        self._undo: dict[Path, list[Callable[[], object]]] = {}
        self._faults: dict[DiskOperation, tuple[int, int]] = {}
        self._power_at: int | None = None
        self._off = False

    # Faults.

    def fail(self, operation: DiskOperation, error: int, *, after: int = 0) -> None:
        """Let `after` more operations of a kind succeed, and fail all later ones until `heal`.

        A failed write may have written some of its bytes.
        """
        with self.lock:
            self._faults[operation] = (after, error)

    def heal(self) -> None:
        with self.lock:
            self._faults = {}

    def cut_power_after(self, operations: int) -> None:
        """Cut the power after this many more operations; then call `crash`."""
        with self.lock:
            self._power_at = operations

    def crash(self) -> None:
        """Cut the power, and change the files to what the next start finds."""
        with self.lock:
            self._off = True
            for state in self._states.values():
                if state.path.exists():
                    self._lose_bytes(state)
            for changes in self._undo.values():
                survivors = self._random.randint(0, len(changes))
                for undo in reversed(changes[survivors:]):
                    undo()
            self._states = {}
            self._undo = {}

    def _lose_bytes(self, state: _FileState) -> None:
        draw = self._random
        content = state.path.read_bytes()
        safe, unsafe = content[: state.safe_bytes], content[state.safe_bytes :]
        if state.cut_off and draw.random() < 0.5:
            # The truncation and every later write are undone.
            state.path.write_bytes(safe + state.cut_off)
            return
        kept = bytearray(unsafe[: draw.randint(0, len(unsafe))])
        if kept and draw.random() < 0.5:
            start = draw.randrange(len(kept))
            stop = min(len(kept), start + draw.randint(1, 4096))
            garbage = draw.randbytes(stop - start) if draw.random() < 0.5 else bytes(stop - start)
            kept[start:stop] = garbage
        if draw.random() < 0.2:
            kept = bytearray(unsafe)
        state.path.write_bytes(safe + kept)

    # The Disk.

    def open(self, path: Path, mode: int = 0o660) -> FaultyFile:
        with self.lock:
            self.check("open")
            if not path.exists():
                self._remember(path.parent, lambda: path.unlink(missing_ok=True))
            return FaultyFile(self, path, mode)

    def rename(self, source: Path, target: Path) -> None:
        with self.lock:
            self.check("rename")
            before = target.read_bytes() if target.is_file() else None

            def undo() -> None:
                # The folder may have been removed since, without a sync either.
                source.parent.mkdir(parents=True, exist_ok=True)
                target.rename(source)
                if before is not None:
                    target.write_bytes(before)

            source.rename(target)
            self._remember(target.parent, undo)
            if source in self._states:
                state = self._states[target] = self._states.pop(source)
                state.path = target

    def link(self, source: Path, target: Path) -> None:
        with self.lock:
            self.check("rename")
            os.link(source, target)
            self._remember(target.parent, lambda: target.unlink(missing_ok=True))
            if source in self._states:
                self._states[target] = replace(self._states[source], path=target)

    def unlink(self, path: Path) -> None:
        with self.lock:
            self.check("rename")
            if not path.exists():
                return
            content = path.read_bytes()
            path.unlink()
            self._states.pop(path, None)
            self._remember(path.parent, lambda: path.write_bytes(content))

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def remove_folder(self, path: Path) -> None:
        with self.lock:
            self._states = {
                known: state for known, state in self._states.items() if path not in known.parents
            }
            self._undo = {
                changed: undo
                for changed, undo in self._undo.items()
                if changed != path and path not in changed.parents
            }
            shutil.rmtree(path, ignore_errors=True)

    def sync_folder(self, path: Path) -> None:
        with self.lock:
            self.check("fsync")
            self._undo.pop(path, None)

    def sync_below(self, folder: Path) -> None:
        with self.lock:
            self.check("fsync")
            for path, state in self._states.items():
                if folder in path.parents:
                    state.safe_bytes = path.stat().st_size
            self._undo = {
                path: undo
                for path, undo in self._undo.items()
                if path != folder and folder not in path.parents
            }

    # For FaultyFile.

    def state_of(self, path: Path) -> _FileState:
        if path not in self._states:
            size = path.stat().st_size if path.exists() else 0
            self._states[path] = _FileState(path, size)
        return self._states[path]

    def allow_write(self, data: memoryview) -> memoryview:
        """The part of a write that reaches the file; `check` raises next if it is not all."""
        if self._off:
            return data[:0]
        if self._power_at == 0 or self._faults.get("write", (1, 0))[0] == 0:
            return data[: self._random.randint(0, len(data))]
        return data

    def check(self, operation: DiskOperation) -> None:
        """Raise OSError if an operation must fail."""
        if self._power_at is not None:
            if self._power_at == 0:
                self._off = True
            self._power_at -= 1
        if self._off:
            raise OSError(errno.EIO, "the power is off")
        if operation in self._faults:
            after, error = self._faults[operation]
            if after == 0:
                raise OSError(error, os.strerror(error))
            self._faults[operation] = (after - 1, error)

    def _remember(self, folder: Path, undo: Callable[[], object]) -> None:
        self._undo.setdefault(folder, []).append(undo)
