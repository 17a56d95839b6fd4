"""Redrives: dead letters that are published again on a request over HTTP.

`polybus replay --dead-letters` does the work, in its own process: it publishes each message once,
even if a run is interrupted, and limits its rate. This module knows who asked, the progress, and
how to stop it. The last REDRIVES_MAX are kept while the bus runs; `$audit` has all.

The process isolates the bus: a redrive reads Parquet files and large payloads, may take hours, and
may be killed. It takes no memory of the bus and no time of its thread. And the same program does it
for users and for the bus. This layer imports no command. It depends only on the command's public
interface: its options and the lines of its `--json`.
"""

import asyncio
import contextlib
import secrets
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polybus.errors import PolybusError, UsageError
from polybus.services.audit import AuditLog
from polybus.services.context import Context
from polybus.services.events import UndeliveredRange, iso_time

REDRIVES_MAX = 100
LINE_BYTES_MAX = 1 << 20
ERROR_CHARACTERS_MAX = 500
STOP_S = 10.0


class Redrive(msgspec.Struct, rename="kebab", kw_only=True):
    """Dead letters that are published again to their topics, and the progress."""

    id: str
    state: str = "planned"
    dry_run: bool = False
    by: str
    started: str
    ended: str | None = None
    messages: int
    published: int = 0
    topics: dict[str, int]
    rate: float | None = None
    error: str = ""


class RedriveRun(NamedTuple):
    """One process: its arguments, and the lines of its input."""

    arguments: Sequence[str]
    lines: Sequence[str] = ()


def run_of_letters(filters: dict[str, str], letters: Sequence[str]) -> RedriveRun:
    """Publish the dead letters that match the filters, or named ones, to their topics again."""
    arguments = ["--dead-letters", "--progress"]
    arguments += [f"--{name}={value}" for name, value in filters.items()]
    return RedriveRun([*arguments, *(["--letters=-"] if letters else [])], letters)


def run_of_ranges(ranges: Iterable[UndeliveredRange]) -> RedriveRun:
    """Publish messages of the log to their topics again."""
    places = [f"{one.topic}:{one.epoch}:{one.first}:{one.stop}" for one in ranges]
    return RedriveRun(["--ranges=-", "--progress", "--speed=max"], places)


class Redrives:
    """The redrives of one bus: one at a time."""

    def __init__(self, context: Context, audit: AuditLog, data: Path) -> None:
        self._context = context
        self._audit = audit
        self._data = data
        self._known: deque[Redrive] = deque(maxlen=REDRIVES_MAX)
        # Dry runs have an id too, so that their result can be read again.
        self._planned: deque[Redrive] = deque(maxlen=REDRIVES_MAX)
        self._running: tuple[Redrive, asyncio.Task[None]] | None = None
        self._process: asyncio.subprocess.Process | None = None

    def all(self) -> list[Redrive]:
        """The newest first, without dry runs."""
        return list(reversed(self._known))

    def get(self, name: str) -> Redrive:
        """Raises UsageError `replay.unknown`."""
        for one in (*self._known, *self._planned):
            if one.id == name:
                return one
        text = f"replay {name[:40]!r} is unknown; the bus remembers the last {REDRIVES_MAX}"
        raise UsageError("replay.unknown", text)

    def plan(self, who: tuple[str, str], topics: dict[str, int], rate: float | None) -> Redrive:
        """Create a redrive that is not started: a dry run until then."""
        redrive = Redrive(
            id=secrets.token_hex(8),
            by=who[0],
            started=iso_time(self._context.clock_us()),
            messages=sum(topics.values()),
            topics=topics,
            rate=rate,
        )
        self._planned.append(redrive)
        return redrive

    def start(
        self, redrive: Redrive, who: tuple[str, str], runs: AsyncIterator[RedriveRun]
    ) -> None:
        """Begin a redrive, one run after the other. Raises UsageError `replay.running`."""
        if self._running is not None and not self._running[1].done():
            text = f"replay {self._running[0].id} is running: wait for it, or stop it"
            raise UsageError("replay.running", text)
        redrive.state = "running"
        self._process = None
        self._planned.remove(redrive)
        self._known.append(redrive)
        task = self._context.loop.create_task(self._run(redrive, who, runs))
        self._running = redrive, task

    def stop(self, name: str) -> bool:
        """Stop a redrive after its current part; return whether it was running.

        Raises UsageError `replay.unknown`.
        """
        redrive = self.get(name)
        if redrive.state != "running":
            return False
        redrive.state = "stopped"
        self._end_process(signal.SIGTERM)
        return True

    def _end_process(self, how: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(how)

    async def close(self) -> None:
        """End the running redrive; the messages that it published are recorded."""
        if self._running is None:
            return
        redrive, task = self._running
        self.stop(redrive.id)
        _, late = await asyncio.wait([task], timeout=STOP_S)
        if late:
            self._end_process(signal.SIGKILL)
            await asyncio.wait([task])

    async def _run(
        self, redrive: Redrive, who: tuple[str, str], runs: AsyncIterator[RedriveRun]
    ) -> None:
        try:
            async for run in runs:
                if redrive.state == "running":
                    await self._replay(redrive, run, redrive.published)
                if redrive.state != "running":
                    break
            if redrive.state == "running":
                redrive.state = "done"
        except (OSError, ValueError, PolybusError) as error:
            # It could not be started, reported unreadable input, or the next run was not found.
            self._end_process(signal.SIGKILL)
            if redrive.state == "running":
                redrive.state, redrive.error = "failed", str(error)[:ERROR_CHARACTERS_MAX]
        redrive.ended = iso_time(self._context.clock_us())
        detail = {"published": redrive.published, "state": redrive.state, "error": redrive.error}
        with contextlib.suppress(PolybusError):
            self._audit.append(who, "replay-end", redrive.id, detail)

    async def _replay(self, redrive: Redrive, run: RedriveRun, before: int) -> None:
        command = [sys.executable, "-m", "polybus.cli", "replay", "--json", f"--data={self._data}"]
        if redrive.rate is not None:
            command.append(f"--rate={redrive.rate:g}/s")
        command += run.arguments
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
        )
        if redrive.state == "stopped":
            # `stop` was called before the process existed, so the process got no signal.
            self._end_process(signal.SIGTERM)
        errors, _ = await asyncio.gather(
            _feed(process, run.lines), _follow(process, redrive, before)
        )
        await process.wait()
        if redrive.state == "running" and process.returncode != 0:
            redrive.state, redrive.error = "failed", errors


async def _feed(process: asyncio.subprocess.Process, lines: Sequence[str]) -> str:
    """Send the process its list; return the end of what it writes to standard error."""
    assert process.stdin is not None and process.stderr is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write("\n".join(lines).encode())
        process.stdin.close()
    said = b""
    while some := await process.stderr.read(ERROR_CHARACTERS_MAX):
        said = (said + some)[-ERROR_CHARACTERS_MAX:]
    return said.decode(errors="replace").strip()


async def _follow(process: asyncio.subprocess.Process, redrive: Redrive, before: int) -> None:
    """Record the progress that the process reports, after each part or at its end."""
    assert process.stdout is not None
    async for line in process.stdout:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            said: Any = msgspec.json.decode(line)
            done = said.get("published", said.get("messages")) if isinstance(said, dict) else None
            if isinstance(done, int):
                redrive.published = before + done
