"""The expectations of users' pipelines in `$stats`: which counts are published, and when.

Counts that have changed are published with the next report of the run, at most once a second, and
at its end. If the bus is unavailable, they are published later; unpublished counts of a killed run
are lost. The counts of the standard pipeline are published by its flow `watch`, exactly once.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from polybus.errors import PolybusError
from polybus.spark.location import BusLocation

STANDARD = "standard"
PATH = "/v1/topics/$stats/messages"
ANSWER_TIMEOUT_S = 2.0


class ExpectationStats:
    """The published counts of a run's expectations."""

    def __init__(self, bus: BusLocation) -> None:
        self._bus = bus
        self._published: dict[tuple[str, ...], tuple[int, int]] = {}

    def publish(self, flows: Iterable[Mapping[str, Any]]) -> None:
        """Publish the counts in the progress of flows that have changed."""
        for flow in flows:
            if flow["pipeline"] == STANDARD:
                continue
            for one in flow["expectations"]:
                about = {"pipeline": flow["pipeline"], "flow": flow["flow"], "table": one["topic"]}
                about |= {"expectation": one["name"], "consequence": one["consequence"]}
                counts = one["passed"], one["failed"]
                key = tuple(about.values())
                if self._published.get(key) == counts:
                    continue
                row = about | {"passed": counts[0], "failed": counts[1]}
                try:
                    self._bus.call("POST", PATH, row, timeout_s=ANSWER_TIMEOUT_S)
                except PolybusError:
                    return
                self._published[key] = counts
