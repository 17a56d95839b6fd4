"""How old the messages are that consumers have still to read: their lag in seconds."""

from collections.abc import Iterable

from polybus.errors import PolybusError
from polybus.log.interface import Log
from polybus.services.consumers import ConsumerView

AGES_MAX = 200
"""The lag in seconds is looked for in this many places of the log."""


def times_at(log: Log, wanted: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """When the messages at these places came in, of those that exist. May block."""
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
    """The lag of groups in seconds, of those where it can be known. May block."""
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
