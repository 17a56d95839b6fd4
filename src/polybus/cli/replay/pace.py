"""How fast a replay goes: at the pace the messages once came in, a multiple of it, or a rate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

# Messages that are due this close to each other go out together.
SLOT_S = 0.02
ROWS_MAX = 5000
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)x")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:/s)?")


@dataclass(frozen=True, slots=True)
class Pace:
    """`speed` is against the original pace, None for as fast as it goes; `rate` is messages/s."""

    speed: float | None = None
    rate: float | None = None

    def duration_s(self, count: int, span_us: int) -> float:
        """How long so many messages that came within `span_us` take at least."""
        paced = span_us / 1e6 / self.speed if self.speed else 0.0
        return max(paced, count / self.rate if self.rate else 0.0)


@dataclass(frozen=True, slots=True)
class Slot:
    """Rows `start` to `stop` of a batch, due so many seconds after the replay began."""

    start: int
    stop: int
    due_s: float


def parse_speed(text: str) -> float | None:
    """`original`, `max`, or a multiple such as `2x`. Raises click.BadParameter."""
    if text == "max":
        return None
    if text == "original":
        return 1.0
    found = _SPEED.fullmatch(text)
    if found is None or not float(found[1]) > 0:
        raise click.BadParameter(
            f"{text!r} is not original, max or a multiple such as 2x", param_hint="--speed"
        )
    return float(found[1])


def parse_rate(text: str | None) -> float | None:
    """`500` or `500/s`. Raises click.BadParameter."""
    if text is None:
        return None
    found = _RATE.fullmatch(text)
    if found is None or not float(found[1]) > 0:
        raise click.BadParameter(
            f"{text!r} is not a number of messages a second", param_hint="--rate"
        )
    return float(found[1])


class Schedule:
    """Cuts batches into slots, in order, from the first message's time on."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._first_us: int | None = None
        self._sent = 0

    def slots(self, times_us: Sequence[int]) -> Iterator[Slot]:
        """The rows of a batch as slots; a clock that went backwards delays nothing."""
        start = 0
        while start < len(times_us):
            due_s = self._due_s(times_us[start])
            stop = min(len(times_us), start + self._rows_max())
            if self._pace.speed is not None:
                stop = next(
                    (
                        row
                        for row in range(start + 1, stop)
                        if self._time_s(times_us[row]) > due_s + SLOT_S
                    ),
                    stop,
                )
            yield Slot(start, stop, due_s)
            self._sent += stop - start
            start = stop

    def _rows_max(self) -> int:
        rate = self._pace.rate
        return ROWS_MAX if rate is None else max(1, min(ROWS_MAX, int(rate * SLOT_S)))

    def _due_s(self, time_us: int) -> float:
        by_rate = self._sent / self._pace.rate if self._pace.rate else 0.0
        return max(self._time_s(time_us), by_rate)

    def _time_s(self, time_us: int) -> float:
        if self._pace.speed is None:
            return 0.0
        if self._first_us is None:
            self._first_us = time_us
        return max(0, time_us - self._first_us) / 1e6 / self._pace.speed
