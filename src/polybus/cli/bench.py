"""`polybus bench`: measure Polybus, its peers and this machine in one run."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from polybus.bench import BenchError, generator, machine, measure, report
from polybus.bench import blobs as blob_bench
from polybus.bench import msgstream as session_bench
from polybus.bench import queues as queue_bench
from polybus.bench.brokers import all_brokers
from polybus.bench.scenarios import SCENARIOS, Scenario
from polybus.cli.common import exits
from polybus.cli.common.output import echo_table, progress_bar

RUN_S = 1.5
QUICK_S = 0.5
QUICK_MESSAGES = 1_000_000
MESSAGES = 10_000_000
KINDS = "--only, --queues, --msgstream, --blobs, --cluster, --spark"
SPARK_STEPS = ("reading", "following", "planning", "delays")
QUICK_SESSIONS = {"idle": 2_000, "listeners": 500}

NAMES = [scenario.name for scenario in SCENARIOS]
_FIRST_WORDS = Counter(name.partition("-")[0] for name in NAMES)
FAMILIES = [word for word, count in _FIRST_WORDS.items() if count > 1 and word not in NAMES]

Measured = tuple[list[report.BenchFigure], dict[str, str], dict[str, Any]]
"""The figures, the facts about the machine, and every sample by scenario."""


@click.command("bench")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*FAMILIES, *NAMES]),
    help="Measure only this scenario, or all scenarios with this prefix; may be repeated.",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 60.0),
    default=RUN_S,
    show_default=True,
    help="How long each run publishes.",
)
@click.option("--quick", is_flag=True, help="One round of half a second each.")
@click.option(
    "--data-root",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where all brokers store their data during the run (default: the temp folder).",
)
@click.option(
    "--queues",
    is_flag=True,
    help="Measure the queue framework instead; compare pyzmq and multiprocessing.connection.",
)
@click.option(
    "--msgstream",
    is_flag=True,
    help="Measure msgstream sessions instead; compare a plain websockets server.",
)
@click.option(
    "--blobs",
    is_flag=True,
    help="Measure a payload of 1 GiB instead; compare cp and nginx.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Measure nodes over three Kafka brokers instead; compare Kafka's client and JetStream.",
)
@click.option(
    "--spark",
    is_flag=True,
    help="Measure the data pipeline instead: source, SQL, streams, delays (polybus[spark]).",
)
@click.option(
    "--messages",
    type=click.IntRange(1_000, 1_000_000_000),
    default=MESSAGES,
    show_default=True,
    help="Number of messages that --spark reads.",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=click.Choice(SPARK_STEPS),
    help="With --spark: measure only this step; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON with every sample.")
def bench(
    only: tuple[str, ...],
    rounds: int,
    seconds: float,
    quick: bool,
    data_root: Path | None,
    queues: bool,
    msgstream: bool,
    blobs: bool,
    cluster: bool,
    spark: bool,
    messages: int,
    steps: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the bus and compare it with nats-server, redis-server, mosquitto and a bare relay.

    The same compiled load generator (it needs a C compiler) drives all of them in turn, and checks
    every delivery. Compare only ratios within one run. A missed target is not an error.

    \b
    Examples:
      polybus bench                        everything, about ten minutes
      polybus bench --quick                everything once, about two minutes
      polybus bench --only boson-1-1 --only latency --rounds 5
      polybus bench --queues               queues between programs, about a minute
      polybus bench --msgstream            sessions and long polls, about a minute
      polybus bench --blobs                1 GiB in and out, about a minute
      polybus bench --cluster              nodes over Kafka, some minutes (polybus[cluster])
      polybus bench --spark                Spark with ten million messages, some minutes
      polybus bench --json > figures.json
    """
    _check_kinds(data_root, queues, bool(only), msgstream, blobs, cluster, spark)
    # Leave through every `finally`, so that no broker and no folder stays behind.
    signal.signal(signal.SIGTERM, exits.end_by_signal)
    rounds, run_s = (1, QUICK_S) if quick else (rounds, seconds)
    try:
        with progress_bar("starting") as update:
            if queues:
                measured = _measure_queues(rounds, run_s, update)
            elif blobs:
                measured = _measure_blobs(data_root, quick, rounds, update)
            else:
                kind = session_bench.SessionBench if msgstream else measure.Bench
                program = generator.compiled()
                plan = kind(program=program, data_root=data_root, rounds=rounds, run_s=run_s)
                if cluster:
                    measured = _measure_cluster(plan, quick, update)
                elif spark:
                    count = min(messages, QUICK_MESSAGES) if quick else messages
                    measured = _measure_spark(plan, count, steps or SPARK_STEPS, update)
                elif msgstream:
                    chosen = session_bench.scenarios(**(QUICK_SESSIONS if quick else {}))
                    measured = _measure_scenarios(plan, chosen, update)
                else:
                    named = [one for one in SCENARIOS if not only or _is_chosen(one.name, only)]
                    measured = _measure_scenarios(plan, named, update)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    _print(measured, as_json)


