"""EventPump: one thread, one event after another.

The rules:

1. A runnable, a listener call and a socket's readiness are events. One runs at a time, to its end.
2. Runnables run in the order they were posted. One that is posted by an event runs in a later turn,
   so that sockets and timers get theirs in between.
3. What an event leaves to be sent goes out when the turn is over, together: `at_turn_end`.
4. An event that raises is reported to its task, and the next one runs.
5. Only `Task.post` and `stop` may be called from elsewhere; all else asks `require_inside`.

The pump rides on an asyncio loop, its own (`run`) or one that is there (`run_in`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from polybus.errors import BusyError, UsageError
from polybus.queues.task import Runnable, Task

RUNNABLES_MAX = 1_000_000


class Closeable(Protocol):
    def close(self) -> None: ...


class EventPump:
    """Runs what tasks post to it until it is stopped, which is final.

    Attributes:
        inside: the thread that is in an event of this pump, 0 between events.
        current: the task the running event belongs to.
    """

    def __init__(self, *, runnables_max: int = RUNNABLES_MAX) -> None:
        self.inside = 0
        self.current = Task(self)
        self.local: Any = None
        """The in-process network of this pump's brokers, made by the first of them."""
        self._runnables: deque[tuple[Task, Runnable]] = deque()
        self._runnables_max = runnables_max
        self._turn_ends: list[tuple[Task, Runnable]] = []
        self._owned: list[Closeable] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._done: asyncio.Future[None] | None = None
        self._scheduled = False
        self._stopping = False

    # Starting and stopping

    def run(self) -> None:
        """Run until `stop`, on a loop of its own; start it last.

        Raises:
            UsageError: `queue.pump-running`, also for a pump that ran before.
        """
        if self._loop is not None:
            raise UsageError("queue.pump-running", "a pump runs once")
        # Sockets are watched for readiness, which the default loop of Windows cannot do.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            try:
                runner.run(self._run())
            finally:
                self._finish()

    async def _run(self) -> None:
        await self.run_in(asyncio.get_running_loop())

    def run_in(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Run on a loop beside whatever else it does; the future is done when the pump stopped.

        Call it in the loop's thread. The loop must be able to watch sockets (`add_reader`).

        Raises:
            UsageError: `queue.pump-running`, also for a pump that ran before.
        """
        if self._loop is not None:
            raise UsageError("queue.pump-running", "a pump runs once")
        self._done = loop.create_future()
        self._loop = loop
        self._scheduled = True
        loop.call_soon(self._turn)
        return self._done

    def stop(self) -> None:
        """End the pump after the running event; any thread may, also before it runs.

        Runnables still waiting are dropped, every port is unbound and every channel ends, without
        a word to the listeners of this process. Stopping twice changes nothing.
        """
        self._stopping = True
        if self._loop is not None:
            # A loop that is closed by now has ended the pump as well.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        self._stopping = True
        self._runnables.clear()
        self._turn_ends.clear()
        owned, self._owned = self._owned, []
        for resource in owned:
            resource.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    # Posting

    def post(self, task: Task, runnable: Runnable) -> None:
        if self._stopping:
            raise UsageError("queue.pump-stopped", "the pump is stopped")
        if len(self._runnables) >= self._runnables_max:
            text = f"{self._runnables_max} runnables wait already (runnables_max)"
            raise BusyError("queue.pump-full", text, retry_after_s=0.1)
        self.soon(task, runnable)

    def soon(self, task: Task, runnable: Runnable) -> None:
        """Post an event of the framework's own; whoever calls bounds how many there are."""
        self._runnables.append((task, runnable))
        # Inside an event there is nothing to wake: the turn's end looks for what is left.
        if not self._scheduled and self._loop is not None and get_ident() != self.inside:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._turn)

    def at_turn_end(self, task: Task, runnable: Runnable) -> None:
        """Run this when the events of this turn are done: to send what they left, in one go."""
        self._turn_ends.append((task, runnable))

    # Running events

    def require_inside(self) -> None:
        """Raises UsageError `queue.outside-pump` unless the caller is in an event of this pump."""
        if get_ident() != self.inside:
            text = "call this from a runnable posted with Task.post, or from a listener"
            raise UsageError("queue.outside-pump", text)

    def call(self, task: Task, event: Callable[..., object], *arguments: object) -> None:
        """Make a call that belongs to `task`: what it raises is reported there."""
        self.current = task
        try:
            event(*arguments)
        except Exception as error:
            task.report(error)

    def enter(self, task: Task, event: Runnable) -> None:
        """Run an event that the loop brought (a socket, a timer) as one of the pump's."""
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

    # What transports need

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop the pump runs on; only there while it runs."""
        if self._loop is None:
            raise UsageError("queue.pump-not-running", "the pump does not run yet")
        return self._loop

    def own(self, resource: Closeable) -> None:
        """Close `resource` when the pump stops."""
        self._owned.append(resource)
