"""Rates that are out of the ordinary: a topic's minutes against its own last hour.

A *spike* is a minute with `alert-factor` times the messages that a minute of the topic usually has
(the larger of median and mean of its last hour), and `alert-messages-min` at least. It is told as
soon as the count is reached, not when the minute is over. A *silence* is a topic that usually has
`alert-messages-min` a minute and had none for `alert-silence-s`.

What is usual comes from the table `traffic` and what was told from the table `alerts`, so both
survive restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from polybus.config import Pipeline

MINUTE_US = 60_000_000
HOUR_MINUTES = 60
WINDOW_MINUTES = 2 * HOUR_MINUTES
JUDGED_MINUTES = 2
"""The minute that runs and the one before it: the pipeline may be some seconds behind."""
Kind = Literal["spike", "silence"]


@dataclass(frozen=True)
class Alert:
    """One finding about a topic and a minute."""

    kind: Kind
    topic: str
    minute_us: int
    messages: int
    expected: float

    @property
    def text(self) -> str:
        if self.kind == "spike":
            usual = f"it usually has {self.expected:.0f}"
            return f"{self.topic} has {self.messages} messages in a minute; {usual}"
        return f"{self.topic} is silent; it usually has {self.expected:.0f} messages a minute"


class Rates:
    """Messages of each topic in each minute of the last hours."""

    def __init__(self, traffic: pa.Table, now_us: int) -> None:
        """Take rows of `traffic`: topic, minute, messages. Minutes to come are left out."""
        self._last_minute = now_us // MINUTE_US
        topics = traffic["topic"].combine_chunks().dictionary_encode()
        self.topics: list[str] = topics.dictionary.to_pylist()
        minutes = traffic["minute"].cast(pa.int64()).to_numpy() // MINUTE_US
        places = minutes - (self._last_minute - WINDOW_MINUTES + 1)
        wanted = (places >= 0) & (places < WINDOW_MINUTES)
        self._counts = np.zeros((len(self.topics), WINDOW_MINUTES), dtype=np.int64)
        rows = topics.indices.to_numpy()[wanted]
        np.add.at(self._counts, (rows, places[wanted]), traffic["messages"].to_numpy()[wanted])
        known = self._counts > 0
        self._first = np.where(known.any(axis=1), known.argmax(axis=1), WINDOW_MINUTES)
        self._last = WINDOW_MINUTES - 1 - known[:, ::-1].argmax(axis=1)

    def spikes(self, settings: Pipeline) -> Iterator[Alert]:
        for place in range(WINDOW_MINUTES - JUDGED_MINUTES, WINDOW_MINUTES):
            usual = self._usual(np.full(len(self.topics), place))
            least = np.maximum(settings.alert_factor * usual, settings.alert_messages_min)
            old = (place - self._first) * 60.0 >= settings.alert_history_s
            # A topic that is younger than a minute has no history, and may be told to need none.
            old |= settings.alert_history_s < 1.0
            for row in np.flatnonzero(old & (self._counts[:, place] >= least)):
                yield self._alert("spike", int(row), place, usual[row])

    def silences(self, settings: Pipeline, now_us: int) -> Iterator[Alert]:
        usual = self._usual(self._last)
        since_us = (self._last + 1 + self._last_minute - WINDOW_MINUTES + 1) * MINUTE_US
        silent = (now_us - since_us) / 1e6 >= settings.alert_silence_s
        old = (self._last - self._first) * 60.0 >= settings.alert_history_s
        for row in np.flatnonzero(silent & old & (usual >= settings.alert_messages_min)):
            yield self._alert("silence", int(row), int(self._last[row]) + 1, usual[row])

    def _usual(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Messages of a usual minute of each topic in the hour before a place; 0 if unknown."""
        columns = np.arange(WINDOW_MINUTES)[None, :]
        first = np.maximum(self._first, places - HOUR_MINUTES)[:, None]
        inside = (columns >= first) & (columns < places[:, None])
        some = inside.any(axis=1)
        hour = np.where(inside, self._counts, np.nan)[some]
        found = np.zeros(len(self.topics))
        found[some] = np.maximum(np.nanmedian(hour, axis=1), np.nanmean(hour, axis=1))
        return found

    def _alert(self, kind: Kind, row: int, place: int, expected: float) -> Alert:
        minute = self._last_minute - WINDOW_MINUTES + 1 + place
        messages = int(self._counts[row, place]) if place < WINDOW_MINUTES else 0
        return Alert(kind, self.topics[row], int(minute * MINUTE_US), messages, float(expected))


def find(
    traffic: pa.Table, now_us: int, settings: Pipeline, told: Mapping[tuple[str, str], int]
) -> list[Alert]:
    """What is to be told now; `told` has the time each topic and kind was last told, in us."""
    rates = Rates(traffic, now_us)
    pause_us = int(settings.alert_pause_s * 1e6)
    found: dict[tuple[str, str], Alert] = {}
    for alert in rates.spikes(settings):
        last = told.get((alert.topic, "spike"))
        if last is None or now_us - last >= pause_us:
            found[alert.topic, "spike"] = alert
    for alert in rates.silences(settings, now_us):
        last = told.get((alert.topic, "silence"))
        # Told once: until there are messages again it is the same silence.
        if last is None or last < alert.minute_us:
            found[alert.topic, "silence"] = alert
    return list(found.values())
