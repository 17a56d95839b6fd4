"""`polybus replay`: publish history, or quarantined messages, to any topic over any protocol."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from polybus import names
from polybus.cli import exits
from polybus.cli.options import json_option
from polybus.cli.output import echo, echo_json, say
from polybus.cli.replay.dead_letters import DeadLetters, replay_dead_letters
from polybus.cli.replay.pace import ReplayPace, Schedule, parse_rate, parse_speed
from polybus.cli.replay.publishing import (
    OutgoingRows,
    ReplayDestination,
    ReplayPart,
    local_url,
    publish_parts,
    split_url,
)
from polybus.cli.replay.source import (
    OffsetRange,
    RemoteSource,
    ReplaySource,
    http_url,
    range_of,
    timestamps_us,
)
from polybus.errors import UsageError
from polybus.log.reading.reader import LogReader

DEFAULT_DATA = "./polybus-data"


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
@click.option("--rate", metavar="N/s", help="Publish at most N messages a second.")
@click.option("--dry-run", is_flag=True, help="Print what would be published; publish nothing.")
@click.option("--dead-letters", is_flag=True, help="Publish quarantined messages instead.")
@click.option("--topic", "only_topic", help="With --dead-letters: only messages of this topic.")
@click.option("--reason", help="With --dead-letters: only if the reason contains this text.")
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
    """Publish the history of a topic again.

    Messages are published in their order and at their original pace, or as --speed and --rate say,
    each batch with a receipt. --from and --to take offsets, EPOCH:OFFSET, ISO times, earliest and
    latest. Keys and headers are kept if the protocol carries them.
    """
    pace = ReplayPace(parse_speed(speed), parse_rate(rate))
    if data is not None and url is not None:
        raise click.UsageError("--data and --url both say where to read: give only one")
    folder = Path(data or DEFAULT_DATA)
    if dead_letters:
        if topic is not None or into is not None or url is not None:
            raise click.UsageError("--dead-letters takes --topic and --reason, and a --data folder")
        letters = DeadLetters(folder, only_topic, reason)
        replay_dead_letters(letters, folder, pace.rate, dry_run=dry_run, as_json=as_json)
        return
    if topic is None or into is None:
        raise click.UsageError("give the TOPIC to replay, and with --into where it goes")
    if only_topic is not None or reason is not None:
        raise click.UsageError("--topic and --reason need --dead-letters")
    topic = names.canonical(topic)
    source: ReplaySource = LogReader(folder) if url is None else RemoteSource(url)
    target = _target(into, topic, folder, url)
    offsets = range_of(source, topic, start, stop)
    job = HistoryReplay(source, offsets, target, pace, reached=offsets.start)
    if dry_run:
        job.print_forecast(as_json)
    else:
        job.run(f"--into {into}", f"--data {folder}" if url is None else f"--url {url}", as_json)


def _target(into: str, topic: str, data: Path, url: str | None) -> ReplayDestination:
    if "://" in into:
        address, name = split_url(into, topic)
    else:
        address = local_url(data) if url is None else http_url(url)
        name = names.canonical(into)
    if names.is_reserved(name):
        text = f"--into {name}: names that begin with $ are reserved for system topics"
        raise UsageError("topic.reserved", text)
    return ReplayDestination(address, name)


@dataclass(slots=True)
class HistoryReplay:
    """A replay of stored messages; `reached` is the offset at which it can continue."""

    source: ReplaySource
    range: OffsetRange
    target: ReplayDestination
    pace: ReplayPace
    reached: int

    def parts(self) -> Iterator[ReplayPart]:
        schedule = Schedule(self.pace)
        for batch in self.range.read(self.source):
            for slot in schedule.slots(timestamps_us(batch)):
                rows = OutgoingRows(batch.slice(slot.start, slot.stop - slot.start))
                last = int(batch.column("offset")[slot.stop - 1].as_py())
                done = partial(setattr, self, "reached", last + 1)
                yield ReplayPart(self.target.topic, rows, slot.due_s, done)

    def print_forecast(self, as_json: bool) -> None:
        count, target = len(self.range), str(self.target)
        seconds = self.pace.duration_s(count, self.range.duration_us(self.source))
        about = {"dry-run": True, "messages": count, "seconds-min": round(seconds, 3)}
        echo(
            as_json,
            self._described() | about,
            f"would replay {count} messages of {self.range.topic}, offsets {self.range.start} to "
            f"{self.range.stop}, into {target}, in {seconds:.1f} s or more; nothing was published",
        )

    def run(self, into: str, source: str, as_json: bool) -> None:
        """Raises the error that ended it; `into` and `source` are the options to repeat."""
        topic, target = self.range.topic, self.target
        title = f"{topic} → {target.topic}"
        targets = {target.topic: target}
        result = publish_parts(title, self.parts(), len(self.range), targets, hidden=as_json)
        left_out = {"keys": target.keys_left_out, "headers": target.headers_left_out}
        if as_json:
            figures = {"messages": result.messages, "bytes": result.value_bytes}
            figures |= {"next": self.reached, "done": result.complete}
            notes = {f"{kind}-left-out": count for kind, count in left_out.items()}
            seconds = {"seconds": round(result.seconds, 3)}
            echo_json(self._described() | figures | seconds | notes)
        else:
            rate = result.messages / result.seconds if result.seconds else 0.0
            click.echo(
                f"replayed {result.messages} messages of {topic} into {target} "
                f"in {result.seconds:.1f} s ({rate:.0f}/s)"
            )
            for kind, count in left_out.items():
                if count:
                    click.echo(
                        f"note: {kind} of {count} messages were left out: the protocol has none"
                    )
        if not result.complete and not as_json:
            speed = "max" if self.pace.speed is None else f"{self.pace.speed:g}x"
            rated = "" if self.pace.rate is None else f" --rate {self.pace.rate:g}/s"
            say(
                f"stopped at offset {self.reached}; continue with: polybus replay {topic} --from "
                f"{self.reached} --to {self.range.stop} {into} --speed {speed}{rated} {source}"
            )
        if result.error is not None:
            raise result.error
        exits.end(good=result.complete)

    def _described(self) -> dict[str, Any]:
        places = {"from": self.range.start, "to": self.range.stop}
        return {"topic": self.range.topic, "into": str(self.target), **places}
