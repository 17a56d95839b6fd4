"""Publishing with receipts through one node and through several, over one topic and over many."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from polybus.bench import BenchError, generator
from polybus.bench.brokers import HOST, BenchBroker, RunningBroker
from polybus.bench.cluster import jetstream, kafka, starting
from polybus.bench.measure import DEADLINE_EXTRA_S, Bench
from polybus.bench.measure import run_count as scenario_runs
from polybus.bench.report import BenchFigure, Target, figures_of
from polybus.bench.scenarios import PROBE_RATE_PER_S, RECEIPTS, Entry, Metric, Scenario
from polybus.testing.kafka import KafkaBrokers
from polybus.wire import boson_frames

NODE = Entry(broker="node")
JETSTREAM = Entry(broker="jetstream")
TOPIC_COUNTS = (10, 100, 1000)
NODE_COUNTS = (2, 3)
PRODUCE_RATIO = 2.0
RECEIPT_US_MAX = 6_000
MANY_RECEIPTS = replace(RECEIPTS, receipts=131_072)
"""More unanswered than on one machine: brokers answer after milliseconds, so few would be the
limit. confluent-kafka's producer may have a million."""
SUBSCRIBED = b"$position"
FIRST = b"first message"
FIRST_TIMEOUT_S = 60.0


def _receipts(topics: int, *peers: Entry, limit: float | None = None) -> Scenario:
    word = "topic" if topics == 1 else "topics"
    title = f"receipts through one node, {topics:,} {word}"
    load = replace(MANY_RECEIPTS, topics=topics)
    return Scenario(f"cluster-topics-{topics}", title, load, (NODE, *peers), limit=limit)


ONE_TOPIC = _receipts(1, JETSTREAM, limit=0.8e6)
SCENARIOS = (
    _receipts(3, limit=1.0e6),
    *map(_receipts, TOPIC_COUNTS),
    Scenario(
        "cluster-receipt-latency",
        f"receipts through one node at {PROBE_RATE_PER_S:,} messages per second",
        replace(RECEIPTS, rate_per_s=PROBE_RATE_PER_S),
        (NODE, JETSTREAM),
        Metric.LATENCY,
        limit=RECEIPT_US_MAX,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBench(Bench):
    """Runs scenarios with a node, or a JetStream cluster, as the server."""

    kafka: KafkaBrokers

    def brokers(self) -> dict[str, BenchBroker]:
        own = starting.node(self.kafka, "polybus, one node", starting.new_prefix())
        return {"node": own, "jetstream": jetstream.BROKER}

    def generate(
        self, server: RunningBroker, scenario: Scenario, outcome: Any, load: Any, *more: str
    ) -> dict[str, Any]:
        if outcome.entry.broker == "jetstream":
            more = (*more, "--replicas", str(jetstream.SERVERS))
        else:
            _send_first([server.port], load.topics)
        # Not super(): a dataclass with slots is another class than the one of this method.
        return Bench.generate(self, server, scenario, outcome, load, *more)


def measure_receipts(
    bench: Bench, brokers: KafkaBrokers, tell: Callable[[str], None]
) -> list[BenchFigure]:
    own = NodeBench(
        program=bench.program,
        data_root=bench.data_root,
        rounds=bench.rounds,
        run_s=bench.run_s,
        kafka=brokers,
    )
    figures = _figures(own, ONE_TOPIC, tell)
    ours = figures[0]
    peer = kafka.measure_producing(bench, brokers, tell, like=ours)
    if peer.value and ours.value:
        target = Target(value=PRODUCE_RATIO, at_least=True)
        peer = replace(peer, ratio=ours.value / peer.value, target=target)
    figures.insert(1, peer)
    for scenario in SCENARIOS:
        figures += _figures(own, scenario, tell)
    return figures


def _figures(
    bench: NodeBench, scenario: Scenario, tell: Callable[[str], None]
) -> list[BenchFigure]:
    """Without the CPU time: that of the brokers, which do most of the work, is not in it."""
    found = figures_of(scenario, bench.measure(scenario, tell))
    return [replace(figure, cpu_s_per_million=None) for figure in found]


def measure_growth(
    bench: Bench, brokers: KafkaBrokers, tell: Callable[[str], None]
) -> list[BenchFigure]:
    """Receipts through several nodes, each with a publisher and a topic of its own."""
    figures = []
    for count in NODE_COUNTS:
        rates = []
        for number in range(1, bench.rounds + 1):
            tell(f"receipts through {count} nodes, round {number}")
            rates.append(rate_of_nodes(bench, brokers, count))
        figures.append(
            BenchFigure(
                scenario=f"cluster-nodes-{count}",
                work=f"receipts through {count} nodes, one topic each",
                who=f"polybus, {count} nodes",
                value=median(rates),
                unit="messages/s",
            )
        )
    return figures


def rate_of_nodes(bench: Bench, brokers: KafkaBrokers, count: int) -> float:
    """Receipts per second of all nodes together."""
    topics = [f"bench.{number:04d}" for number in range(count)]

    def drive(number: int, server: RunningBroker) -> dict[str, Any]:
        arguments = [
            *MANY_RECEIPTS.arguments(),
            *("--protocol", "boson", "--port", str(server.port)),
            *("--first-topic", str(number), "--duration-s", str(bench.run_s)),
        ]
        deadline_s = bench.run_s + DEADLINE_EXTRA_S
        found: dict[str, Any] = generator.call(
            bench.program, "run", arguments, deadline_s=deadline_s
        )
        return found

    with (
        starting.running_nodes(bench, brokers, topics, count) as (servers, _),
        ThreadPoolExecutor(count) as threads,
    ):
        _send_first([server.port for server in servers], count)
        samples = list(threads.map(drive, range(count), servers))
    delivered = sum(sample["delivered"] for sample in samples)
    return float(delivered / max(sample["seconds"] for sample in samples))


def _send_first(ports: list[int], topics: int) -> None:
    """Send a message to each topic, and wait until all nodes have delivered all of them.

    Kafka takes seconds until the replicas of many new topics follow their leaders.
    """
    names = [f"bench.{number:04d}" for number in range(topics)]
    try:
        with ExitStack() as stack:
            peers = [
                stack.enter_context(socket.create_connection((HOST, port), FIRST_TIMEOUT_S))
                for port in ports
            ]
            for peer in peers:
                peer.sendall(boson_frames.encode_subscribe(dict.fromkeys(names, "latest")))
                _await(peer, SUBSCRIBED, topics)
            for name in names:
                peers[0].sendall(boson_frames.encode_publish(name, [FIRST]))
            for peer in peers:
                _await(peer, FIRST, topics)
    except OSError as error:
        raise BenchError(f"the node did not deliver the first messages: {error}") from error


def _await(peer: socket.socket, what: bytes, count: int) -> None:
    said = bytearray()
    while said.count(what) < count:
        said += (more := peer.recv(1 << 16))
        if not more or b"$error" in said:
            text = f"the node did not deliver the first messages: {bytes(said[-100:])!r}"
            raise BenchError(text)


def run_count(rounds: int) -> int:
    producing = rounds if kafka.is_installed() else 0
    return scenario_runs((ONE_TOPIC, *SCENARIOS), rounds) + producing + rounds * len(NODE_COUNTS)
