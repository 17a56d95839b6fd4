"""`polybus replay --ranges`: messages of many topics, each to its topic again.

A range is TOPIC:EPOCH:FIRST:STOP. Nothing is recorded: a second run publishes again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import click
import msgspec

from polybus import names
from polybus.cli.common import exits
from polybus.cli.common.output import echo, say
from polybus.cli.replay.history import rows_of, timestamps_us
from polybus.cli.replay.pace import ReplayPace, Schedule
from polybus.cli.replay.publishing import OutgoingRows, ReplayDestination, ReplayPart, publish_parts
from polybus.errors import UsageError
from polybus.log.reading.offset_reader import OffsetReader
from polybus.spark.location import BusLocation
from polybus.spark.origin import open_origin


class OffsetRange(NamedTuple):
    """Messages of a topic, from `first` up to `stop`."""

    topic: str
    epoch: int
    first: int
    stop: int


def parse_ranges(lines: Iterable[str]) -> list[OffsetRange]:
    """Raises click.BadParameter; UsageError `topic.reserved`."""
    found = []
    for line in filter(None, map(str.strip, lines)):
        topic, *numbers = line.rsplit(":", 3)
        if len(numbers) < 3 or not all(one.isascii() and one.isdigit() for one in numbers):
            text = f"{line[:80]!r} is not TOPIC:EPOCH:FIRST:STOP"
            raise click.BadParameter(text, param_hint="--ranges")
        if names.is_reserved(topic):
            text = f"{topic}: names that begin with $ are reserved for system topics"
            raise UsageError("topic.reserved", text)
        found.append(OffsetRange(names.canonical(topic), *map(int, numbers)))
    return found


class RangesReplay:
    """A replay of ranges; what retention has removed meanwhile is left out, and counted."""

    def __init__(
        self, data: Path, ranges: list[OffsetRange], pace: ReplayPace, *, tell_progress: bool
    ) -> None:
        """Raises UsageError `data.not-found`."""
        self._source = BusLocation(data, None)
        self._origin: OffsetReader = open_origin(self._source)
        self._ranges = ranges
        self._pace = pace
        self._tells_progress = tell_progress
        self._published = 0
        self._expired = 0

    def print_forecast(self, as_json: bool) -> None:
        counts: Counter[str] = Counter()
        for one in self._ranges:
            counts[one.topic] += len(self._held(one))
        outcome = {"dry-run": True, "messages": counts.total(), "topics": dict(counts)}
        text = f"would publish {counts.total()} messages of {len(counts)} topics again"
        echo(as_json, outcome | {"expired": self._expired}, f"{text}; nothing was published")

    def run(self, as_json: bool) -> None:
        """Raises UsageError `client.unreachable`, or the error that ended it."""
        target = ReplayDestination(self._address(), "", self._source)
        targets = {topic: target.beside(topic) for topic in {one.topic for one in self._ranges}}
        total = sum(one.stop - one.first for one in self._ranges)
        result = publish_parts("ranges", self._parts(), total, targets, hidden=as_json)
        outcome = {"messages": result.messages, "topics": dict(result.by_topic)}
        outcome |= {"expired": self._expired, "done": result.complete}
        echo(as_json, outcome, f"published {result.messages} of {total} messages again")
        if self._expired and not as_json:
            say(f"{self._expired} messages were removed by retention")
        if result.error is not None:
            raise result.error
        exits.end(good=result.complete)

    def _address(self) -> str:
        """The bus of the folder, as its administrator: topics may belong to any account."""
        url, token = self._source.address()
        return url if token is None else url.replace("://", f"://{quote(token, safe='')}@", 1)

    def _parts(self) -> Iterator[ReplayPart]:
        schedule = Schedule(self._pace)
        for one in self._ranges:
            offsets = self._held(one)
            for batch in rows_of(self._origin, one.topic, offsets) if offsets else ():
                for slot in schedule.slots(timestamps_us(batch)):
                    rows = OutgoingRows(batch.slice(slot.start, slot.stop - slot.start))
                    done = partial(self._note, slot.stop - slot.start)
                    yield ReplayPart(one.topic, rows, slot.due_s, done)

    def _held(self, one: OffsetRange) -> range:
        """The offsets that the topic still has. Raises UsageError if it never had them."""
        bounds = self._origin.bounds(one.topic)
        if bounds.epoch != one.epoch or one.stop > bounds.stop:
            place = f"{one.epoch}:{one.first} to {one.epoch}:{one.stop}"
            text = f"topic {one.topic!r} does not have {place}; it has {bounds.epoch}:"
            raise UsageError("log.offset-unknown", f"{text}{bounds.start} to {bounds.stop}")
        first = max(one.first, min(bounds.start, one.stop))
        self._expired += max(0, first - one.first)
        return range(first, one.stop)

    def _note(self, count: int) -> None:
        self._published += count
        if self._tells_progress:
            click.echo(msgspec.json.encode({"published": self._published}))
