"""`polybus replay`: history again, into any topic over any protocol; or what was quarantined."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from polybus import names
from polybus.cli import admin
from polybus.cli.options import json_option
from polybus.cli.output import echo_json
from polybus.cli.replay.pace import Pace, Schedule, parse_rate, parse_speed
from polybus.errors import PolybusError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.cli.replay.history import History, Span
    from polybus.cli.replay.target import Target

DEFAULT_DATA = "./polybus-data"


@dataclass(slots=True)
class Outcome:
    """What a replay did: `reached` is the offset to go on from."""

    reached: int
    messages: int = 0
    value_bytes: int = 0
    seconds: float = 0.0
    stopped: bool = False
    error: PolybusError | None = field(default=None)


@click.command(
    epilog="""\b
Examples:
  polybus replay orders --into orders-test --from 2026-01-31T08:00:00Z --to 2026-01-31T09:00:00Z
  polybus replay orders --into goms://staging:55545/orders --speed 2x
  polybus replay orders --into orders-copy --speed max --dry-run
  polybus replay --dead-letters --topic orders --rate 100/s
"""
)
@click.argument("topic", required=False)
@click.option("--from", "start", default="earliest", show_default=True, help="Where to begin.")
@click.option("--to", "stop", default="latest", show_default=True, help="Where to end, exclusive.")
@click.option("--into", metavar="TOPIC|URL", help="A topic, or URL/TOPIC of any protocol.")
@click.option("--speed", default="original", show_default=True, help="original, max, or 2x, 0.5x …")
@click.option("--rate", metavar="N/s", help="At most so many messages a second.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--dead-letters", is_flag=True, help="Put quarantined messages back instead.")
@click.option("--topic", "only_topic", help="With --dead-letters: of this topic only.")
@click.option("--reason", help="With --dead-letters: whose reason has this text in it.")
@click.option("--data", help=f"Folder of the log.  [default: {DEFAULT_DATA}]")
@click.option("--url", help="Read from this bus, over HTTP, instead of a folder.")
@json_option
def replay(
    topic: str | None,
    start: str,
    stop: str,
    into: str | None,
    speed: str,
    rate: str | None,
    dry_run: bool,
    dead_letters: bool,
    only_topic: str | None,
    reason: str | None,
    data: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Publish a topic's history again.

    Messages go out at the pace they once came in, or as --speed and --rate say, in their order,
    each batch with its receipt. --from and --to take offsets, EPOCH:OFFSET, ISO times, earliest
    and latest. Keys and headers are kept where the protocol has them.
    """
    pace = Pace(parse_speed(speed), parse_rate(rate))
    if data is not None and url is not None:
        raise click.UsageError("--data and --url are two places to read from: give one")
    if dead_letters:
        if topic is not None or into is not None or url is not None:
            raise click.UsageError("--dead-letters takes --topic and --reason, and a --data folder")
        from polybus.cli.replay.dead_letters import put_back

        put_back(
            Path(data or DEFAULT_DATA),
            (only_topic, reason),
            pace.rate,
            dry_run=dry_run,
            as_json=as_json,
        )
        return
    if topic is None or into is None:
        raise click.UsageError("name the TOPIC to replay, and where it goes with --into")
    if only_topic is not None or reason is not None:
        raise click.UsageError("--topic and --reason go with --dead-letters")
    job = _job(names.canonical(topic), into, Path(data or DEFAULT_DATA), url)
    _replay(job, start, stop, pace, dry_run=dry_run, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Job:
    """Where from, where to."""

    topic: str
    history: History
    target: Target
    said_into: str
    said_from: str


def _job(topic: str, into: str, data: Path, url: str | None) -> Job:
    # Heavy: the files are Arrow and Parquet.
    from polybus.cli.replay.history import LocalHistory, RemoteHistory, http_url
    from polybus.cli.replay.target import Target, split_url

    history: History = LocalHistory(data) if url is None else RemoteHistory(url)
    said_from = f"--data {data}" if url is None else f"--url {url}"
    if "://" in into:
        address, name = split_url(into, topic)
    else:
        address = http_url(url) if url is not None else local_url(data)
        name = names.canonical(into)
    if names.is_reserved(name):
        raise UsageError("topic.reserved", f"--into {name}: names with $ are the system's")
    return Job(topic, history, Target(address, name), into, said_from)


def local_url(data: Path) -> str:
    """The HTTP address of the bus that runs on the folder. Raises UsageError."""
    from polybus.client.http.blocking import bus_url

    if admin.running(data) is None:
        text = f"no bus runs on {data}, and a replay publishes to one"
        raise UsageError("client.unreachable", text)
    return bus_url(data)


def _replay(job: Job, start: str, stop: str, pace: Pace, *, dry_run: bool, as_json: bool) -> None:
    from polybus.cli.replay.history import span_of

    span = span_of(job.history, job.topic, start, stop)
    if dry_run:
        _say_forecast(job, span, pace, as_json=as_json)
        return
    with progress_bar(f"{job.topic} → {job.target.topic}", len(span), hidden=as_json) as advance:
        outcome = asyncio.run(_run(job, span, pace, advance))
    _say_outcome(job, span, outcome, (pace, as_json))
    if outcome.error is not None:
        raise outcome.error
    if outcome.stopped:
        sys.exit(1)


async def _run(job: Job, span: Span, pace: Pace, advance: Callable[[int], None]) -> Outcome:
    outcome = Outcome(span.start)
    halt = asyncio.Event()
    began_s = time.monotonic()
    with stopped_by_signals(halt):
        try:
            async with job.target:
                await _pump(job, span, Schedule(pace), (halt, outcome, advance))
        except PolybusError as error:
            outcome.error = error
    outcome.seconds = time.monotonic() - began_s
    return outcome


async def _pump(
    job: Job,
    span: Span,
    schedule: Schedule,
    progress: tuple[asyncio.Event, Outcome, Callable[[int], None]],
) -> None:
    from polybus.cli.replay.history import timestamps_us
    from polybus.cli.replay.target import Rows

    halt, outcome, advance = progress
    began_s = time.monotonic()
    batches: Iterator[pa.RecordBatch] = job.history.read(span.topic, span.start, span.stop)
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        for slot in schedule.slots(timestamps_us(batch)):
            if not await pause(halt, began_s + slot.due_s - time.monotonic()):
                outcome.stopped = True
                return
            rows = Rows(batch.slice(slot.start, slot.stop - slot.start))
            await job.target.send(rows)
            outcome.reached = int(batch.column("offset")[slot.stop - 1].as_py()) + 1
            outcome.messages += len(rows.values)
            outcome.value_bytes += sum(map(len, rows.values))
            advance(len(rows.values))


async def pause(halt: asyncio.Event, seconds: float) -> bool:
    """Wait so long; False if the user wants an end meanwhile."""
    if seconds > 0 and not halt.is_set():
        try:
            async with asyncio.timeout(seconds):
                await halt.wait()
        except TimeoutError:
            pass
    return not halt.is_set()


class stopped_by_signals:
    """Ctrl-C and SIGTERM set the event, so that the batch at work is finished first."""

    def __init__(self, halt: asyncio.Event) -> None:
        self._halt = halt

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._halt.set)

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class progress_bar:
    """A bar on standard error, when that is a terminal; gives a function that moves it."""

    def __init__(self, text: str, total: int, *, hidden: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=hidden or not console.is_terminal,
        )
        self._task = self._bar.add_task(text[:60], total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda count: self._bar.advance(self._task, count)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _say_forecast(job: Job, span: Span, pace: Pace, *, as_json: bool) -> None:
    from polybus.cli.replay.history import sample_time_us

    first = sample_time_us(job.history, span, span.start)
    last = sample_time_us(job.history, span, span.stop - 1)
    span_us = 0 if first is None or last is None else max(0, last - first)
    seconds = round(pace.duration_s(len(span), span_us), 3)
    if as_json:
        about: dict[str, Any] = {"dry-run": True, "messages": len(span), "seconds-min": seconds}
        echo_json({"topic": span.topic, "into": str(job.target), **about, **_range(span)})
        return
    click.echo(
        f"would replay {len(span)} messages of {span.topic}, offsets {span.start} to {span.stop}, "
        f"into {job.target}, in {seconds:.1f} s or more; nothing was published"
    )


def _range(span: Span) -> dict[str, int]:
    return {"from": span.start, "to": span.stop}


def _say_outcome(job: Job, span: Span, outcome: Outcome, how: tuple[Pace, bool]) -> None:
    pace, as_json = how
    target = job.target
    done = outcome.error is None and not outcome.stopped
    left_out = {"keys-left-out": target.keys_left_out, "headers-left-out": target.headers_left_out}
    if as_json:
        figures = {"messages": outcome.messages, "bytes": outcome.value_bytes}
        rest = {"seconds": round(outcome.seconds, 3), "next": outcome.reached, "done": done}
        where: dict[str, Any] = {"topic": span.topic, "into": str(target), **_range(span)}
        echo_json(where | figures | rest | left_out)
        return
    rate = outcome.messages / outcome.seconds if outcome.seconds else 0.0
    click.echo(
        f"replayed {outcome.messages} messages of {span.topic} into {target} "
        f"in {outcome.seconds:.1f} s ({rate:.0f}/s)"
    )
    for what, count in left_out.items():
        if count:
            kind = what.partition("-")[0]
            click.echo(f"note: {kind} of {count} messages were left out: the protocol has none")
    if not done:
        speed = "max" if pace.speed is None else f"{pace.speed:g}x"
        rated = "" if pace.rate is None else f" --rate {pace.rate:g}/s"
        click.echo(
            f"stopped at offset {outcome.reached}; go on with: polybus replay {span.topic} "
            f"--from {outcome.reached} --to {span.stop} --into {job.said_into} --speed {speed}"
            f"{rated} {job.said_from}",
            err=True,
        )
