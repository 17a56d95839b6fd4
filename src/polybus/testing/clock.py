"""A clock that moves when told to."""

from __future__ import annotations


class ManualClock:
    """Callable like the log's and the bus's clock: microseconds since 1970."""

    def __init__(self, start_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = start_us

    def __call__(self) -> int:
        return self.now_us

    def advance(self, *, s: float) -> None:
        """Move, forwards or backwards."""
        self.now_us += round(s * 1_000_000)
