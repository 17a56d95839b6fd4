"""One process of a bus, on one thread and in virtual time, for model checkers (model_kit.py).

The loop, the committer and what the services do on threads of their own take turns. So the same
steps write the same things in the same order. `log_delay_s` and `state_delay_s` say how long the
journal and state.db take, so that each can be ahead of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sqlite3
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.errors import StorageError
from polybus.log import files
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.interface import LogCallbacks
from polybus.log.journal.committer import RETRY_S, Committer
from polybus.services.accounts.accounts import Accounts
from polybus.services.accounts.store import AccountStore
from polybus.services.context import Context, Durability
from polybus.services.events import EventRecorder
from polybus.services.memory import MemoryGate
from polybus.services.services import Services
from polybus.testing import ManualClock

TOPICS = ("a", "b", "c")
COMMIT_DELAY_S = 0.005
THREAD_S = 0.0001
"""How long other threads than that of state.db take."""
TURNS_MAX = 100_000


class PowerOff(BaseException):
    """No write happens any more. Not an Exception: nothing in the bus may handle it."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop without a clock, sockets and threads: time is where the next timer is."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self.now_s = 1000.0
        self.state_delay_s = THREAD_S
        self.turns = 0

    def time(self) -> float:
        return self.now_s

    def select(self, timeout: float | None) -> list[Any]:
        self.turns += 1
        assert timeout is not None, "everything waits for something that never comes"
        assert self.turns < TURNS_MAX, "something goes round in circles"
        self.now_s += max(0.0, timeout)
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """In the order of the calls for each kind of thread, as a pool of one thread does it."""
        future = self.create_future()
        name = getattr(executor, "_thread_name_prefix", "")
        delay_s = self.state_delay_s if name == "polybus-state" else THREAD_S

        def work() -> None:
            try:
                result = func(*arguments)
            except PowerOff:
                self.stop()
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(delay_s, work)
        return future


class SteppedCommitter(Committer):
    """The committer without its thread: it works when a timer of the loop says so."""

    loop: VirtualLoop
    delay_s = 0.0

    def start(self, next_commit: int, live: Any) -> None:
        self._commit = next_commit
        self._writer = live or self._begin_segment()

    def append(self, batches: list[Batch], urgent: bool) -> int:
        ticket = super().append(batches, urgent)
        self.loop.call_later(self.delay_s + (0 if urgent else COMMIT_DELAY_S), self._step)
        return ticket

    def _gather(self) -> None:
        """What is queued waits for the loop's timer alone."""

    def _step(self) -> None:
        try:
            self._round()
        except PowerOff:
            self.loop.stop()

    def _fail(self, failure: StorageError) -> None:
        super()._fail(failure)
        self.loop.call_later(RETRY_S, self._step)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._round()
            if self.failure is not None:
                raise self.failure.copy()

    def close(self) -> None:
        self.sync()
        self.release()

    def release(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Life:
    """One process of the bus."""

    services: Services
    bus: Bus
    log: FileLog
    context: Context

    def __init__(self, data: Path, config: Config, clock: ManualClock, loop: VirtualLoop) -> None:
        self.data = data
        self._config = msgspec.structs.replace(config, data=str(data))
        self._clock = clock
        self.loop = loop

    async def start(self) -> None:
        loop = self.loop
        make = functools.partial(_committer, loop)
        callbacks = LogCallbacks(
            on_durable=lambda one: self._soon("on_durable", one),
            on_failed=lambda one: self._soon("on_failed", one),
            held_from=lambda topic: self.services.consumers.held_from(topic),
        )
        module: Any = files
        original, module.DirectCommitter = module.DirectCommitter, make
        try:
            self.log = FileLog(
                self.data,
                durability="fsync",
                journal=self._config.journal,
                retention=self._config.retention,
                clock=self._clock,
                callbacks=callbacks,
                maintenance=False,
            )
        finally:
            module.DirectCommitter = original
        self.bus = bus = Bus(self.log, clock_us=self._clock)
        self.context = Context(
            bus=bus,
            config=self._config,
            loop=loop,
            clock_us=self._clock,
            memory=MemoryGate(self.log, loop, bytes_max=1 << 30),
            durability=Durability(bus),
            events=EventRecorder(bus, loop, self._clock, enabled=False),
        )
        accounts = Accounts(AccountStore(self.data), bus, self._config, loop)
        self.access = accounts.default
        self.services = Services(self.context, accounts)
        await self.services.start()

    def _soon(self, name: str, news: Any) -> None:
        self.loop.call_soon(getattr(self.context.durability, name), news)

    async def stop(self) -> None:
        """As a bus stops."""
        self.services.inboxes.stop()
        await self.services.close()
        self.log.close()

    def maintain(self) -> None:
        """Seal the journal, hand it over to the history, and remove what is too old or too much."""
        self.log.seal()
        done = hand_over(self.data, grace_s=0.0, retention_bytes=self._config.retention.bytes)
        self.log.after_handover(done)
        self.log.apply_retention(self._clock())

    def set_log_delay(self, seconds: float) -> None:
        journal: Any = self.log._journal
        journal.delay_s = seconds

    def release(self) -> None:
        """Close the files of a life that is over."""
        if hasattr(self, "services"):
            # A stop has closed it already.
            with contextlib.suppress(sqlite3.ProgrammingError):
                self.services.state._close()
        if hasattr(self, "log"):
            journal: Any = self.log._journal
            journal.release()
            self.log._lock.release()


def _committer(loop: VirtualLoop, *arguments: Any, **named: Any) -> SteppedCommitter:
    made = SteppedCommitter(*arguments, **named)
    made.loop = loop
    return made
