"""The pool of query processes: started on demand, ended to stop a query.

If a query takes too long, is stopped, or its caller has disconnected, its process is killed. So a
query takes nothing from the bus except processor time.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from polybus.config import Queries
from polybus.errors import BusyError, PolybusError, StorageError, UsageError
from polybus.services.queries.jobs import END, ERROR, HEAD, Job, JobError, encode_job
from polybus.structs import decode

logger = logging.getLogger("polybus.queries")

MODULE = "polybus.services.queries.worker"
RETRY_S = 1.0
STOPPING = "the bus is stopping"
PIPE_BYTES = 1 << 16
KINDS = {"UsageError": UsageError, "StorageError": StorageError}
Answer = tuple[bytes, bytes]


class QueryProcess:
    """One query process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_stopped = False
        self.idle: asyncio.TimerHandle | None = None

    async def answers(self, job: Job) -> AsyncGenerator[Answer, None]:
        """Do a job. Raises PolybusError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(encode_job(job) + b"\n")
            await self._process.stdin.drain()
            while True:
                head = await self._process.stdout.readexactly(HEAD.size)
                kind, length = HEAD.unpack(head)
                content = await self._process.stdout.readexactly(length)
                if kind == END:
                    return
                if kind == ERROR:
                    raise _error(content)
                yield kind, content
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if self.is_stopped:
                raise UsageError("sql.stopped", "the query was stopped") from error
            text = "the process of the query ended; it may have needed more memory than allowed"
            raise UsageError("sql.too-large", f"{text} (queries.memory-bytes-max)") from error

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def kill(self) -> None:
        if self.idle is not None:
            self.idle.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def gone(self) -> None:
        """Wait until a killed process has ended."""
        assert self._process.stdout is not None
        # A pipe that no task reads stays open. If a task reads it, that ends by itself.
        with contextlib.suppress(RuntimeError):
            while await self._process.stdout.read(PIPE_BYTES):
                pass
        await self._process.wait()


def _error(content: bytes) -> PolybusError:
    failed = decode(content, JobError)
    return KINDS.get(failed.kind, UsageError)(failed.code, failed.text)


class QueryPool:
    """The query processes of one bus."""

    def __init__(
        self, data: Path, settings: Queries, loop: asyncio.AbstractEventLoop, *, is_readable: bool
    ) -> None:
        """`is_readable`: another process can read the log, in files or in Kafka."""
        self._data = data
        self._settings = settings
        self._loop = loop
        self.is_readable = is_readable
        self._idle: list[QueryProcess] = []
        self._busy: dict[QueryProcess, str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._starting = 0
        self._closed = False

    async def run(
        self, job: Job, *, time_s: float | None = None, name: str = ""
    ) -> AsyncGenerator[Answer, None]:
        """The answers of a job. `name` identifies it for `stop`.

        Raises:
            UsageError: `sql.too-slow`, `sql.stopped`, `sql.too-large`, `sql.engine-missing`, and
            errors of the job itself. StorageError: DuckDB, or the log, cannot read a file.
            BusyError: `sql.busy`.
        """
        limit_s = min(time_s or self._settings.time_s_max, self._settings.time_s_max)
        process = await self._taken(name)
        is_done = False
        try:
            async with (
                asyncio.timeout(limit_s),
                contextlib.aclosing(process.answers(job)) as answers,
            ):
                async for answer in answers:
                    yield answer
            is_done = True
        except TimeoutError as error:
            text = f"the query took longer than {limit_s:g} s (queries.time-s-max)"
            raise UsageError("sql.too-slow", text) from error
        except PolybusError as error:
            is_done = process.is_alive and error.code not in ("sql.stopped", "sql.too-large")
            raise
        finally:
            self._give_back(process, is_good=is_done)

    async def data(self, job: Job, *, time_s: float | None = None, name: str = "") -> bytes:
        """All data of a job's answer. Raises as `run` does."""
        pieces = [content async for _, content in self.run(job, time_s=time_s, name=name)]
        return b"".join(pieces)

    def stop(self, name: str) -> bool:
        """End the query of this name; return whether there was one."""
        for process, its_name in self._busy.items():
            if name and its_name == name:
                process.is_stopped = True
                process.kill()
                return True
        return False

    async def close(self) -> None:
        self._closed = True
        found = [*self._idle, *self._busy]
        self._idle = []
        for process in found:
            process.is_stopped = True
            process.kill()
        for process in found:
            await process.gone()
        if self._ending:
            await asyncio.wait(self._ending)

    async def _taken(self, name: str) -> QueryProcess:
        if not self.is_readable:
            text = "the messages are only in the memory of the bus: no query can read them"
            raise UsageError("sql.unavailable", text)
        if name and name in self._busy.values():
            raise UsageError("sql.id", "a query with this id is already running; choose another id")
        while self._idle:
            process = self._idle.pop()
            if process.idle is not None:
                process.idle.cancel()
            if process.is_alive:
                self._busy[process] = name
                return process
        if self._closed:
            raise StorageError("log.closed", STOPPING)
        if len(self._busy) + self._starting >= self._settings.workers_max:
            text = f"{len(self._busy)} queries are already running (queries.workers-max); try again"
            raise BusyError("sql.busy", text, retry_after_s=RETRY_S)
        self._starting += 1
        try:
            process = await self._start()
        finally:
            self._starting -= 1
        if self._closed:
            process.kill()
            raise StorageError("log.closed", STOPPING)
        self._busy[process] = name
        return process

    async def _start(self) -> QueryProcess:
        memory = str(self._settings.memory_bytes_max)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            *("--data", str(self._data), "--memory-bytes", memory),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        return QueryProcess(started)

    def _give_back(self, process: QueryProcess, *, is_good: bool) -> None:
        self._busy.pop(process, None)
        if not is_good or self._closed or not process.is_alive:
            self._end(process)
            return
        process.idle = self._loop.call_later(self._settings.idle_s, self._end_idle, process)
        self._idle.append(process)

    def _end_idle(self, process: QueryProcess) -> None:
        if process in self._idle:
            self._idle.remove(process)
        self._end(process)

    def _end(self, process: QueryProcess) -> None:
        process.kill()
        ending = self._loop.create_task(process.gone())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
