"""`polybus replay`: publish history, or quarantined messages, to any topic over any protocol."""

from pathlib import Path
from typing import TextIO

import click

from polybus import names
from polybus.cli.common.options import json_option, without_secret
from polybus.cli.replay.history import HistoryReplay, range_of
from polybus.cli.replay.pace import ReplayPace, parse_rate, parse_speed
from polybus.cli.replay.publishing import ReplayDestination, http_url, split_url
from polybus.cli.replay.ranges import RangesReplay, parse_ranges
from polybus.client.http.blocking import bus_url
from polybus.errors import UsageError
from polybus.spark.location import BusLocation
from polybus.spark.origin import open_origin

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
@click.option("--text", help="With --dead-letters: only if the value contains this text.")
@click.option(
    "--letters",
    type=click.File(),
    help="With --dead-letters: only those in this file, TOPIC:EPOCH:OFFSET a line; - is stdin.",
)
@click.option(
    "--ranges",
    type=click.File(),
    help="Publish these to their topics, TOPIC:EPOCH:FIRST:STOP a line; - is stdin.",
)
@click.option("--progress", is_flag=True, help="With --json: a line of JSON for each part.")
@click.option("--data", help=f"Folder of the log.  [default: {DEFAULT_DATA}]")
@click.option(
    "--url", callback=without_secret, help="Read from this bus, over HTTP, instead of a folder."
)
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
    text: str | None,
    letters: TextIO | None,
    ranges: TextIO | None,
    progress: bool,
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
    mode = "--dead-letters" if dead_letters else "--ranges" if ranges is not None else ""
    if mode and any(one is not None for one in (topic, into, url)):
        raise click.UsageError(f"{mode} cannot be used with TOPIC, --into or --url")
    if not dead_letters and any(one is not None for one in (only_topic, reason, text, letters)):
        raise click.UsageError("--topic, --reason, --text and --letters need --dead-letters")
    if dead_letters and ranges is not None:
        raise click.UsageError("--dead-letters cannot be used with --ranges")
    if dead_letters:
        # It needs the library of the tables, which a replay of history does not.
        from polybus.cli.replay.dead_letters import DeadLetters, LetterFilter, replay_dead_letters

        names_given = None if letters is None else {one.strip() for one in letters if one.strip()}
        wanted = LetterFilter(only_topic, reason, text, names_given)
        found = DeadLetters(folder, wanted, tell_progress=progress)
        replay_dead_letters(found, folder, pace.rate, dry_run=dry_run, as_json=as_json)
        return
    if ranges is not None:
        many = RangesReplay(folder, parse_ranges(ranges), pace, tell_progress=progress)
        (many.print_forecast if dry_run else many.run)(as_json)
        return
    if topic is None or into is None:
        raise click.UsageError("TOPIC or --into is missing: name what to replay, and where it goes")
    source = BusLocation(folder, None if url is None else http_url(url))
    job = _history(names.canonical(topic), source, into, (start, stop), pace)
    if dry_run:
        job.print_forecast(as_json)
    else:
        job.run(f"--into {into}", f"--data {folder}" if url is None else f"--url {url}", as_json)


def _history(
    topic: str, source: BusLocation, into: str, between: tuple[str, str], pace: ReplayPace
) -> HistoryReplay:
    origin = open_origin(source)
    target = _target(into, topic, source)
    offsets = range_of(origin, topic, *between)
    return HistoryReplay(origin, topic, offsets, target, pace, reached=offsets.start)


def _target(into: str, topic: str, source: BusLocation) -> ReplayDestination:
    if "://" in into:
        address, name = split_url(into, topic)
    else:
        address = source.url or bus_url(source.data)
        name = names.canonical(into)
    if names.is_reserved(name):
        text = f"--into {name}: names that begin with $ are reserved for system topics"
        raise UsageError("topic.reserved", text)
    return ReplayDestination(address, name, source)
