"""The benchmark of a cluster: nodes over three Kafka brokers, all of them on this machine.

starting    nodes with a folder each
nodes       receipts and their latency through nodes, beside a JetStream cluster
kafka       what confluent-kafka's own producer and consumer do with the same brokers
jetstream   a NATS JetStream cluster of three, as one process

The brokers start once, and first have some seconds of load that is not measured: until Java has
compiled them they are several times slower than they stay. Each run has new nodes, and topics of
its own by a prefix of their names. Brokers, nodes and the generator share the processors of this
machine.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from polybus.bench import BenchError
from polybus.bench.cluster import kafka, nodes
from polybus.bench.measure import Bench
from polybus.bench.report import BenchFigure
from polybus.errors import PolybusError
from polybus.testing.kafka import KafkaBrokers

MESSAGES = 2_000_000
QUICK_MESSAGES = 200_000
WARM_UP_RUNS = 8
"""The load before the measurement is as long as this number of runs."""
WARM_UP_NODES = 3
"""As many topics have a leader on each of three brokers."""


def run_cluster_bench(
    bench: Bench, messages: int, tell: Callable[[str], None]
) -> list[BenchFigure]:
    """All figures; `messages` is how many are read. Raises BenchError, also without Kafka."""
    with tempfile.TemporaryDirectory(
        prefix="polybus-bench-", dir=bench.data_root, ignore_cleanup_errors=True
    ) as folder:
        brokers = KafkaBrokers(Path(folder) / "kafka")
        try:
            tell("starting three Kafka brokers")
            brokers.start()
            tell("warming the brokers up")
            long = replace(bench, run_s=bench.run_s * WARM_UP_RUNS)
            nodes.rate_of_nodes(long, brokers, WARM_UP_NODES)
            return [
                *nodes.measure_receipts(bench, brokers, tell),
                *kafka.measure_reading(bench, brokers, messages, tell),
                *nodes.measure_growth(bench, brokers, tell),
            ]
        except PolybusError as error:
            raise BenchError(f"{error.code}: {error.text}") from error
        finally:
            brokers.stop()


def run_count(rounds: int) -> int:
    """How many runs `run_cluster_bench` reports."""
    return 2 + nodes.run_count(rounds) + kafka.run_count(rounds)
