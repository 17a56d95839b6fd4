"""The replay of stored messages: the offsets, the source, and the output."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import pyarrow as pa

from polybus.cli.common import exits
from polybus.cli.common.output import echo, echo_json, say
from polybus.cli.replay.pace import ReplayPace, Schedule
from polybus.cli.replay.publishing import OutgoingRows, ReplayDestination, ReplayPart, publish_parts
from polybus.errors import UsageError
from polybus.log.interface import Bounds
from polybus.log.reading.offset_reader import OffsetReader
from polybus.spark.origin import BATCH_BYTES_MAX, ROWS_MAX
from polybus.wire.positions import Earliest, Latest, Position, parse_start

COLUMNS = ("offset", "timestamp", "key", "value", "headers")


@dataclass(slots=True)
class HistoryReplay:
    """A replay of stored messages; `reached` is the offset at which it can continue."""

    origin: OffsetReader
    topic: str
    offsets: range
    target: ReplayDestination
    pace: ReplayPace
    reached: int

    def parts(self) -> Iterator[ReplayPart]:
        schedule = Schedule(self.pace)
        for batch in rows_of(self.origin, self.topic, self.offsets):
            for slot in schedule.slots(timestamps_us(batch)):
                rows = OutgoingRows(batch.slice(slot.start, slot.stop - slot.start))
                last = int(batch.column("offset")[slot.stop - 1].as_py())
                done = partial(setattr, self, "reached", last + 1)
                yield ReplayPart(self.target.topic, rows, slot.due_s, done)

    def print_forecast(self, as_json: bool) -> None:
        count = len(self.offsets)
        seconds = self.pace.duration_s(count, self._duration_us())
        about = {"dry-run": True, "messages": count, "seconds-min": round(seconds, 3)}
        echo(
            as_json,
            self._described() | about,
            f"would replay {count} messages of {self.topic}, offsets {self.offsets.start} to "
            f"{self.offsets.stop}, into {self.target}, in {seconds:.1f} s or more; nothing was "
            "published",
        )

    def run(self, into: str, source: str, as_json: bool) -> None:
        """Raises the error that ended it; `into` and `source` are the options to repeat."""
        topic, target = self.topic, self.target
        title = f"{topic} → {target.topic}"
        targets = {target.topic: target}
        result = publish_parts(title, self.parts(), len(self.offsets), targets, hidden=as_json)
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
                        f"warning: {kind} of {count} messages were dropped: "
                        "the protocol does not support them"
                    )
        if not result.complete and not as_json:
            speed = "max" if self.pace.speed is None else f"{self.pace.speed:g}x"
            rated = "" if self.pace.rate is None else f" --rate {self.pace.rate:g}/s"
            say(
                f"stopped at offset {self.reached}; continue with: polybus replay {topic} --from "
                f"{self.reached} --to {self.offsets.stop} {into} --speed {speed}{rated} {source}"
            )
        if result.error is not None:
            raise result.error
        exits.end(good=result.complete)

    def _described(self) -> dict[str, Any]:
        places = {"from": self.offsets.start, "to": self.offsets.stop}
        return {"topic": self.topic, "into": str(self.target), **places}

    def _duration_us(self) -> int:
        """The time between the first message and the last."""
        times_us = [
            timestamps_us(rows)[0]
            for end in (self.offsets[:1], self.offsets[-1:])
            for rows in rows_of(self.origin, self.topic, end)
        ]
        return max(0, times_us[-1] - times_us[0]) if times_us else 0


def rows_of(origin: OffsetReader, topic: str, offsets: range) -> Iterator[pa.RecordBatch]:
    plan = origin.plan(topic, offsets.start, offsets.stop)
    return origin.read_plan(plan, columns=COLUMNS, rows_max=ROWS_MAX, bytes_max=BATCH_BYTES_MAX)


def range_of(origin: OffsetReader, topic: str, start: str, stop: str) -> range:
    """Resolve offsets, `EPOCH:OFFSET`, times, `earliest` and `latest` to offsets.

    Raises UsageError `topic.unknown` or `log.offset-unknown`, or PeerError `position.invalid`.
    """
    bounds = origin.bounds(topic)
    first, last = (_resolved(origin, topic, bounds, text) for text in (start, stop))
    if not bounds.start <= first <= bounds.stop or not bounds.start <= last <= bounds.stop:
        text = f"offsets {first} to {last} of {topic!r} were requested; the topic has"
        raise UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")
    return range(first, max(first, last))


def _resolved(origin: OffsetReader, topic: str, bounds: Bounds, text: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    position = parse_start(text)
    match position:
        case Earliest():
            return bounds.start
        case Latest():
            return bounds.stop
        case Position(epoch, offset):
            if epoch != bounds.epoch:
                problem = f"{text} is of another epoch of {topic!r}, which is now {bounds.epoch}"
                raise UsageError("log.offset-unknown", problem)
            return offset
    offset = origin.offset_at(topic, position.timestamp_us)
    # Messages may have arrived or expired since `bounds` was read.
    return min(max(bounds.start, offset), bounds.stop)


def timestamps_us(rows: pa.RecordBatch) -> list[int]:
    found: list[int] = rows.column("timestamp").cast(pa.int64()).to_pylist()
    return found
