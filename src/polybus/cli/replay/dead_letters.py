"""`polybus replay --dead-letters`: publish quarantined messages to their topics again, each once.

The lake table `quarantine` holds the messages with their raw bytes; of large ones (`cut`) it holds
the beginning only, and these are left out. The table `replayed` records which were published again.
once.py keeps topic and table consistent, even if a run is interrupted.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.cli.common import exits
from polybus.cli.common.output import echo, echo_json, echo_table, say
from polybus.cli.replay.once import OncePublisher, PublishedPart, opened_publisher
from polybus.cli.replay.pace import ReplayPace, Schedule
from polybus.cli.replay.publishing import OutgoingRows, ReplayPart, publish_parts
from polybus.errors import StorageError, UsageError
from polybus.lake.compact import tidy
from polybus.lake.table import open_table

ORIGIN = "replayed-from"
IDENTITY = ["topic", "epoch", "offset"]
COLUMNS = [*IDENTITY, "key", "value", "headers", "reason", "cut"]
ROWS_MAX = 1000
# Each part is a write to the table `replayed`, so a part is at most one second of messages.
PART_S = 1.0
PART_BYTES = 4 << 20
REPLAYED_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("epoch", pa.int64()),
        ("offset", pa.int64()),
        ("replayed_at", pa.timestamp("us", "UTC")),
    ]
)
WRITER = "replay"


def replay_dead_letters(
    letters: "DeadLetters", data: Path, rate: float | None, *, dry_run: bool, as_json: bool
) -> None:
    """Raises UsageError `client.unreachable`, or the error that ended it."""
    if dry_run:
        _print_counts(_counts(letters, as_json), as_json)
        return
    with opened_publisher(data, letters.record) as publisher:
        if finished := publisher.finish_begun():
            say(f"finished a part of {finished} messages, at which an earlier run had ended")
        total = _counts(letters, as_json).total()
        parts = letters.parts(Schedule(ReplayPace(rate=rate), PART_S), publisher)
        result = publish_parts("dead letters", parts, total, {}, hidden=as_json)
    complete = result.messages == total and result.error is None
    outcome = {"messages": result.messages, "topics": dict(result.by_topic)}
    outcome |= {"left": total - result.messages, "done": complete}
    echo(as_json, outcome, f"put {result.messages} of {total} dead letters back")
    if not complete and not as_json:
        say("run it again to continue: messages that were published are recorded")
    if result.error is not None:
        raise result.error
    exits.end(good=complete)


def _counts(letters: "DeadLetters", as_json: bool) -> Counter[tuple[str, str]]:
    """The messages that can be published; prints those that cannot."""
    counts = letters.counts()
    if letters.cut and not as_json:
        topic, _, offset = min(letters.cut)
        say(
            f"{len(letters.cut)} more are over value-bytes-max: the table has only their "
            f"beginning, the log has all (polybus replay {topic} --from {offset} "
            f"--to {offset + 1} --into {topic} publishes the first of them)"
        )
    return counts


def _print_counts(counts: Counter[tuple[str, str]], as_json: bool) -> None:
    found = sorted(counts.items())
    if as_json:
        waiting = [{"topic": topic, "reason": why, "messages": n} for (topic, why), n in found]
        echo_json({"dry-run": True, "messages": counts.total(), "waiting": waiting})
        return
    echo_table(("topic", "messages", "reason"), [[topic, n, why] for (topic, why), n in found])
    click.echo(f"would put {counts.total()} messages back; nothing was published")


class LetterFilter(NamedTuple):
    """Which messages: all given conditions must hold. `only` has TOPIC:EPOCH:OFFSET of some."""

    topic: str | None = None
    reason: str | None = None
    text: str | None = None
    only: Collection[str] | None = None


class DeadLetters:
    """The rows of `quarantine` that match and are not in `replayed`."""

    def __init__(self, data: Path, wanted: LetterFilter, *, tell_progress: bool = False) -> None:
        """With `tell_progress` each part is a line of JSON.

        Raises UsageError `lake.unknown` if nothing was ever quarantined.
        """
        self._filter = wanted
        self._tells_progress = tell_progress
        self._published = 0
        self._table = open_table(data, "quarantine")
        if not self._table.exists:
            text = f"{data} has no table quarantine: the pipeline has not quarantined anything"
            raise UsageError("lake.unknown", text)
        self._replayed = open_table(data, "replayed")
        self.cut: set[tuple[str, int, int]] = set()
        """The positions of messages that cannot be published from the table."""

    def counts(self) -> Counter[tuple[str, str]]:
        """The number of messages by topic and reason."""
        counts: Counter[tuple[str, str]] = Counter()
        values = [] if self._filter.text is None else ["value"]
        for rows in self.rows([*IDENTITY, "reason", "cut", *values]):
            pairs = (rows.column(name).to_pylist() for name in ("topic", "reason"))
            counts.update(zip(*pairs, strict=True))
        return counts

    def parts(self, schedule: Schedule, publisher: OncePublisher) -> Iterator[ReplayPart]:
        for rows in self.rows():
            for topic in dict.fromkeys(rows.column("topic").to_pylist()):
                own = rows.filter(pc.equal(rows.column("topic"), topic))
                for slot in schedule.slots([0] * own.num_rows):
                    for part in _halved(own.slice(slot.start, slot.stop - slot.start)):
                        marked = _marked(part)
                        publish = partial(publisher.publish, topic, marked, _identities(part))
                        yield ReplayPart(topic, marked, slot.due_s, publish)

    def rows(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The rows in the order in which they were quarantined, some at a time.

        At a low rate this takes hours, and the pipeline compacts the table meanwhile. If a file
        disappears, the table's files are listed again; no row is given twice.
        """
        done = set(_identities(self._replayed.read()) if self._replayed.exists else ())
        pending = self._table.files()
        while pending:
            try:
                with pq.ParquetFile(pending[0]) as file:
                    for batch in file.iter_batches(batch_size=ROWS_MAX, columns=columns or COLUMNS):
                        rows = self._wanted(pa.Table.from_batches([batch]), done)
                        if rows.num_rows:
                            yield rows
                            done.update(_identities(rows))
                del pending[0]
            except FileNotFoundError as error:
                gone, pending = pending[0], self._table.files()
                if gone in pending:
                    raise StorageError("lake.damaged", f"{gone} is missing") from error

    def record(self, part: PublishedPart) -> None:
        """Record that a part was published, once. Raises StorageError."""
        now_us = time.time_ns() // 1000
        rows = [(*letter, now_us) for letter in part.letters]
        noted = pa.table(list(zip(*rows, strict=True)), schema=REPLAYED_SCHEMA)
        self._replayed.append(noted, writer=f"{WRITER}:{part.query}", batch_id=part.batch)
        tidy(self._replayed)
        self._published += len(rows)
        if self._tells_progress:
            click.echo(msgspec.json.encode({"published": self._published}))

    def _wanted(self, rows: pa.Table, done: set[tuple[str, int, int]]) -> pa.Table:
        rows = _matching(rows, self._filter)
        if "cut" in rows.column_names:  # not in files of older versions
            is_cut = pc.fill_null(rows.column("cut"), False)
            self.cut.update(_identities(rows.filter(is_cut)))
            rows = rows.filter(pc.invert(is_cut))
        if done and rows.num_rows:
            rows = rows.filter(pa.array([one not in done for one in _identities(rows)]))
        return rows


