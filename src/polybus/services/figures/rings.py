"""Time series in bounded memory: a ring buffer for each of a bounded number of series.

A full ring drops its oldest point; with too many series, the smallest one is dropped. A missing
point is NaN.
"""

import math
from array import array
from collections.abc import Mapping

NAN = math.nan


class SeriesRing:
    """The last points of named series, all at the same times."""

    def __init__(self, points_max: int, series_max: int) -> None:
        self._points_max = points_max
        self._series_max = series_max
        self._times = array("d", [NAN]) * points_max
        self._series: dict[str, array[float]] = {}
        self._added = 0

    def add(self, time_s: float, figures: Mapping[str, float]) -> None:
        """Add a point; series without a value get a gap."""
        at = self._added % self._points_max
        self._added += 1
        self._times[at] = time_s
        for name, points in self._series.items():
            points[at] = figures.get(name, NAN)
        for name, value in figures.items():
            if name not in self._series and self._has_room(value, at):
                points = self._series[name] = array("d", [NAN]) * self._points_max
                points[at] = value

    def _has_room(self, value: float, at: int) -> bool:
        """Whether there is room for a new series; a smaller one is dropped for it."""
        if len(self._series) < self._series_max:
            return True
        smallest = min(self._series, key=lambda name: _or_least(self._series[name][at]))
        if _or_least(self._series[smallest][at]) >= value:
            return False
        del self._series[smallest]
        return True

    def means(self, since_s: float, step_s: float) -> tuple[list[float], dict[str, list[float]]]:
        """The times of steps, oldest first, and the mean of each series in each step."""
        order = [
            index % self._points_max
            for index in range(max(0, self._added - self._points_max), self._added)
            if self._times[index % self._points_max] >= since_s
        ]
        steps: dict[float, list[int]] = {}
        for index in order:
            steps.setdefault(self._times[index] // step_s * step_s, []).append(index)
        series = {
            name: [_mean([points[index] for index in indexes]) for indexes in steps.values()]
            for name, points in self._series.items()
        }
        return list(steps), series


def _or_least(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else NAN
