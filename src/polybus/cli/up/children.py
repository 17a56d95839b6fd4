"""The processes under `polybus up`: started, listened to, restarted, and ended with their parent.

A child has a pipe from us as its standard input and stops when that closes, so it ends with us
even when we are killed. It is in a process group of its own: Ctrl-C in the terminal reaches only
us, and we end the children in the right order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from polybus.config import NOT_SETTINGS

LAST_LINES = 8
LINE_BYTES_MAX = 1 << 20
RESTARTS_MAX = 5
STEADY_AFTER_S = 60.0
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
State = Literal["starting", "ready", "restarting", "down", "stopped"]


class Child:
    """One child process, started again with growing pauses if it dies.

    Attributes:
        state: `down` is for good; the user has been told.
        last_lines: the last it said on standard error.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        *,
        on_line: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.exit_code: int | None = None
        self.was_ready = False
        self.hopeless = False
        self._command = command
        self._on_line = on_line
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._changed = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ready(self) -> None:
        """The child said that it is."""
        self.was_ready = True
        self._set("ready")

    async def until_settled(self) -> None:
        """Wait until it is ready, or down for good."""
        while self.state in ("starting", "restarting"):
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Keep it running until `stop`, or until it died too often."""
        failures = 0
        while not self._stopping:
            began = time.monotonic()
            await self._run_once()
            if self._stopping:
                break
            failures = 1 if time.monotonic() - began > STEADY_AFTER_S else failures + 1
            if self.hopeless or not self.was_ready or failures > RESTARTS_MAX:
                self._say(self._obituary())
                self._set("down")
                return
            pause_s = min(BACKOFF_FIRST_S * 2 ** (failures - 1), BACKOFF_MAX_S)
            self._say(f"{self._obituary()}\n  starting it again in {pause_s:.0f} s")
            self._set("restarting")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._until_stopping(), pause_s)
        self._set("stopped")

    async def stop(self, *, timeout_s: float) -> None:
        """Ask it to end, and after the timeout make it."""
        self._stopping = True
        self._changed.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self._say(f"{self.name} did not end within {timeout_s:.0f} s; killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it and whatever it started, at once."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
            limit=LINE_BYTES_MAX,
            process_group=0,
        )
        assert process.stdout is not None and process.stderr is not None
        await asyncio.gather(
            _each_line(process.stdout, self._heard), _each_line(process.stderr, self._complained)
        )
        self.exit_code = await process.wait()

    async def _until_stopping(self) -> None:
        while not self._stopping:
            self._changed.clear()
            await self._changed.wait()

    def _heard(self, line: str) -> None:
        self._on_line(line)

    def _complained(self, line: str) -> None:
        if line.strip():
            self.last_lines.append(line)

    def _obituary(self) -> str:
        code = self.exit_code
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exit {code}"
        last = "".join(f"\n  | {line}" for line in self.last_lines)
        return f"{self.name} ended by itself ({how}){last}"

    def _set(self, state: State) -> None:
        self.state = state
        self._changed.set()


def _environment() -> dict[str, str]:
    """Without settings: ours are in the config file already, with what we changed of them."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("POLYBUS_") or name in NOT_SETTINGS
    }


async def _each_line(stream: asyncio.StreamReader, use: Callable[[str], None]) -> None:
    """Hand over each line; one that is over the limit is dropped, not the stream."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        use(line.decode(errors="replace").rstrip("\r\n"))