def _matching(rows: pa.Table, wanted: LetterFilter) -> pa.Table:
    if wanted.topic is not None:
        rows = rows.filter(pc.equal(rows.column("topic"), wanted.topic.lower()))
    if wanted.reason is not None:
        found = pc.match_substring(rows.column("reason"), wanted.reason, ignore_case=True)
        rows = rows.filter(pc.fill_null(found, False))
    if wanted.text is not None and rows.num_rows:
        sought = wanted.text.encode().lower()
        values = (one.as_py() or b"" for one in rows.column("value"))
        rows = rows.filter(pa.array([sought in value.lower() for value in values]))
    if wanted.only is not None and rows.num_rows:
        names = [":".join(map(str, one)) for one in _identities(rows)]
        rows = rows.filter(pa.array([one in wanted.only for one in names]))
    return rows


def _halved(rows: pa.Table) -> Iterator[pa.Table]:
    """Parts of up to PART_BYTES, or of one row: each is one transaction."""
    if rows.nbytes <= PART_BYTES or rows.num_rows == 1:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _halved(rows.slice(0, half))
    yield from _halved(rows.slice(half))


def _identities(rows: pa.Table) -> list[tuple[str, int, int]]:
    return list(zip(*(rows.column(name).to_pylist() for name in IDENTITY), strict=True))


def _marked(rows: pa.Table) -> OutgoingRows:
    """The messages, each with a header that names its original position."""
    messages = OutgoingRows(rows.combine_chunks().to_batches()[0])
    messages.headers = [
        [
            *((name, value) for name, value in headers or () if name != ORIGIN),
            (ORIGIN, f"{topic}:{epoch}:{offset}".encode()),
        ]
        for headers, (topic, epoch, offset) in zip(messages.headers, _identities(rows), strict=True)
    ]
    return messages
