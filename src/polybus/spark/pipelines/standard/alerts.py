"""Decides when an alert is raised: a topic's rate compared with its own last hour.

A *spike* is a minute with at least `alert-factor` times the usual rate of the topic (the larger of
median and mean per minute of its last hour) and at least `alert-messages-min` messages. The alert
is raised as soon as the count is reached, before the minute is over. A *silence* is a topic whose
usual rate is at least `alert-messages-min` and that has had no message for `alert-silence-s`.

Rates come from the table `traffic` and earlier alerts from the table `alerts`: both survive
restarts.
"""

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
"""The current minute and the one before it: the pipeline may be some seconds behind."""
Kind = Literal["spike", "silence"]


@dataclass(frozen=True)
class Alert:
    """One finding about a topic and a minute: the columns of the table `alerts`."""

    kind: Kind
    topic: str
    minute: int
    """In microseconds since 1970."""
    messages: int
    expected: float
    text: str


class Rates:
    """Messages per topic and minute of the last hours."""

    def __init__(self, traffic: pa.Table, now_us: int) -> None:
        """Takes rows of `traffic`: topic, minute, messages. Future minutes are ignored."""
        self._last_minute = now_us // MINUTE_US
        topics = traffic["topic"].combine_chunks().dictionary_encode()
        self.topics: list[str] = topics.dictionary.to_pylist()
        minutes = traffic["minute"].cast(pa.int64()).to_numpy() // MINUTE_US
        columns = minutes - (self._last_minute - WINDOW_MINUTES + 1)
        wanted = (columns >= 0) & (columns < WINDOW_MINUTES)
        self._counts = np.zeros((len(self.topics), WINDOW_MINUTES), dtype=np.int64)
        rows = topics.indices.to_numpy()[wanted]
        np.add.at(self._counts, (rows, columns[wanted]), traffic["messages"].to_numpy()[wanted])
        known = self._counts > 0
        self._first = np.where(known.any(axis=1), known.argmax(axis=1), WINDOW_MINUTES)
        self._last = WINDOW_MINUTES - 1 - known[:, ::-1].argmax(axis=1)

    def spikes(self, settings: Pipeline) -> Iterator[Alert]:
        for column in range(WINDOW_MINUTES - JUDGED_MINUTES, WINDOW_MINUTES):
            usual = self._usual(np.full(len(self.topics), column))
            least = np.maximum(settings.alert_factor * usual, settings.alert_messages_min)
            old = (column - self._first) * 60.0 >= settings.alert_history_s
            # The history counts whole minutes; a requirement below a second means none.
            old |= settings.alert_history_s < 1.0
            for row in np.flatnonzero(old & (self._counts[:, column] >= least)):
                yield self._alert("spike", int(row), column, usual[row])

    def silences(self, settings: Pipeline, now_us: int) -> Iterator[Alert]:
        usual = self._usual(self._last)
        since_us = (self._last + 1 + self._last_minute - WINDOW_MINUTES + 1) * MINUTE_US
        silent = (now_us - since_us) / 1e6 >= settings.alert_silence_s
        old = (self._last - self._first) * 60.0 >= settings.alert_history_s
        for row in np.flatnonzero(silent & old & (usual >= settings.alert_messages_min)):
            yield self._alert("silence", int(row), int(self._last[row]) + 1, usual[row])

    def _usual(self, before: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The usual rate of each topic in the hour before a column; 0 if unknown."""
        columns = np.arange(WINDOW_MINUTES)[None, :]
        first = np.maximum(self._first, before - HOUR_MINUTES)[:, None]
        inside = (columns >= first) & (columns < before[:, None])
        some = inside.any(axis=1)
        hour = np.where(inside, self._counts, np.nan)[some]
        found = np.zeros(len(self.topics))
        found[some] = np.maximum(np.nanmedian(hour, axis=1), np.nanmean(hour, axis=1))
        return found

    def _alert(self, kind: Kind, row: int, column: int, expected: float) -> Alert:
        topic = self.topics[row]
        minute = int((self._last_minute - WINDOW_MINUTES + 1 + column) * MINUTE_US)
        messages = int(self._counts[row, column]) if column < WINDOW_MINUTES else 0
        if kind == "spike":
            text = f"{topic} has {messages} messages in a minute; it usually has {expected:.0f}"
        else:
            text = f"{topic} is silent; it usually has {expected:.0f} messages a minute"
        return Alert(kind, topic, minute, messages, round(float(expected), 3), text)


def find(
    traffic: pa.Table, now_us: int, settings: Pipeline, raised_us: Mapping[tuple[str, str], int]
) -> list[Alert]:
    """The alerts to raise now; `raised_us` has when each topic last had an alert of each kind."""
    rates = Rates(traffic, now_us)
    pause_us = int(settings.alert_pause_s * 1e6)
    found: dict[tuple[str, str], Alert] = {}
    for alert in rates.spikes(settings):
        last = raised_us.get((alert.topic, "spike"))
        if last is None or now_us - last >= pause_us:
            found[alert.topic, "spike"] = alert
    for alert in rates.silences(settings, now_us):
        last = raised_us.get((alert.topic, "silence"))
        # Until there are messages again, it is the same silence.
        if last is None or last < alert.minute:
            found[alert.topic, "silence"] = alert
    return list(found.values())
