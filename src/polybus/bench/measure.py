"""Run the scenarios: every broker fresh for each run, one at a time, in turn; keep all samples."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from polybus.bench import generator
from polybus.bench.brokers import Broker, Running, all_brokers, running
from polybus.bench.errors import BenchError
from polybus.bench.scenarios import Entry, Load, Metric, Scenario

# What set-up, working off what is under way, and settling may take beyond the run itself.
DEADLINE_EXTRA_S = 25.0
IDLE_DEADLINE_S = 60.0
# Sockets are not all a process opens.
SPARE_FILES = 256

Sample = dict[str, Any]
Progress = Callable[[Scenario, int, Broker], None]
"""Told before each run: the scenario, the round from 0, who is next."""


@dataclass(slots=True)
class Outcome:
    """What one contestant of one scenario did in all rounds."""

    entry: Entry
    broker: Broker
    samples: list[Sample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def value(self, metric: Metric) -> float | None:
        """The median of its runs; None if it has none."""
        values = [_value(sample, metric) for sample in self.samples]
        return median(values) if values else None

    def cpu_s_per_million(self) -> float | None:
        """CPU time of the server for a million deliveries, in the median run."""
        costs = [
            sample["server_cpu_s"] * 1e6 / sample["delivered"]
            for sample in self.samples
            if sample.get("delivered")
        ]
        return median(costs) if costs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How a benchmark is run."""

    program: Path
    """The load generator."""
    data_root: Path | None
    """Where all brokers' data goes, each in a folder that is removed; None: the temp folder."""
    rounds: int
    run_s: float

    def measure(self, scenario: Scenario, progress: Progress) -> list[Outcome]:
        """Run one scenario; contestants that cannot run have errors instead of samples."""
        brokers = all_brokers(self.program)
        outcomes = [
            Outcome(entry=entry, broker=brokers[entry.broker]) for entry in scenario.entries
        ]
        # Memory hardly varies, and connecting so many takes a while: once is enough.
        rounds = 1 if scenario.metric is Metric.MEMORY else self.rounds
        for number in range(rounds):
            for outcome in _rotated(outcomes, number):
                progress(scenario, number, outcome.broker)
                # What failed once (it is not installed, it drops messages) is not asked again.
                if outcome.errors:
                    continue
                try:
                    outcome.samples.append(self.run(scenario, outcome))
                except BenchError as error:
                    outcome.errors.append(str(error))
        return outcomes

    def run(self, scenario: Scenario, outcome: Outcome) -> Sample:
        """Make one run. Raises BenchError."""
        load = for_this_machine(outcome.entry.load or scenario.load)
        with self.server(outcome.broker, load) as (server, _):
            return self.generate(server, scenario, outcome, load)

    @contextmanager
    def server(self, broker: Broker, load: Load) -> Iterator[tuple[Running, Path]]:
        """A fresh broker with the topics of a load, and the folder it may use."""
        topics = [f"bench.{number:04d}" for number in range(load.topics)]
        with (
            tempfile.TemporaryDirectory(
                prefix="polybus-bench-", dir=self.data_root, ignore_cleanup_errors=True
            ) as folder,
            running(broker, Path(folder), topics) as server,
        ):
            yield server, Path(folder)

    def generate(
        self, server: Running, scenario: Scenario, outcome: Outcome, load: Load, *more: str
    ) -> Sample:
        """Drive the broker with the generator; more arguments may follow. Raises BenchError."""
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
        sample: Sample = generator.call(self.program, mode, arguments, deadline_s=deadline_s)
        return sample


def run_count(scenarios: Iterable[Scenario], rounds: int) -> int:
    """How often `progress` will be told."""
    return sum(
        len(scenario.entries) * (1 if scenario.metric is Metric.MEMORY else rounds)
        for scenario in scenarios
    )


def raise_file_limit() -> int:
    """Let this process and what it starts open all the files they may; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def for_this_machine(load: Load) -> Load:
    """The load, with no more subscribers than a process may have open files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or load.subscribers + SPARE_FILES <= hard:
        return load
    return replace(load, subscribers=max(1, hard - SPARE_FILES))


def _rotated(outcomes: list[Outcome], number: int) -> list[Outcome]:
    """Each round begins with another contestant, so none always follows the same one."""
    start = number % len(outcomes)
    return outcomes[start:] + outcomes[:start]


def _value(sample: Sample, metric: Metric) -> float:
    if metric is Metric.LATENCY:
        return float(sample["p50_us"])
    if metric is Metric.MEMORY:
        return float(sample["connection_bytes"])
    if metric is Metric.WAIT:
        return float(sample["last_ms"])
    return float(sample["delivered"] / sample["seconds"])
