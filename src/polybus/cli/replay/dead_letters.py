"""`polybus replay --dead-letters`: quarantined messages go back into their topics, each once.

The lake table `quarantine` has them with their raw bytes, `replayed` says which have gone back. A
message carries the header `replayed-from`, so that whoever reads it knows where it was before, and
can tell the rare one that a crash between publishing and noting it made come twice.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.cli.output import echo_json, echo_table
from polybus.cli.replay import local_url, pause, progress_bar, stopped_by_signals
from polybus.cli.replay.target import Rows, Target
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.lake.compact import tidy
from polybus.lake.table import LakeTable, open_table

ORIGIN = "replayed-from"
IDENTITY = ["topic", "epoch", "offset"]
COLUMNS = [*IDENTITY, "key", "value", "headers", "reason"]
ROWS_MAX = 1000
REPLAYED_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("epoch", pa.int64()),
        ("offset", pa.int64()),
        ("replayed_at", pa.timestamp("us", "UTC")),
    ]
)
WRITER = "replay"


def put_back(
    data: Path,
    which: tuple[str | None, str | None],
    rate: float | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish what is in quarantine, of a topic and with a reason if named, and was not put back.

    Raises:
        UsageError: `lake.unknown`, nothing was ever quarantined; `client.unreachable`.
    """
    topic, reason = which
    letters = DeadLetters(data, None if topic is None else topic.lower(), reason)
    if dry_run:
        _say_counts(letters.counts(), as_json)
        return
    total = sum(letters.counts().values())
    url = local_url(data) if total else ""
    with progress_bar("dead letters", total, hidden=as_json) as advance:
        outcome = asyncio.run(_put_back(letters, url, rate, advance))
    error: PolybusError | None = outcome.pop("error")
    done = outcome["messages"] == total and error is None
    if as_json:
        echo_json(outcome | {"left": total - outcome["messages"], "done": done})
    else:
        click.echo(f"put {outcome['messages']} of {total} dead letters back")
        if not done:
            click.echo("run it again to go on: what was put back is noted", err=True)
    if error is not None:
        raise error
    if not done:
        sys.exit(1)


