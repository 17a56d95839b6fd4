"""A clock that a test moves."""


class ManualClock:
    """A clock for the log and the bus: a callable that returns microseconds since 1970."""

    def __init__(self, start_us: int = 1_700_000_000_000_000) -> None:
        self.now_us = start_us

    def __call__(self) -> int:
        return self.now_us

    def advance(self, *, s: float) -> None:
        """Move the clock; a negative time moves it back."""
        self.now_us += round(s * 1_000_000)