def _check_kinds(data_root: Path | None, queues: bool, *others: bool) -> None:
    if queues + sum(others) > 1:
        raise click.UsageError(f"give only one of {KINDS}")
    if queues and data_root:
        raise click.UsageError("--queues stores nothing: use it without --data-root")


def _is_chosen(name: str, only: tuple[str, ...]) -> bool:
    return name in only or name.partition("-")[0] in set(only).intersection(FAMILIES)


def _print(measured: Measured, as_json: bool) -> None:
    figures, facts, samples = measured
    if as_json:
        rows = [figure.as_json() for figure in figures]
        document = {"machine": facts, "rows": rows, "samples": samples}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    echo_table(*report.table(figures))
    lines = [f"{name}: {text}" for name, text in facts.items()]
    click.echo("\n".join(["", *lines, "", *report.summary(figures)]))


def _measure_queues(rounds: int, run_s: float, update: Callable[..., None]) -> Measured:
    update(total=queue_bench.run_count(rounds))
    scale, tell = run_s / RUN_S, partial(_tell, update)
    figures = queue_bench.run_queue_bench(rounds=rounds, scale=scale, tell=tell)
    facts = machine.describe({}, None)
    if not queue_bench.has_zmq():
        facts["pyzmq"] = "not installed, so its rows and targets are missing: pip install pyzmq"
    return figures, facts, {}


def _measure_blobs(
    data_root: Path | None, quick: bool, rounds: int, update: Callable[..., None]
) -> Measured:
    size = blob_bench.QUICK_SIZE if quick else blob_bench.SIZE
    update(total=blob_bench.run_count(rounds))
    tell = partial(_tell, update)
    figures = blob_bench.run_blob_bench(data_root, size=size, rounds=rounds, tell=tell)
    return figures, machine.describe({}, data_root), {}


def _measure_cluster(plan: measure.Bench, quick: bool, update: Callable[..., None]) -> Measured:
    # aiokafka is an extra that the other benchmarks do not need.
    from polybus.bench import cluster

    update(total=cluster.run_count(plan.rounds))
    count = cluster.QUICK_MESSAGES if quick else cluster.MESSAGES
    figures = cluster.run_cluster_bench(plan, count, partial(_tell, update))
    return figures, machine.describe({}, plan.data_root), {}


def _measure_spark(
    plan: measure.Bench, messages: int, steps: tuple[str, ...], update: Callable[..., None]
) -> Measured:
    # PySpark is an extra that the other benchmarks do not need.
    from polybus.bench.spark import run_spark_bench

    figures = run_spark_bench(plan, messages, steps, partial(_tell, update))
    return figures, machine.describe({}, plan.data_root), {}


def _measure_scenarios(
    plan: measure.Bench, scenarios: Sequence[Scenario], update: Callable[..., None]
) -> Measured:
    update(total=measure.run_count(scenarios, plan.rounds))
    names = {entry.broker for scenario in scenarios for entry in scenario.entries}
    brokers = {name: broker for name, broker in all_brokers(plan.program).items() if name in names}
    measure.raise_file_limit()
    load, before_ms = os.getloadavg()[0], machine.sync_ms(plan.data_root)
    outcomes = {one: plan.measure(one, partial(_tell, update)) for one in scenarios}
    after_ms = machine.sync_ms(plan.data_root)
    facts = machine.describe(brokers, plan.data_root)
    facts["load"] = f"{load:.1f} before the run: what other programs ran in the last minute"
    facts["disk"] = f"write and fsync of 1 MiB: {before_ms:.2f} ms before, {after_ms:.2f} ms after"
    samples = {
        scenario.name: [
            {"who": one.entry.label or one.broker.title, "runs": one.samples} for one in found
        ]
        for scenario, found in outcomes.items()
    }
    figures = [one for pair in outcomes.items() for one in report.figures_of(*pair)]
    return figures, facts, samples


def _tell(update: Callable[..., None], text: str) -> None:
    update(description=text, advance=1)
