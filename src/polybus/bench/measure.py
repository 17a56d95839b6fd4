"""Runs the scenarios: a fresh broker for each run, one at a time, in turn; keeps all samples."""

import resource
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from polybus.bench import BenchError, consoles, generator, logins, machine, pages
from polybus.bench.brokers import HOST, BenchBroker, RunningBroker, all_brokers, running
from polybus.bench.scenarios import DISK, Entry, Metric, Scenario, Workload

# The time for set-up, and for delivering messages in flight, in addition to the run itself.
DEADLINE_EXTRA_S = 25.0
IDLE_DEADLINE_S = 60.0
# A process has other open files than sockets.
SPARE_FILES = 256

RunSample = dict[str, Any]


@dataclass(slots=True)
class EntryOutcome:
    """The samples of one contestant of one scenario, of all rounds."""

    entry: Entry
    broker: BenchBroker
    samples: list[RunSample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def value(self, metric: Metric) -> float | None:
        """The median of its runs; None without a successful run."""
        values = [_value(sample, metric) for sample in self.samples]
        return median(values) if values else None

    def p99_us(self) -> float | None:
        """The 99th percentile of the median run, where it was measured."""
        values = [sample["p99_us"] for sample in self.samples if "p99_us" in sample]
        return median(values) if values else None

    def cpu_s_per_million(self) -> float | None:
        """CPU time of the server per million deliveries, in the median run."""
        # A server that works for a flood works for little else.
        runs = [sample.get("flood", sample) for sample in self.samples]
        costs = [
            run["server_cpu_s"] * 1e6 / run["delivered"] for run in runs if run.get("delivered")
        ]
        return median(costs) if costs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How a benchmark is run."""

    program: Path
    """The load generator."""
    data_root: Path | None
    """Where all brokers store their data, each in a temporary folder; None: the system's."""
    rounds: int
    run_s: float

    def brokers(self) -> dict[str, BenchBroker]:
        """The contestants by their name in scenarios."""
        return all_brokers(self.program)

    def measure(self, scenario: Scenario, tell: Callable[[str], None]) -> list[EntryOutcome]:
        """Run one scenario; contestants that cannot run have errors instead of samples."""
        brokers = self.brokers()
        outcomes = [EntryOutcome(entry, brokers[entry.broker]) for entry in scenario.entries]
        # Memory varies little, and ten thousand connections take long: one round is enough.
        rounds = 1 if scenario.metric is Metric.MEMORY else self.rounds
        for number in range(rounds):
            for outcome in _rotated(outcomes, number):
                tell(f"{scenario.name}, round {number + 1}: {outcome.broker.title}")
                # A broker that failed once (not installed, drops messages) is not run again.
                if outcome.errors:
                    continue
                try:
                    outcome.samples.append(self.run(scenario, outcome))
                except BenchError as error:
                    outcome.errors.append(str(error))
        return outcomes

    def run(self, scenario: Scenario, outcome: EntryOutcome) -> RunSample:
        """Run it once. Raises BenchError."""
        load = for_this_machine(outcome.entry.load or scenario.load)
        if outcome.entry.broker == DISK:
            times_us = machine.commit_times_us(self.data_root, load.rate_per_s, self.run_s)
            return {"p50_us": median(times_us), "p99_us": times_us[len(times_us) * 99 // 100]}
        with self.server(outcome.broker, load) as (server, _):
            if load.page:
                return {"last_ms": pages.interactive_ms(HOST, server.port)}
            with ExitStack() as beside:
                if load.logins_per_s:
                    busy = logins.logging_in(HOST, server.port, load.logins_per_s)
                    beside.enter_context(busy)
                if load.consoles:
                    beside.enter_context(consoles.watching(HOST, server.port, load.consoles))
                return self.generate(server, scenario, outcome, load)

    @contextmanager
    def server(self, broker: BenchBroker, load: Workload) -> Iterator[tuple[RunningBroker, Path]]:
        """A fresh broker with the topics of a load, and its folder."""
        count = load.topics + (load.beside is not None)
        topics = [f"bench.{number:04d}" for number in range(count)]
        visitors = logins.VISITORS if load.logins_per_s else 0
        with (
            tempfile.TemporaryDirectory(
                prefix="polybus-bench-", dir=self.data_root, ignore_cleanup_errors=True
            ) as folder,
            running(broker, Path(folder), topics, visitors=visitors) as server,
        ):
            yield server, Path(folder)

    def generate(
        self,
        server: RunningBroker,
        scenario: Scenario,
        outcome: EntryOutcome,
        load: Workload,
        *more: str,
    ) -> RunSample:
        """Drive the broker with the generator; `more` are further arguments. Raises BenchError."""
        idle = scenario.metric is Metric.MEMORY
        broker = outcome.broker
        arguments = [
            *load.arguments(),
            *("--protocol", outcome.entry.protocol or broker.protocol),
            *("--port", str(server.port)),
            *("--subscribe-port", str(server.subscribe_port)),
            *("--server-pid", str(server.pid)),
            *("--window-bytes", str(load.window_bytes or broker.window_bytes)),
            *("--duration-s", str(self.run_s)),
            *more,
        ]
        deadline_s = IDLE_DEADLINE_S if idle else self.run_s + DEADLINE_EXTRA_S
        mode = "idle" if idle else "run"
        sample: RunSample = generator.call(
            self.program, mode, arguments, deadline_s=deadline_s, token=server.token
        )
        return sample


def run_count(scenarios: Iterable[Scenario], rounds: int) -> int:
    """How many runs there are."""
    return sum(
        len(scenario.entries) * (1 if scenario.metric is Metric.MEMORY else rounds)
        for scenario in scenarios
    )


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the hard limit permits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def for_this_machine(load: Workload) -> Workload:
    """The load, with no more subscribers than a process can have open files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or load.subscribers + SPARE_FILES <= hard:
        return load
    return replace(load, subscribers=max(1, hard - SPARE_FILES))


def _rotated(outcomes: list[EntryOutcome], number: int) -> list[EntryOutcome]:
    """Each round begins with another contestant, so that none always follows the same one."""
    start = number % len(outcomes)
    return outcomes[start:] + outcomes[:start]


def _value(sample: RunSample, metric: Metric) -> float:
    if metric is Metric.LATENCY:
        return float(sample["p50_us"])
    if metric is Metric.MEMORY:
        return float(sample["connection_bytes"]) / 1024
    if metric is Metric.WAIT:
        return float(sample["last_ms"])
    return float(sample["delivered"] / sample["seconds"])
