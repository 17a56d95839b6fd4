"""Small data directories for tests: topics, sealed segments, and all rows read back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from polybus.batch import Batch
from polybus.log import checked_json, layout
from polybus.log.disk import Disk
from polybus.log.history.topic_history import TopicHistory
from polybus.log.journal.commit import Encoder
from polybus.log.journal.segment import CommitEntry, Segment, SegmentWriter, read_rows
from polybus.log.topics import DataMetadata, TopicMetadata

DAY_US = 86_400_000_000
NOON_US = 20_000 * DAY_US + DAY_US // 2
"""12:00 on 2024-10-04."""


def make_topic(data: Path, name: str, *, epoch: int = 1) -> Path:
    folder = layout.topic_folder(data, name)
    folder.mkdir(parents=True, exist_ok=True)
    write_note(folder, name, epoch)
    (data / "polybus.json").write_bytes(checked_json.encode(DataMetadata(layout.FORMAT)))
    return folder


def bury_topic(data: Path, name: str, *, epoch: int = 1) -> None:
    """Leave in the trash what the deletion of a topic leaves there."""
    aside = layout.tombstone_folder(layout.topic_folder(data, name), epoch)
    aside.mkdir(parents=True)
    write_note(aside, name, epoch)


def write_note(folder: Path, name: str, epoch: int) -> None:
    note = TopicMetadata(name, epoch, "2024-10-04T12:00:00Z")
    (folder / "topic.json").write_bytes(checked_json.encode(note))


def rows_batch(
    topic: str,
    first: int,
    count: int,
    *,
    epoch: int = 1,
    timestamp_us: int = NOON_US,
    value_bytes: int = 0,
) -> Batch:
    """Messages whose value names their topic and offset."""
    values = [
        f"{topic}:{epoch}:{offset}".encode().ljust(value_bytes, b".")
        for offset in range(first, first + count)
    ]
    headers = [{"n": str(offset).encode()} for offset in range(first, first + count)]
    batch = Batch.of(topic, values, headers=headers)
    batch.epoch, batch.first_offset = epoch, first
    batch.timestamp_us, batch.protocol, batch.sender = timestamp_us, "goms", "test"
    return batch


def make_segment(
    data: Path, first_commit: int, commits: Sequence[Sequence[Batch]], *, sealed: bool = True
) -> Path:
    """A segment as the committer writes it."""
    journal = layout.journal_folder(data)
    journal.mkdir(parents=True, exist_ok=True)
    path = layout.segment_path(journal, first_commit)
    writer = SegmentWriter.create(path, Disk())
    encoder = Encoder()
    for number, batches in enumerate(commits, first_commit):
        pieces, topics = encoder.encode(number, number - 1, batches, mark=writer.mark)
        position = writer.append(*pieces)
        writer.sync()
        writer.index([CommitEntry(number, position, writer.bytes - position, topics)])
    if sealed:
        writer.seal()
    writer.close()
    return path


def parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("history/**/*.parquet"))


def history_of(data: Path, topic: str) -> TopicHistory:
    return TopicHistory(layout.topic_folder(data, topic))


def read_history(history: TopicHistory, offset: int = 0, *, bytes_max: int = 1 << 20) -> pa.Table:
    """Everything in history from an offset on, read as a subscriber would."""
    batches: list[Any] = []
    while (found := history.read(offset, bytes_max=bytes_max)) is not None:
        batches.append(found)
        offset = found.column("offset")[-1].as_py() + 1
    return pa.Table.from_batches(batches)


def values_across(data: Path, topic: str) -> list[bytes]:
    """A topic's values: history below the hand-over offset, the journal from there on."""
    history = history_of(data, topic)
    values = []
    if history.handed_over > history.start:
        values = read_history(history, history.start).column("value").to_pylist()
    for segment in layout.segments(data):
        for entry in Segment(segment).entries:
            for rows in entry.topics:
                if rows.topic == topic and rows.epoch == history.manifest.epoch:
                    batch = read_rows(segment, entry).slice(rows.first_row, rows.row_count)
                    skipped = max(0, history.handed_over - rows.first_offset)
                    values += batch.column("value").to_pylist()[skipped:]
    return values


def expected_values(topic: str, count: int, *, epoch: int = 1) -> list[bytes]:
    return [f"{topic}:{epoch}:{offset}".encode() for offset in range(count)]
