"""The child processes of `polybus up`: how they start, restart and end.

The standard input of a child is a pipe from this process, and a child stops when it closes: so it
ends with this process even if that is killed. Each child is in a process group of its own: Ctrl-C
in the terminal reaches only us, and we end the children in the right order.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from polybus.cli.up.display import PlainDisplay
from polybus.config import NOT_SETTINGS
from polybus.services.pipeline_watch import ERROR_LINES_MAX

LAST_LINES = 8
LINE_BYTES_MAX = 1 << 20
RESTARTS_MAX = 5
STEADY_AFTER_S = 60.0
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 30.0
STOPPED = "stopped; Start on the page Pipelines of the console starts it again"


class Child:
    """One child process, restarted with exponential back-off if it ends by itself.

    The caller sets `ready` when the child has reported it, and it stays set. With `stays_stopped`,
    exit 0 means that another process has asked the child to stop, and it is not started again: then
    `stopped` is set.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        *,
        on_line: Callable[[str], None],
        screen: PlainDisplay,
        stays_stopped: bool = False,
    ) -> None:
        self.name = name
        self.stopped = False
        self._stays_stopped = stays_stopped
        self.exit_code: int | None = None
        self.ready = asyncio.Event()
        self._command = command
        self._on_line = on_line
        self._screen = screen
        self.error_lines: deque[str] = deque(maxlen=ERROR_LINES_MAX)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int:
        """The id of the process, or of the last one; 0 before the first."""
        return 0 if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep it running until `stop`, or until it has exited unexpectedly too often."""
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            await self._run_once()
            if self._stopping.is_set():
                return
            if self._stays_stopped and self.exit_code == 0:
                self.stopped = True
                self._screen.step(self.name, STOPPED, done=True)
                return
            failures = 1 if time.monotonic() - began > STEADY_AFTER_S else failures + 1
            if not self.ready.is_set() or failures > RESTARTS_MAX:
                self._screen.say(self._obituary())
                self._screen.step(self.name, "down")
                return
            pause_s = min(BACKOFF_FIRST_S * 2 ** (failures - 1), BACKOFF_MAX_S)
            self._screen.say(f"{self._obituary()}\n  starting it again in {pause_s:.0f} s")
            self._screen.step(self.name, "restarting")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def stop(self, *, timeout_s: float) -> None:
        """Ask it to end; kill it after the timeout."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            if self.ready.is_set():
                self._screen.say(f"{self.name} did not end within {timeout_s:.0f} s; killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill it and every process it started."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> None:
        # Without settings in the environment: the config file of the bus has them.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("POLYBUS_") or name in NOT_SETTINGS
        }
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            limit=LINE_BYTES_MAX,
            process_group=0,
        )
        assert process.stdout is not None and process.stderr is not None
        await asyncio.gather(
            _each_line(process.stdout, self._on_line), _each_line(process.stderr, self._keep_line)
        )
        self.exit_code = await process.wait()

    def _keep_line(self, line: str) -> None:
        if line.strip():
            self.error_lines.append(line)

    def _obituary(self) -> str:
        code = self.exit_code
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"exit {code}"
        last = "".join(f"\n  | {line}" for line in list(self.error_lines)[-LAST_LINES:])
        return f"{self.name} exited unexpectedly ({how}){last}"


async def _each_line(stream: asyncio.StreamReader, use: Callable[[str], None]) -> None:
    """Pass on each line, except lines over the limit."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            continue
        if not line:
            return
        use(line.decode(errors="replace").rstrip("\r\n"))
