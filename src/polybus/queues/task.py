"""Task: who posts runnables to a pump, and who hears of it when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.queues.pump import EventPump

Runnable = Callable[[], object]
ErrorHandler = Callable[[Exception], object]

logger = logging.getLogger("polybus.queues")


class Task:
    """A thread of events, as it were: all that follows from what it posted belongs to it.

    A listener belongs to the task in whose runnable it was given. What a runnable or listener
    raises goes to `on_error`, by default to the log, and the pump goes on.
    """

    def __init__(self, pump: EventPump, on_error: ErrorHandler | None = None) -> None:
        self.pump = pump
        self._on_error = on_error

    def post(self, runnable: Runnable) -> None:
        """Have the pump call `runnable` after everything posted before it. Any thread may.

        Raises:
            UsageError: `queue.pump-stopped`.
            BusyError: `queue.pump-full`; nothing was posted.
        """
        self.pump.post(self, runnable)

    def report(self, error: Exception) -> None:
        """Hand an error to the task's handler; never raises."""
        if self._on_error is not None:
            try:
                self._on_error(error)
                return
            except Exception as worse:
                worse.__context__ = error
                error = worse
        logger.error("an event failed: %s", error, exc_info=error)
