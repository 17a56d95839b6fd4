"""Processes: whether one still runs, how much memory this one has, and temporary folders.

A scratch folder belongs to the process that holds the lock of its file `lock`. The next process
that makes one of the same kind removes those of processes that were killed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK = "lock"
NEW_LOCK = "lock.new"
UNLOCKED_AGE_S = 3600.0
"""A folder of this age without a lock belongs to a process that ended before it locked it."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_held: dict[Path, int] = {}


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # The process exists and belongs to another user.
    return True


def started_ticks(pid: int) -> int:
    """When a process started, in ticks since the system did; 0 if it has ended.

    With it, an id names one process: another process may have the id later.
    """
    try:
        # The name of the program is in brackets, and may have spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def memory_bytes() -> tuple[int, int]:
    """Reserved and resident memory of this process; zeros where the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            reserved, resident = file.read().split()[:2]
    except (OSError, ValueError):
        return 0, 0
    return int(reserved) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


def new_scratch(kind: str) -> Path:
    """A new folder for temporary files; the caller calls `remove_scratch`."""
    sweep(kind)
    folder = Path(tempfile.mkdtemp(prefix=f"polybus-{kind}-"))
    _held[folder] = descriptor = os.open(folder / NEW_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Locked before it gets this name, so a sweep never finds it unlocked.
    os.rename(folder / NEW_LOCK, folder / LOCK)
    return folder


def remove_scratch(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_every_scratch() -> None:
    """Remove all scratch folders of this process, before an exit that runs no cleanup."""
    for folder in [*_held]:
        remove_scratch(folder)


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """A folder for temporary files, removed at the end of the block."""
    folder = new_scratch(kind)
    try:
        yield folder
    finally:
        remove_scratch(folder)


def sweep(kind: str) -> None:
    """Remove the folders of this kind whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"polybus-{kind}-*"):
        with contextlib.suppress(OSError):
            if folder not in _held and folder.stat().st_uid == os.getuid() and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > UNLOCKED_AGE_S
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