class DeadLetters:
    """The rows of `quarantine` that are wanted and not in `replayed`."""

    def __init__(self, data: Path, topic: str | None, reason: str | None) -> None:
        self._table = open_table(data, "quarantine")
        if not self._table.exists:
            text = f"{data} has no table quarantine: the pipeline never quarantined anything there"
            raise UsageError("lake.unknown", text)
        self._replayed: LakeTable = open_table(data, "replayed")
        self._topic = topic
        self._reason = reason

    def counts(self) -> dict[tuple[str, str], int]:
        """How many wait, by topic and reason."""
        counts: dict[tuple[str, str], int] = {}
        for rows in self.rows(["topic", "epoch", "offset", "reason"]):
            pairs = rows.select(["topic", "reason"]).group_by(["topic", "reason"])
            for row in pairs.aggregate([([], "count_all")]).to_pylist():
                key = (row["topic"], row["reason"])
                counts[key] = counts.get(key, 0) + row["count_all"]
        return counts

    def rows(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """What is to be put back, in the order it was quarantined, some rows at a time.

        At a low rate this takes hours, and the pipeline merges the table's files meanwhile: when
        one is gone, the table is looked at again, and what was given is not given twice.
        """
        done = self._done()
        pending = self._table.files()
        while pending:
            try:
                for rows in self._rows_of(pending[0], columns or COLUMNS, done):
                    yield rows
                    done |= _identities(rows)
                del pending[0]
            except FileNotFoundError as error:
                gone, pending = pending[0], self._table.files()
                if gone in pending:
                    raise StorageError("lake.damaged", f"{gone} is missing") from error

    def _rows_of(
        self, path: Path, columns: list[str], done: set[tuple[str, int, int]]
    ) -> Iterator[pa.Table]:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_MAX, columns=columns):
                rows = self._wanted(pa.Table.from_batches([batch]), done)
                if rows.num_rows:
                    yield rows

    def note(self, rows: pa.Table) -> None:
        """These are back in their topics. Raises StorageError."""
        now = pa.scalar(time.time_ns() // 1000, pa.timestamp("us", "UTC"))
        noted = rows.select(IDENTITY).append_column("replayed_at", pa.repeat(now, rows.num_rows))
        self._replayed.append(noted.cast(REPLAYED_SCHEMA), writer=WRITER, batch_id=None)
        tidy(self._replayed)

    def _done(self) -> set[tuple[str, int, int]]:
        if not self._replayed.exists:
            return set()
        return _identities(self._replayed.read())

    def _wanted(self, rows: pa.Table, done: set[tuple[str, int, int]]) -> pa.Table:
        if self._topic is not None:
            rows = rows.filter(pc.equal(rows.column("topic"), self._topic))
        if self._reason is not None:
            found = pc.match_substring(rows.column("reason"), self._reason, ignore_case=True)
            rows = rows.filter(pc.fill_null(found, False))
        if done and rows.num_rows:
            rows = rows.filter(pa.array([one not in done for one in _places(rows)]))
        return rows


def _places(rows: pa.Table) -> Iterator[tuple[str, int, int]]:
    return zip(*(rows.column(name).to_pylist() for name in IDENTITY), strict=True)


def _identities(rows: pa.Table) -> set[tuple[str, int, int]]:
    return set(_places(rows))


async def _put_back(
    letters: DeadLetters, url: str, rate: float | None, advance: Any
) -> dict[str, Any]:
    outcome: dict[str, Any] = {"messages": 0, "topics": {}, "error": None}
    halt = asyncio.Event()
    began_s = time.monotonic()
    targets: dict[str, Target] = {}
    try:
        with stopped_by_signals(halt):
            for rows in letters.rows():
                for topic in dict.fromkeys(rows.column("topic").to_pylist()):
                    if topic not in targets:
                        targets[topic] = await Target(url, topic).__aenter__()
                    own = rows.filter(pc.equal(rows.column("topic"), topic))
                    for part in _parts(own, rate):
                        due_s = outcome["messages"] / rate if rate else 0.0
                        if not await pause(halt, began_s + due_s - time.monotonic()):
                            return outcome
                        await targets[topic].send(marked(part))
                        await asyncio.to_thread(letters.note, part)
                        outcome["messages"] += part.num_rows
                        counts = outcome["topics"]
                        counts[topic] = counts.get(topic, 0) + part.num_rows
                        advance(part.num_rows)
    except PolybusError as error:
        outcome["error"] = error
    finally:
        for target in targets.values():
            await target.__aexit__()
    return outcome


def _parts(rows: pa.Table, rate: float | None) -> Iterator[pa.Table]:
    """At a bounded rate, no more than a second's messages at once."""
    size = rows.num_rows if rate is None else max(1, min(rows.num_rows, int(rate)))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)


def marked(rows: pa.Table) -> Rows:
    """The messages, each with the header that says where it was."""
    batch = rows.combine_chunks().to_batches()[0]
    messages = Rows(batch)
    before = messages.headers or [None] * batch.num_rows
    places = zip(*(batch.column(name).to_pylist() for name in IDENTITY), strict=True)
    messages.headers = [
        [*((name, one) for name, one in headers or () if name != ORIGIN), (ORIGIN, _place(*place))]
        for headers, place in zip(before, places, strict=True)
    ]
    return messages


def _place(topic: str, epoch: int, offset: int) -> bytes:
    return f"{topic}:{epoch}:{offset}".encode()


def _say_counts(counts: dict[tuple[str, str], int], as_json: bool) -> None:
    found = sorted(counts.items())
    if as_json:
        waiting = [{"topic": topic, "reason": why, "messages": n} for (topic, why), n in found]
        echo_json({"dry-run": True, "messages": sum(counts.values()), "waiting": waiting})
        return
    echo_table(("topic", "messages", "reason"), [[topic, n, why] for (topic, why), n in found])
    click.echo(f"would put {sum(counts.values())} messages back; nothing was published")
