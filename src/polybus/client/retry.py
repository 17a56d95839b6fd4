"""Retries: the back-off between attempts, and the loop that every transport uses."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

from polybus.errors import PolybusError

log = logging.getLogger("polybus.client")
T = TypeVar("T")


class Backoff:
    """Exponential back-off with jitter.

    Jitter removes up to half of a delay, so that clients that lost the same bus at the same moment
    do not all return at the same moment.
    """

    def __init__(
        self, *, first_s: float = 0.05, delay_s_max: float = 5.0, random: Random | None = None
    ) -> None:
        self._first_s = first_s
        self._delay_s_max = delay_s_max
        self._random = random or Random()
        self._delay_s = first_s

    def next_s(self) -> float:
        """The next delay in seconds."""
        delay_s = self._delay_s
        self._delay_s = min(delay_s * 2, self._delay_s_max)
        return delay_s * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start with short delays again: the connection works."""
        self._delay_s = self._first_s


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    name: str,
    is_transient: Callable[[PolybusError], bool] = lambda _: True,
) -> T:
    """The result of the first attempt that succeeds; raises an error that is not transient."""
    while True:
        try:
            return await attempt()
        except PolybusError as error:
            if not is_transient(error):
                raise
            log.info("%s: %s, trying again", name, error)
        await asyncio.sleep(backoff.next_s())
