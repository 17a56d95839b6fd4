"""Starts nodes of a bus over Kafka, each bus with topics of its own."""

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from polybus.bench.brokers import BenchBroker, RunningBroker, bus, running
from polybus.bench.measure import Bench
from polybus.testing.kafka import KafkaBrokers

_prefixes = itertools.count()


def node(brokers: KafkaBrokers, title: str, prefix: str) -> BenchBroker:
    """A node that stores a receipted message on two brokers, or on the only one."""
    replicas = {"replicas": min(3, brokers.count), "insync-min": min(2, brokers.count)}
    return bus(
        title,
        log=brokers.url,
        cluster={"prefix": prefix, **replicas},
        durability="fsync",
        **{"slow-subscriber": "wait"},
    )


@contextmanager
def running_nodes(
    bench: Bench, brokers: KafkaBrokers, topics: list[str], count: int = 1
) -> Iterator[tuple[list[RunningBroker], str]]:
    """New nodes of one bus that has these topics, and the prefix of its names in Kafka."""
    prefix = new_prefix()
    with ExitStack() as stack:
        found = [
            stack.enter_context(another_node(bench, brokers, prefix, topics)) for _ in range(count)
        ]
        yield found, prefix


@contextmanager
def another_node(
    bench: Bench, brokers: KafkaBrokers, prefix: str, topics: list[str]
) -> Iterator[RunningBroker]:
    with (
        tempfile.TemporaryDirectory(prefix="polybus-bench-", dir=bench.data_root) as folder,
        running(node(brokers, "node", prefix), Path(folder), topics) as found,
    ):
        yield found


def new_prefix() -> str:
    return f"bench{next(_prefixes)}."
