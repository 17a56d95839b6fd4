"""Work that a background task repeats: a failing disk must not end the task, nor fill the log."""

import logging
from collections.abc import Awaitable

from polybus.errors import PolybusError


class RepeatedWork:
    """Attempts at one kind of work; its caller makes the next one some time after each."""

    def __init__(self, logger: logging.Logger, problem: str) -> None:
        """`problem` says in the log what a failure means."""
        self._logger = logger
        self._problem = problem
        self._is_failing = False

    async def attempt(self, work: Awaitable[None]) -> bool:
        """Whether the work succeeded. Of failures in a row only the first is logged."""
        try:
            await work
        except (PolybusError, OSError) as error:
            if not self._is_failing:
                self._logger.warning("%s; the bus tries again: %s", self._problem, error)
            self._is_failing = True
            return False
        if self._is_failing:
            self._logger.info("succeeded again after: %s", self._problem)
        self._is_failing = False
        return True
