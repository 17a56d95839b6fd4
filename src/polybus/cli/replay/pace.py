"""Decides when a replay publishes each message: by original timestamps, a multiple, or a rate."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

# Messages that are due within this time of each other are published together.
SLOT_S = 0.02
ROWS_MAX = 5000
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"


@dataclass(frozen=True, slots=True)
class ReplayPace:
    """How fast to publish.

    Attributes:
        speed: a multiple of the original pace; None means as fast as possible.
        rate: messages per second at most; None means no limit.
    """

    speed: float | None = None
    rate: float | None = None

    def duration_s(self, count: int, span_us: int) -> float:
        """The shortest time for messages that originally arrived within `span_us`."""
        paced = span_us / 1e6 / self.speed if self.speed else 0.0
        return max(paced, count / self.rate if self.rate else 0.0)


@dataclass(frozen=True, slots=True)
class Slot:
    """Rows `start` to `stop` of a batch, due `due_s` seconds after the replay began."""

    start: int
    stop: int
    due_s: float


def parse_speed(text: str) -> float | None:
    """`original`, `max` (None), or a multiple such as `2x`. Raises click.BadParameter."""
    if text in ("original", "max"):
        return 1.0 if text == "original" else None
    text_is = f"{text!r} is not original, max or a multiple such as 2x"
    return _positive(f"{_NUMBER}x", text, text_is, "--speed")


def parse_rate(text: str | None) -> float | None:
    """`500` or `500/s`. Raises click.BadParameter."""
    if text is None:
        return None
    text_is = f"{text!r} is not a number of messages a second"
    return _positive(f"{_NUMBER}(?:/s)?", text, text_is, "--rate")


def _positive(pattern: str, text: str, problem: str, option: str) -> float:
    found = re.fullmatch(pattern, text)
    if found is None or not float(found[1]) > 0:
        raise click.BadParameter(problem, param_hint=option)
    return float(found[1])


class Schedule:
    """Divides batches into slots, in order, starting at the time of the first message."""

    def __init__(self, pace: ReplayPace, slot_s: float = SLOT_S) -> None:
        self._pace = pace
        self._slot_s = slot_s
        self._rows_max = ROWS_MAX
        if pace.rate is not None:
            self._rows_max = max(1, min(ROWS_MAX, int(pace.rate * slot_s)))
        self._first_us: int | None = None
        self._sent = 0

    def slots(self, times_us: Sequence[int]) -> Iterator[Slot]:
        """The slots of a batch, from its timestamps; a timestamp that goes back delays nothing."""
        start = 0
        while start < len(times_us):
            by_rate = self._sent / self._pace.rate if self._pace.rate else 0.0
            due_s = max(self._offset_s(times_us[start]), by_rate)
            end = min(len(times_us), start + self._rows_max)
            later = (
                row
                for row in range(start + 1, end)
                if self._offset_s(times_us[row]) > due_s + self._slot_s
            )
            stop = end if self._pace.speed is None else next(later, end)
            yield Slot(start, stop, due_s)
            self._sent += stop - start
            start = stop

    def _offset_s(self, time_us: int) -> float:
        """When a message is due by its timestamp, in seconds after the first."""
        if self._pace.speed is None:
            return 0.0
        if self._first_us is None:
            self._first_us = time_us
        return max(0, time_us - self._first_us) / 1e6 / self._pace.speed
