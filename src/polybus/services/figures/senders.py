"""Estimates who publishes to which topic, from the last messages of its log.

Messages are not counted by sender. While the graph is being viewed, the last SAMPLE_MESSAGES of
each busy topic are sampled once a second; a sender's share of them is its share of the topic's
rate.
"""

from collections import Counter
from collections.abc import Callable

from polybus.bus.bus import Bus
from polybus.errors import PolybusError
from polybus.services.figures.figures import BusFigures

TOPICS_MAX = 200
SENDERS_MAX = 1000
SAMPLE_MESSAGES = 200
REMEMBERED_S = 300.0
AGAIN_S = 1.0


class Senders:
    """Who published to which topic in the last minutes."""

    def __init__(self, bus: Bus, figures: BusFigures, clock_s: Callable[[], float]) -> None:
        self._bus = bus
        self._figures = figures
        self._clock_s = clock_s
        self._seen: dict[tuple[str, str, str], tuple[float, float]] = {}
        self._looked_s = -AGAIN_S

    def look(self) -> dict[tuple[str, str, str], float]:
        """Messages a second by topic, protocol and host."""
        now_s = self._clock_s()
        if now_s - self._looked_s >= AGAIN_S:
            self._looked_s = now_s
            fresh: dict[tuple[str, str, str], tuple[float, float]] = {}
            for rate in self._figures.busy(TOPICS_MAX):
                for (protocol, host), share in self._shares(rate.topic.name).items():
                    fresh[(rate.topic.name, protocol, host)] = (now_s, share * rate.rates[0])
            kept = {
                key: (seen_s, 0.0)
                for key, (seen_s, _) in self._seen.items()
                if key not in fresh and now_s - seen_s < REMEMBERED_S
            }
            self._seen = dict(list((fresh | kept).items())[:SENDERS_MAX])
        return {key: rate for key, (_, rate) in self._seen.items()}

    def _shares(self, topic: str) -> dict[tuple[str, str], float]:
        log = self._bus.log
        try:
            bounds = log.bounds(topic)
            recent = log.read_recent(topic, max(bounds.start, bounds.stop - SAMPLE_MESSAGES))
        except PolybusError:
            recent = None
        counts: Counter[tuple[str, str]] = Counter()
        for batch in recent or ():
            host = batch.sender.rpartition(":")[0] or batch.sender or "unknown"
            counts[(batch.protocol, host)] += len(batch)
        total = counts.total()
        return {key: count / total for key, count in counts.items()} if total else {}
