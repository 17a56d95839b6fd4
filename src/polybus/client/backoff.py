"""How long to wait before the next attempt to connect."""

from __future__ import annotations

from random import Random


class Backoff:
    """Delays that double up to a maximum, each with jitter.

    Jitter takes up to half of a delay away: thousands of clients that lost the same bus in the same
    moment do not all come back in the same moment.
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
        """Begin with the short delays again: the connection works."""
        self._delay_s = self._first_s
