"""Nodes over Kafka for tests of Spark and SQL: processes, driven without asyncio."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_kit import RunningBus, running_bus

from polybus.client.http.blocking import request_json
from polybus.log.kafka.reader import close_links
from polybus.testing.kafka import KafkaBrokers

for one in ("kafka", "edges"):
    sys.path.insert(0, str(Path(__file__).parents[1] / one))

from cluster_kit import ONE_BROKER, prefixes  # noqa: E402
from commit_kit import stage  # noqa: E402


class ClusterNode:
    """A node of a bus in Kafka, and its transactions."""

    def __init__(self, bus: RunningBus, log: str, prefix: str) -> None:
        self.bus = bus
        self.log = log
        self.prefix = prefix
        self._batches = itertools.count()

    @property
    def places(self) -> dict[str, dict[str, str]]:
        """The three ways to name its messages, as options of the source."""
        return {
            "url": {"url": self.bus.url},
            "data": {"data": str(self.bus.data)},
            "log": {"log": self.log, "cluster.prefix": self.prefix},
        }

    def create(self, topic: str) -> None:
        request_json(self.bus.url, "POST", "/v1/topics", {"name": topic})

    def delete(self, topic: str) -> None:
        request_json(self.bus.url, "DELETE", f"/v1/topics/{topic}")

    def commit(self, **topics: Sequence[bytes]) -> None:
        """One transaction: it leaves an offset without a message in each topic."""
        number = next(self._batches)
        files = [stage(self.bus.data, "tests", number, topics)]
        body = {"producer": "tests", "query": "q", "batch": number, "files": files}
        request_json(self.bus.url, "POST", "/v1/commits", body)


@contextlib.contextmanager
def cluster_node(
    folder: Path,
    brokers: KafkaBrokers,
    topics: Sequence[Any] = (),
    *,
    prefix: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[ClusterNode]:
    """A node, of a bus of its own without `prefix`."""
    prefix = f"t{next(prefixes)}." if prefix is None else prefix
    cluster = {"prefix": prefix, **ONE_BROKER}
    given = {"log": brokers.url, "cluster": cluster} | dict(settings or {})
    with running_bus(folder, topics, given) as bus:
        yield ClusterNode(bus, str(given["log"]), prefix)
    # Or the readers of this process try to reach the brokers for as long as the tests run.
    close_links()
