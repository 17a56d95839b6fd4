"""The pipeline of a data folder, as the bus sees it: its status, its last batches, start and stop.

The driver is a process of its own (spark/pipelines/running), which writes status.json each second
and answers on a socket, which an edge opens. Nothing here imports Spark. A driver that was started
here ends with the bus; one that `polybus up` or `polybus pipeline run` started is watched and can
be stopped in the same way. A stopped driver stays stopped: none of them restarts it.

A driver that was started here may end before it has written a status, and is `starting` until then.
The standard error of one started by `polybus up` is in errors.json, which `polybus up` writes.
"""

import asyncio
import contextlib
import datetime
import functools
import importlib.util
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from polybus.errors import UsageError
from polybus.lake.folders import name_in, table_folders
from polybus.processes import is_alive
from polybus.structs import convert, decode

COMMAND = (sys.executable, "-m", "polybus.spark.pipelines.running.driver")
DRIVER_VARIABLE = "POLYBUS_SPARK_DRIVER"
"""Another program to run as the driver, for tests."""
LINES_MAX = 200
LINE_CHARACTERS_MAX = 1000
LINE_BYTES_MAX = 1 << 20
ERROR_LINES_MAX = 50
STOP_S = 15.0
POLL_S = 0.1


class FlowExpectation(msgspec.Struct):
    """How many rows met an expectation since the flow started, and how many did not."""

    name: str
    topic: str = ""
    consequence: str = ""
    passed: int = 0
    failed: int = 0


class FlowReport(msgspec.Struct, rename="kebab", omit_defaults=True, kw_only=True):
    """A flow as its driver reports it.

    `rows` counts the rows that a stream has read since the flow started, or those of a view;
    `batch-rows` is that of the last batch; `running-batch` has begun `running-s` ago. `inputs` and
    `outputs` are ids of nodes of the graph: `topic:orders`, `table:silver`; an id that ends with
    `*` means all with this prefix.
    """

    pipeline: str
    flow: str
    state: str = ""
    rows: int | None = None
    rows_per_s: float = 0.0
    lag: int | None = None
    batch_id: int | None = None
    batch_ms: int | None = None
    batch_rows: int | None = None
    running_batch: int | None = None
    running_s: float | None = None
    error: str | None = None
    warning: str | None = None
    expectations: list[FlowExpectation] = []
    inputs: list[str] = []
    outputs: list[str] = []


class PipelineRun(msgspec.Struct):
    """A batch of a flow that has ended, and its rows."""

    pipeline: str
    flow: str
    batch: int
    time: str
    rows: int | None
    ms: int | None


class PipelineView(msgspec.Struct, rename="kebab", kw_only=True):
    """The pipeline now (`starting`, `running`), or how it ended; `never`: none ran on this folder,
    `unknown`: its status cannot be read.

    `runs` are the last batches, newest first: at most one per second and flow. `log` has the last
    lines of the driver. `problems` says why it failed.
    """

    state: str = "never"
    time: str = ""
    pid: int = 0
    master: str = ""
    uptime_s: float = 0.0
    problems: list[str] = []
    flows: list[FlowReport] = []
    runs: list[PipelineRun] = []
    log: list[str] = []
    actions: list[str] = []


class DriverStatus(msgspec.Struct):
    """The internal part of a driver's status: its address, and how it was started."""

    pid: int = 0
    socket: str = ""
    master: str = ""
    pipelines: str = ""


class DriverErrors(msgspec.Struct):
    """The last lines that the driver of `polybus up` has written to standard error."""

    pid: int
    lines: list[str]


