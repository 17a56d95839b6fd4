"""EventPump: one thread that runs one event at a time. Task: who posts events and handles errors.

The rules:

1. A runnable, a listener call and a ready socket are events. One event runs at a time, to its end.
2. Runnables run in the order they were posted. A runnable posted by an event runs in a later turn,
   so that sockets and timers are served in between.
3. Output of an event is flushed when the turn ends, in one write: `at_turn_end`.
4. An exception is reported to the event's task, and the next event runs.
5. Only `Task.post` and `stop` may be called from outside; all other calls use `require_inside`.

The pump runs on an asyncio loop: its own (`run`) or an existing one (`run_in`).
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

from polybus.errors import BusyError, UsageError

RUNNABLES_MAX = 1_000_000
Runnable = Callable[[], object]
ErrorHandler = Callable[[Exception], object]

logger = logging.getLogger("polybus.queues")


class Task:
    """Owns the runnables it posts and every event that follows from them.

    A listener belongs to the task in whose event it was set. An exception of a runnable or listener
    goes to `on_error`, by default to the log, and the pump continues.
    """

    def __init__(self, pump: "EventPump", on_error: ErrorHandler | None = None) -> None:
        self.pump = pump
        self._on_error = on_error

    def post(self, runnable: Runnable) -> None:
        """Have the pump call `runnable` after everything posted before it. Thread-safe.

        Raises:
            UsageError: `queue.pump-stopped`.
            BusyError: `queue.pump-full`; nothing was posted.
        """
        self.pump.post(self, runnable)

    def report(self, error: Exception) -> None:
        """Pass an error to the task's handler; never raises."""
        if self._on_error is not None:
            try:
                self._on_error(error)
                return
            except Exception as worse:
                worse.__context__ = error
                error = worse
        logger.error("an event failed: %s", error, exc_info=error)


class EventPump:
    """Runs posted runnables until it is stopped. A stopped pump cannot run again.

    Attributes:
        inside: the id of the thread that runs an event of this pump, 0 between events.
        current: the task of the running event.
    """

    def __init__(self, *, runnables_max: int = RUNNABLES_MAX) -> None:
        self.inside = 0
        self.current = Task(self)
        self.local: Any = None
        """The in-process transport of this pump's brokers; the first broker creates it."""
        self._runnables: deque[tuple[Task, Runnable]] = deque()
        self._runnables_max = runnables_max
        self._turn_ends: list[tuple[Task, Runnable]] = []
        self._closers: list[Runnable] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: asyncio.Future[None] | None = None
        self._scheduled = False
        self._stopping = False

    # Starting and stopping

    def run(self) -> None:
        """Run on a new loop until `stop`. Blocks, so call it last.

        Raises:
            UsageError: `queue.pump-running`, the pump runs or has run before.
        """
        # The default loop of Windows cannot watch sockets for readiness.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        done = self.run_in(asyncio.get_running_loop())
        try:
            await done
        finally:
            self._finish()

    def run_in(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Run on an existing loop; the future is done when the pump has stopped.

        Call it in the loop's thread. The loop must support `add_reader`.

        Raises:
            UsageError: `queue.pump-running`, the pump runs or has run before.
        """
        if self._loop is not None:
            raise UsageError("queue.pump-running", "a pump runs once; create a new EventPump")
        self._done = loop.create_future()
        self._loop = loop
        self._scheduled = True
        loop.call_soon(self._turn)
        return self._done

    def stop(self) -> None:
        """Stop after the running event. Thread-safe; may be called before `run`, and twice.

        Drops waiting runnables, unbinds every port and ends every channel. Listeners of this
        process are not called.
        """
        self._stopping = True
        if self._loop is not None:
            # A loop that is already closed has ended the pump too.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self._stopping = True
        self._runnables.clear()
        self._turn_ends.clear()
        closers, self._closers = self._closers, []
        for close in closers:
            close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # Posting

    def post(self, task: Task, runnable: Runnable) -> None:
        if self._stopping:
            raise UsageError("queue.pump-stopped", "the pump is stopped")
        if len(self._runnables) >= self._runnables_max:
            text = f"{self._runnables_max} runnables are already waiting (runnables_max)"
            raise BusyError("queue.pump-full", text, retry_after_s=0.1)
        self.soon(task, runnable)

    def soon(self, task: Task, runnable: Runnable) -> None:
        """Post an event of the framework; the caller limits how many there are."""
        self._runnables.append((task, runnable))
        # Inside an event the loop is awake, and `_end_turn` schedules what is left.
        if not self._scheduled and self._loop is not None and get_ident() != self.inside:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._turn)

    def at_turn_end(self, task: Task, runnable: Runnable) -> None:
        """Run this after the events of this turn, to flush their output in one write."""
        self._turn_ends.append((task, runnable))

    # Running events

    def require_inside(self) -> None:
        """Raise UsageError `queue.outside-pump` unless the caller runs in an event of this pump."""
        if get_ident() != self.inside:
            text = "call this from a runnable posted with Task.post, or from a listener"
            raise UsageError("queue.outside-pump", text)

    def call(self, task: Task, event: Callable[..., object], *arguments: object) -> None:
        """Make a call that belongs to `task`, and report its exceptions there."""
        self.current = task
        try:
            event(*arguments)
        except Exception as error:
            task.report(error)

    def enter(self, task: Task, event: Runnable) -> None:
        """Run a callback of the loop (a ready socket, a timer) as an event of the pump."""
        if self._stopping:
            return
        self.inside = get_ident()
        try:
            self.call(task, event)
            self._end_turn()
        finally:
            self.inside = 0

    def _turn(self) -> None:
        self._scheduled = False
        if self._stopping:
            self._finish()
            return
        self.inside = get_ident()
        try:
            for _ in range(len(self._runnables)):
                task, runnable = self._runnables.popleft()
                self.call(task, runnable)
                if self._stopping:
                    return
            self._end_turn()
        finally:
            self.inside = 0

    def _end_turn(self) -> None:
        turn_ends, self._turn_ends = self._turn_ends, []
        for task, runnable in turn_ends:
            self.call(task, runnable)
        if (self._runnables or self._turn_ends) and not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._turn)

    # For transports

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of a running pump."""
        if self._loop is None:
            raise UsageError("queue.pump-not-running", "the pump is not running; call run first")
        return self._loop

    def at_stop(self, close: Runnable) -> None:
        """Call `close` when the pump stops."""
        self._closers.append(close)
