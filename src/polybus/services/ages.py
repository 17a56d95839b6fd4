"""The lag of consumers in seconds: the age of the first message that each has yet to read."""

from collections.abc import Iterable

from polybus.errors import PolybusError
from polybus.log.interface import Log
from polybus.services.consumers import ConsumerView

AGES_MAX = 200
"""The log is read at up to this many positions to find the lag in seconds."""


def times_at(log: Log, wanted: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """The times of the messages at these positions, if they exist. May block."""
    found = {}
    for topic, offset in wanted[:AGES_MAX]:
        try:
            batches = log.read(topic, max(offset, log.bounds(topic).start), bytes_max=1)
        except PolybusError:
            continue
        if batches:
            found[(topic, offset)] = batches[0].timestamp_us
    return found


def lags_s(log: Log, views: Iterable[ConsumerView], now_us: int) -> dict[str, float]:
    """The lag of groups in seconds, where it is known. May block."""
    behind = [
        (view.group, one.topic, one.offset) for view in views for one in view.topics if one.lag
    ]
    times = times_at(log, [(topic, offset) for _, topic, offset in behind])
    found: dict[str, float] = {}
    for group, topic, offset in behind:
        if (time_us := times.get((topic, offset))) is not None:
            age_s = max(0, now_us - time_us) / 1e6
            found[group] = round(max(age_s, found.get(group, 0.0)), 3)
    return found