class PipelineWatch:
    """The pipeline of one bus."""

    def __init__(self, data: Path) -> None:
        self._folder = data / "pipeline"
        self._data = data
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._process: asyncio.subprocess.Process | None = None
        # Identifies the status at the start: until it changes, the new driver has written none.
        self._status_before = (0, "")
        self._is_asked_to_end = False
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def look(self) -> PipelineView:
        """The pipeline now."""
        view, status = await asyncio.to_thread(self._status)
        ours = self._process
        if ours is not None and (view.pid, view.time) == self._status_before:
            self._show_unwritten(view, ours)
        elif view.state in ("starting", "running") and not is_alive(view.pid):
            view.state = "failed"
            view.problems = [*view.problems, f"the process {view.pid} has ended unexpectedly"]
        view.runs.reverse()
        if ours is not None and ours.pid == view.pid:
            view.log = list(self._lines)
            if view.state == "failed" and ours.returncode is not None:
                text = f"the driver ended with exit code {ours.returncode}"
                view.problems = [*view.problems, text]
        view.log = view.log[-LINES_MAX:]
        if view.state in ("starting", "running"):
            view.actions = ["stop"]
        elif has_spark():
            view.actions = ["start", "refresh"] if status.pipelines else ["start"]
        return view

    def _show_unwritten(self, view: PipelineView, ours: asyncio.subprocess.Process) -> None:
        """Show a driver that has not written its status; the existing one is that of the last
        driver.
        """
        view.state, view.pid, view.problems, view.flows = "starting", ours.pid, [], []
        if ours.returncode is not None and self._is_asked_to_end:
            view.state = "stopped"
        elif ours.returncode is not None:
            view.state = "failed"
            last = f": {self._lines[-1]}" if self._lines else ""
            view.problems = [f"the driver ended before it was ready{last}"]

    def _status(self) -> tuple[PipelineView, DriverStatus]:
        """The last status of the driver. May block."""
        try:
            found = msgspec.json.decode((self._folder / "status.json").read_bytes())
            found["flows"] = [_kebab(flow) for flow in found.get("flows", [])]
            view = convert(found, PipelineView, strict=False)
            view.log = [*view.log, *self._errors(view.pid)]
            return view, convert(found, DriverStatus)
        except (FileNotFoundError, ValueError, AttributeError, TypeError, RecursionError):
            # Missing or damaged: JSON of any other shape.
            return PipelineView(), DriverStatus()
        except OSError as error:
            problem = f"cannot read the status of the pipeline: {error.strerror}"
            return PipelineView(state="unknown", problems=[problem]), DriverStatus()

    def _errors(self, pid: int) -> list[str]:
        with contextlib.suppress(OSError, ValueError):
            found = decode(errors_path(self._data).read_bytes(), DriverErrors)
            if found.pid == pid:
                return [line[:LINE_CHARACTERS_MAX] for line in found.lines]
        return []

    # Changing

    async def end_unwritten(self) -> bool:
        """End the driver that was started here, if it has no socket yet; return whether there was
        one.
        """
        view, _ = await asyncio.to_thread(self._status)
        ours = self._process
        is_unwritten = (view.pid, view.time) == self._status_before
        if ours is None or ours.returncode is not None or not is_unwritten:
            return False
        self._is_asked_to_end = True
        with contextlib.suppress(ProcessLookupError):
            ours.terminate()
        return True

    async def running(self) -> DriverStatus:
        """The driver that runs or starts now. Raises UsageError `pipeline.not-running`."""
        view, status = await asyncio.to_thread(self._status)
        if view.state not in ("starting", "running") or not is_alive(view.pid):
            raise UsageError("pipeline.not-running", "no pipeline runs on this data folder")
        return status

    async def start(self) -> None:
        """Start a driver with the master and pipelines of the last one; it ends with the bus.

        Raises UsageError `pipeline.running`, `spark.no-pyspark`.
        """
        async with self._starting:
            _, status = await asyncio.to_thread(self._status)
            known = await asyncio.to_thread(Path(status.pipelines).is_dir)
            folder = ["--pipelines", status.pipelines] if status.pipelines and known else []
            await self._start(status, folder)

    async def refresh(self, table: str, *, reset: bool) -> None:
        """Run the flows into a table of the user's pipelines once; with `reset`, from the start.

        Raises UsageError `pipeline.running`, `pipeline.folder`, `pipeline.unknown`,
        `spark.no-pyspark`.
        """
        async with self._starting:
            _, status = await asyncio.to_thread(self._status)
            if not status.pipelines or not await asyncio.to_thread(Path(status.pipelines).is_dir):
                text = "the bus knows no folder of pipelines yet: run polybus pipeline run once"
                raise UsageError("pipeline.folder", text)
            tables = map(name_in, await asyncio.to_thread(table_folders, self._data))
            if table not in tables:
                raise UsageError("pipeline.unknown", f"there is no table {table[:100]!r}")
            once = ["--once", "--no-standard", "--pipelines", status.pipelines]
            again = [f"--reset={table}"] if reset else []
            await self._start(status, [*once, f"--refresh={table}", *again])

    async def _start(self, last: DriverStatus, more: list[str]) -> None:
        view = await self.look()
        if view.state in ("starting", "running"):
            text = f"a pipeline is {view.state} on this data folder already"
            raise UsageError("pipeline.running", text)
        if not has_spark():
            text = "PySpark is not installed where the bus runs: pip install 'polybus[spark]'"
            raise UsageError("spark.no-pyspark", text)
        await self._last_ended(last.pid)
        master = ["--master", last.master] if last.master else []
        view, _ = await asyncio.to_thread(self._status)
        process = await asyncio.create_subprocess_exec(
            *driver_command(),
            *("--data", str(self._data), *master, *more),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_BYTES_MAX,
        )
        self._process, self._status_before = process, (view.pid, view.time)
        self._is_asked_to_end = False
        self._lines.clear()
        self._reading = asyncio.get_running_loop().create_task(self._read(process))

    async def _last_ended(self, pid: int) -> None:
        """Wait for the last driver: it writes its final status before Spark and its lock end.

        Raises UsageError `pipeline.running` if the one that was started here does not end.
        """
        ours = self._process
        # Another program may have its process id by now, so do not wait forever.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                if ours is not None and ours.pid == pid:
                    await ours.wait()
                while pid and is_alive(pid):  # noqa: ASYNC110 - not a child of this process
                    await asyncio.sleep(POLL_S)
        if ours is not None and ours.returncode is None:
            text = "a pipeline has just been started, or is still stopping"
            raise UsageError("pipeline.running", text)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Keep the driver's output, without its figures of each second."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                continue
            if not line:
                break
            text = line.decode(errors="replace").rstrip()
            if text and '"event":"progress"' not in text:
                self._lines.append(_shown(text)[:LINE_CHARACTERS_MAX])
        await process.wait()

    async def close(self) -> None:
        """End the driver that was started here."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def event_line(event: dict[str, Any]) -> str:
    """An event of a driver as a line of text, with the current time."""
    now = datetime.datetime.now(datetime.UTC).strftime("%H:%M:%SZ")
    about = [str(event[one]) for one in ("flow", "pipeline", "text") if event.get(one)]
    if isinstance(event.get("flows"), int):
        about.append(f"{event.get('seconds')} s, flows: {event['flows']}")
    return f"{now} {event['event']}: {' '.join(about)}".removesuffix(": ")


def _shown(line: str) -> str:
    with contextlib.suppress(ValueError, RecursionError):
        event = msgspec.json.decode(line)
        if isinstance(event, dict) and "event" in event:
            return event_line(event)
    return line


def errors_path(data: Path) -> Path:
    return data / "pipeline" / "errors.json"


def write_errors(data: Path, pid: int, lines: list[str]) -> None:
    """Replace errors.json. Raises OSError."""
    path = errors_path(data)
    temporary = path.with_name(f"{path.name}.tmp")
    # `polybus up` has the umask of its user, not that of the folder.
    temporary.touch(mode=path.parent.stat().st_mode & 0o666)
    temporary.write_bytes(msgspec.json.encode(DriverErrors(pid, lines)))
    temporary.rename(path)


def driver_command() -> list[str]:
    """The command that runs a driver, without its options."""
    other = os.environ.get(DRIVER_VARIABLE)
    return [*COMMAND] if other is None else [sys.executable, other]


@functools.cache
def has_spark() -> bool:
    """Whether PySpark is installed; checked once per run of the bus."""
    return importlib.util.find_spec("pyspark") is not None


def _kebab(flow: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in flow.items()}
