"""The preloaded library (shim.c) between a bus and its disk and clock, and its control."""

import ctypes
import mmap
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from polybus.bench import compiling

SOURCE = Path(__file__).with_name("shim.c")
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wshadow", "-shared", "-fPIC")
PATH_BYTES = 1024
OPEN, WRITE, SYNC, NAME, TRUNCATE, READ = 1, 2, 4, 8, 16, 32
EVERY_CHANGE = OPEN | WRITE | SYNC | NAME | TRUNCATE
KILL_SELF, CUT_POWER = 0, -1
PRELOAD, CONTROL = "LD_PRELOAD", "TORTURE_CONTROL"


def library(environ: Mapping[str, str] | None = None) -> Path:
    """The library, compiled at the first use. Raises BenchError."""
    return compiling.cached("torture-shim", [SOURCE], FLAGS, environ)


class _Control(ctypes.Structure):
    """`struct control` of shim.c."""

    _fields_ = [
        *(
            (name, ctypes.c_char * PATH_BYTES)
            for name in ("root", "log", "graveyard", "pattern", "end_pattern")
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("clock_ns", "operations", "end_at", "end_how", "end_torn", "off"),
                *("error", "error_mask", "error_after", "error_count", "error_partial"),
                *("error_matches", "syncs", "end_matches"),
            )
        ),
    ]


class Shim:
    """Decides what happens to a bus on `folder`/data, while it runs.

    With `records`, it keeps a record of every change in `folder`/changes, and every file that was
    ever changed in `folder`/graveyard.
    """

    def __init__(self, folder: Path, *, records: bool = False) -> None:
        """Compile the library at the first use. Raises BenchError."""
        self._library = library()
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        self.root = folder / "data"
        self.log = folder / "changes"
        self.graveyard = folder / "graveyard"
        self._path = folder / "control"
        self._path.write_bytes(bytes(ctypes.sizeof(_Control)))
        with self._path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._control = _Control.from_buffer(self._map)
        self._control.root = os.fsencode(self.root)
        if records:
            self._control.log = os.fsencode(self.log)
            self._control.graveyard = os.fsencode(self.graveyard)
            self.forget()

    @property
    def environment(self) -> dict[str, str]:
        return {PRELOAD: str(self._library), CONTROL: str(self._path)}

    @property
    def operations(self) -> int:
        """How many changes the buses have made."""
        return int(self._control.operations)

    @property
    def is_off(self) -> bool:
        return bool(self._control.off)

    @property
    def failures(self) -> int:
        """How many operations the current fault has made fail."""
        control = self._control
        past = int(control.error_matches - control.error_after)
        return max(0, min(past, int(control.error_count)))

    @property
    def fails(self) -> int:
        """Which operations fail, or failed before they were healed."""
        return int(self._control.error_mask)

    def end_before(
        self, operation: int, how: int, *, torn: bool = False, pattern: str = ""
    ) -> None:
        """End before the change of this number; `how`: a process, KILL_SELF or CUT_POWER.

        `torn` does half of it first if it is a write. With a `pattern` only changes of files whose
        path below the root matches count.
        """
        control = self._control
        control.end_at = control.end_matches = 0
        control.end_how = how
        control.end_torn = torn
        control.end_pattern = os.fsencode(pattern)
        control.end_at = operation if pattern else self.operations + operation

    def end_with(self, process: int) -> None:
        """End this process, too, when the bus ends."""
        self._control.end_how = process

    def cut_power(self) -> None:
        """From now on no change succeeds."""
        self._control.off = 1

    def go_on(self) -> None:
        """Cancel the planned end, unless it has happened."""
        self._control.end_at = 0

    def reset(self) -> None:
        """Switch the power on, and cancel the planned end."""
        self._control.off = self._control.end_at = 0

    def fail(
        self, error: int, operations: int, pattern: str, *, after: int = 0,
        count: int = 1 << 40, partial: bool = False,
    ) -> None:  # fmt: skip
        """Make `count` operations on matching paths fail, after `after` of them.

        `partial` makes the first write short instead.
        """
        control = self._control
        control.error = 0
        control.pattern = os.fsencode(pattern)
        control.error_mask = operations
        control.error_after, control.error_count, control.error_partial = after, count, partial
        control.error_matches = 0
        control.error = error

    def heal(self) -> None:
        self._control.error = 0

    def shift_clock(self, seconds: float) -> None:
        """Shift the bus's clock by this much from the real one."""
        self._control.clock_ns = round(seconds * 1e9)

    def forget(self) -> None:
        """Begin a new record."""
        self.log.write_bytes(b"")
        shutil.rmtree(self.graveyard, ignore_errors=True)
        self.graveyard.mkdir()
