"""Histograms of durations: one addition per fsync or commit, never per message.

One thread adds. Others read without a lock, so they may miss the last addition.
"""

from bisect import bisect_left

BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Timings:
    """Counts by BOUNDS_S; the last one is for everything longer."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration; a negative one, after the clock was set back, counts as 0."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += max(seconds, 0.0)
