"""`polybus bench`: measure this machine, Polybus and its peers, in one run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from polybus.bench import generator, machine, measure, report
from polybus.bench import msgstream as session_bench
from polybus.bench import queues as queue_bench
from polybus.bench.brokers import Broker, all_brokers
from polybus.bench.errors import BenchError
from polybus.bench.scenarios import SCENARIOS, Scenario

TABLE_WIDTH = 140
RUN_S = 1.5
QUICK_S = 0.5
QUICK_MESSAGES = 1_000_000
MESSAGES = 10_000_000
SPARK_STEPS = ("reading", "following", "delays")
QUICK_SESSIONS = {"idle": 2_000, "listeners": 500}


@click.command("bench")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([scenario.name for scenario in SCENARIOS]),
    help="Measure this alone; may be given more than once.",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0.05, 60.0),
    default=RUN_S,
    show_default=True,
    help="How long each run publishes.",
)
@click.option("--quick", is_flag=True, help="One round of half a second each: a first look.")
@click.option(
    "--data-root",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where every broker keeps its data meanwhile (default: the temp folder).",
)
@click.option(
    "--queues",
    is_flag=True,
    help="Measure the queue framework instead, beside pyzmq and multiprocessing.connection.",
)
@click.option(
    "--msgstream",
    is_flag=True,
    help="Measure msgstream sessions instead, beside a plain websockets server.",
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
    help="How many messages --spark reads.",
)
@click.option(
    "--step",
    "steps",
    multiple=True,
    type=click.Choice(SPARK_STEPS),
    help="Of --spark, measure this alone; may be given more than once.",
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
    spark: bool,
    messages: int,
    steps: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the bus against nats-server, redis-server, mosquitto and a bare relay.

    All are driven by the same compiled load generator (a C compiler is needed), one after the other
    in each round, and every delivery is checked. Only ratios within one run mean something. A
    missed bar is said plainly; the exit code is 0 all the same, as this is no test.

    \b
    Examples:
      polybus bench                        everything, about five minutes
      polybus bench --quick                everything once, a minute or two
      polybus bench --only boson-1-1 --only latency --rounds 5
      polybus bench --queues               queues between programs, about a minute
      polybus bench --msgstream            WebSocket sessions and long polls, about a minute
      polybus bench --spark                what Spark does with ten million messages, some minutes
      polybus bench --json > figures.json
    """
    signal.signal(signal.SIGTERM, _end)
    rounds, run_s = (1, QUICK_S) if quick else (rounds, seconds)
    if (queues or msgstream or spark) and only:
        raise click.UsageError("--only goes with neither --queues, --msgstream nor --spark")
    if spark and (queues or msgstream):
        raise click.UsageError("--spark goes with neither --queues nor --msgstream")
    if queues:
        if data_root or msgstream:
            raise click.UsageError("--queues goes with neither --data-root nor --msgstream")
        _bench_queues(rounds, run_s, as_json=as_json)
        return
    try:
        program = generator.compiled()
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    if spark:
        plan = measure.Bench(program=program, data_root=data_root, rounds=rounds, run_s=run_s)
        _bench_spark(plan, min(messages, QUICK_MESSAGES) if quick else messages, steps, as_json)
        return
    kind: type[measure.Bench] = session_bench.SessionBench if msgstream else measure.Bench
    plan = kind(program=program, data_root=data_root, rounds=rounds, run_s=run_s)
    if msgstream:
        _bench_brokers(plan, session_bench.scenarios(**(QUICK_SESSIONS if quick else {})), as_json)
    else:
        chosen = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
        _bench_brokers(plan, chosen, as_json)


def _bench_brokers(plan: measure.Bench, scenarios: Sequence[Scenario], as_json: bool) -> None:
    known = all_brokers(plan.program)
    taking_part = {entry.broker for scenario in scenarios for entry in scenario.entries}
    brokers = {name: broker for name, broker in known.items() if name in taking_part}
    facts = machine.describe(brokers, plan.data_root)
    before_ms = machine.sync_ms(plan.data_root)
    measured = _measure(plan, scenarios)
    after_ms = machine.sync_ms(plan.data_root)
    facts["disk"] = f"write and fsync of 1 MiB: {before_ms:.2f} ms before, {after_ms:.2f} ms after"
    rows = [row for scenario, outcomes in measured for row in report.rows_of(scenario, outcomes)]
    if as_json:
        _print_json(facts, rows, measured)
        return
    console = Console()
    # A pipe says it is 80 wide; nobody looks at that through a window.
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    console.print(report.render(rows, facts))


def _measure(
    plan: measure.Bench, scenarios: Sequence[Scenario]
) -> list[tuple[Scenario, list[measure.Outcome]]]:
    measure.raise_file_limit()
    with _progress() as progress:
        total = measure.run_count(scenarios, plan.rounds)
        task = progress.add_task("starting", total=total, completed=-1)

        def tell(scenario: Scenario, number: int, broker: Broker) -> None:
            text = f"{scenario.name}, round {number + 1}: {broker.title}"
            progress.update(task, description=text, advance=1)

        return [(scenario, plan.measure(scenario, tell)) for scenario in scenarios]


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)


def _bench_queues(rounds: int, run_s: float, *, as_json: bool) -> None:
    with _progress() as progress:
        task = progress.add_task("starting", total=queue_bench.run_count(rounds), completed=-1)

        def tell(text: str) -> None:
            progress.update(task, description=text, advance=1)

        try:
            rows = queue_bench.run_queue_bench(rounds=rounds, scale=run_s / RUN_S, progress=tell)
        except BenchError as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        document = {"machine": machine.describe({}, None), "rows": queue_bench.as_json(rows)}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
    else:
        click.echo(queue_bench.render(rows))


def _bench_spark(plan: measure.Bench, messages: int, steps: tuple[str, ...], as_json: bool) -> None:
    # PySpark is an extra: the other benchmarks do without.
    from polybus.bench.spark import figures as spark_figures
    from polybus.bench.spark.run import SparkBench, run_spark_bench

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        bench = SparkBench(plan, messages, steps or SPARK_STEPS)
        try:
            found = run_spark_bench(bench, lambda text: progress.update(task, description=text))
        except BenchError as error:
            raise click.ClickException(str(error)) from error
    facts = machine.describe({}, plan.data_root)
    if as_json:
        document = {"machine": facts, "figures": [figure.as_json() for figure in found]}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    console.print(spark_figures.render(found, facts))


def _print_json(
    facts: dict[str, str],
    rows: Sequence[report.Row],
    measured: Sequence[tuple[Scenario, list[measure.Outcome]]],
) -> None:
    document = {
        "machine": facts,
        "rows": [row.as_json() for row in rows],
        "samples": {
            scenario.name: [
                {"who": outcome.entry.label or outcome.broker.title, "runs": outcome.samples}
                for outcome in outcomes
            ]
            for scenario, outcomes in measured
        },
    }
    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))


def _end(signum: int, frame: FrameType | None) -> None:
    """Leave through every `finally`, so that no broker and no folder stays behind."""
    sys.exit(128 + signum)
