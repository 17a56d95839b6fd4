"""The journal's part of verify: every commit of every segment, and the offsets they hold."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus import names
from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.history import parquet
from polybus.log.journal.commit import HEAD, TopicRows
from polybus.log.journal.index import CommitEntry, SegmentIndex, read_index
from polybus.log.journal.recovery import torn_from
from polybus.log.journal.segment import SegmentScan, head_bytes, read_rows
from polybus.log.verify.report import Checked, CheckedTopic, Damage, VerifyReport


def check_journal(
    data: Path, topics: dict[str, CheckedTopic], report: VerifyReport, checked: Checked
) -> None:
    """Check all segments; `topics` says by folder name where each topic's history ends."""
    offsets = _Offsets(topics, report)
    paths = layout.segments(data)
    for path in paths:
        report.segments += 1
        _check_segment(path, offsets, report, last=path is paths[-1])
        checked.add(f"journal segment {path.name}", path.stat().st_size)
    for path in layout.orphan_indexes(data):
        _check_orphan(path, topics, report)
    if offsets.abandoned:
        text = f"{offsets.abandoned} messages of deleted topics are still in the journal"
        report.notes.append(text)


def _check_orphan(path: Path, topics: dict[str, CheckedTopic], report: VerifyReport) -> None:
    """An index without its segment: left by a hand-over cut short, or all that is left of rows."""
    index = read_index(path)
    lost = False
    for rows in index.rows():
        state = topics.get(names.folder_of(rows.topic))
        last = rows.first_offset + rows.row_count - 1
        if state is None or state.epoch != rows.epoch or last < (state.handed_over or 0):
            continue
        lost = True
        segment = path.with_suffix(layout.SEGMENT_SUFFIX).name
        report.add(
            Damage(
                file=segment,
                reason="is missing",
                topic=rows.topic,
                first=rows.first_offset,
                last=last,
            )
        )
    if not lost and index.is_complete:
        report.notes.append(
            f"{path.name}: left by a hand-over cut short; the next start removes it"
        )
    elif not lost:
        report.add(Damage(file=path.name, reason="its segment is missing"))


class _Offsets:
    """Which offset of each topic comes next in the journal."""

    def __init__(self, topics: dict[str, CheckedTopic], report: VerifyReport) -> None:
        self.abandoned = 0
        self._topics = topics
        self._report = report
        self._next: dict[str, int] = {}

    def take(self, segment: Path, rows: TopicRows, *, intact: bool) -> None:
        """Take note of rows in the order of the journal. Rows already in history are served there,
        so only what is at or above the hand-over counts."""
        state = self._topics.get(names.folder_of(rows.topic))
        if state is None or (state.epoch is not None and rows.epoch < state.epoch):
            self.abandoned += rows.row_count
            return
        last = rows.first_offset + rows.row_count - 1
        if state.epoch is None or state.handed_over is None:
            return  # Said already, and nothing can be compared.
        if rows.epoch > state.epoch:
            reason = f"epoch {rows.epoch} is newer than topic.json's {state.epoch}"
            self._add(segment, rows.topic, (rows.first_offset, last), reason)
            return
        expected = max(self._next.get(rows.topic, 0), state.handed_over)
        if rows.first_offset > expected:
            gap = (expected, rows.first_offset - 1)
            self._add(segment, rows.topic, gap, "are missing before this segment's next commit")
        elif rows.first_offset < self._next.get(rows.topic, rows.first_offset):
            self._add(segment, rows.topic, (rows.first_offset, last), "are in the journal twice")
        self._next[rows.topic] = max(self._next.get(rows.topic, 0), last + 1)
        if intact:
            readable = max(0, last + 1 - max(rows.first_offset, expected))
            self._report.count(rows.topic, messages=readable)

    def _add(self, segment: Path, topic: str, offsets: tuple[int, int], reason: str) -> None:
        first, last = offsets
        self._report.add(
            Damage(file=segment.name, reason=reason, topic=topic, first=first, last=last)
        )


def _check_segment(path: Path, offsets: _Offsets, report: VerifyReport, *, last: bool) -> None:
    index = read_index(layout.index_path(path))
    head = head_bytes(path)
    scan = SegmentScan(path, head or len(HEAD))
    after_index = scan if index.sealed else SegmentScan(path, index.end or head or len(HEAD))
    torn_at = torn_from(after_index, index) if last and not index.sealed else None
    if head is None and not (last and not index.entries and not scan.entries):
        report.add(Damage(file=path.name, reason="the head of the stream is damaged"))
    if index.intact_bytes < index.file_bytes:
        report.notes.append(f"the index of {path.name} is damaged; the next start makes it anew")
    if index.sealed and not scan.sealed and not scan.tail:
        report.add(Damage(file=path.name, reason="the end of the stream is missing"))
    if torn_at is None:
        intact_bytes = path.stat().st_size
    else:
        intact_bytes = torn_at
        text = f"{path.name}: an unfinished write from byte {torn_at} on; the next start cuts it"
        report.notes.append(text)
    _check_holes(path, scan, index, report, intact_bytes=intact_bytes)
    indexed = {entry.position: entry for entry in index.entries}
    whole = {entry.position: entry for entry in scan.entries}
    for position in sorted(indexed.keys() | whole.keys()):
        entry = whole.get(position)
        if entry is None:
            _report_lost(path, indexed[position], offsets, report)
        elif position < intact_bytes:
            if position in indexed and indexed[position] != entry:
                reason = f"commit {entry.commit}: the index says something else"
                report.add(Damage(file=path.name, reason=reason))
            _check_commit(path, entry, offsets, report)


def _check_holes(
    path: Path, scan: SegmentScan, index: SegmentIndex, report: VerifyReport, *, intact_bytes: int
) -> None:
    """Report bytes that are no commit and that the index does not know, up to a torn tail."""
    for start, stop, reason in scan.all_holes():
        known = any(start <= entry.position < stop for entry in index.entries)
        if start < intact_bytes and not known:
            text = f"bytes {start} to {stop}, topics unknown: {reason}"
            report.add(Damage(file=path.name, reason=text))


def _report_lost(path: Path, entry: CommitEntry, offsets: _Offsets, report: VerifyReport) -> None:
    """A commit that the index has and the segment has not, at least not intact."""
    try:
        read_rows(path, entry)
        reason = "the index points into another commit"
    except StorageError as error:
        reason = error.text.rsplit("): ", 1)[-1]
    for rows in entry.topics:
        offsets.take(path, rows, intact=False)
        report.add(_damage(path, entry, rows, reason))


def _check_commit(path: Path, entry: CommitEntry, offsets: _Offsets, report: VerifyReport) -> None:
    try:
        batch = read_rows(path, entry)
        batch.validate(full=True)
    except (StorageError, pa.ArrowException) as error:
        report.add(Damage(file=path.name, reason=f"commit {entry.commit}: {error}"))
        return
    right = _is_right(entry, batch)
    for rows in entry.topics:
        reason = None
        if not right:
            reason = _check_topic_rows(rows, batch.slice(rows.first_row, rows.row_count))
        offsets.take(path, rows, intact=reason is None)
        if reason is not None:
            report.add(_damage(path, entry, rows, reason))


def _damage(path: Path, entry: CommitEntry, rows: TopicRows, reason: str) -> Damage:
    """What is wrong with a topic's rows of a commit."""
    return Damage(
        file=path.name,
        reason=f"commit {entry.commit}: {reason}",
        topic=rows.topic,
        first=rows.first_offset,
        last=rows.first_offset + rows.row_count - 1,
    )


def _is_right(entry: CommitEntry, batch: pa.RecordBatch) -> bool:
    """Whether every topic's rows are what the commit says, checked for all of them at once."""
    topics = entry.topics
    ends = [rows.first_row + rows.row_count for rows in topics]
    if [rows.first_row for rows in topics] != [0, *ends[:-1]] or ends[-1:] != [batch.num_rows]:
        return False

    def column(values: list[object], kind: pa.DataType) -> pa.Array:
        runs = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, kind))
        return pc.run_end_decode(runs)

    if not batch.column("topic").equals(column([rows.topic for rows in topics], pa.string())):
        return False
    # A row's offset less its number is the same for all rows of a topic.
    ones = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
    numbers = pc.cumulative_sum(ones, start=-1)
    shifts = pc.subtract(batch.column("offset"), numbers)
    expected = column([rows.first_offset - rows.first_row for rows in topics], pa.int64())
    if not shifts.equals(expected):
        return False
    times = pa.table(
        {
            "topic": column(list(range(len(topics))), pa.int32()),
            "timestamp": batch.column("timestamp").cast(pa.int64()),
        }
    )
    ranges = times.group_by("topic", use_threads=False).aggregate([("timestamp", "min_max")])
    found = [(one["min"], one["max"]) for one in ranges.column("timestamp_min_max").to_pylist()]
    return found == [(rows.min_timestamp_us, rows.max_timestamp_us) for rows in topics]


def _check_topic_rows(rows: TopicRows, batch: pa.RecordBatch) -> str | None:
    if batch.num_rows != rows.row_count:
        return f"it has {batch.num_rows} rows of the topic, not {rows.row_count}"
    if not pc.all(pc.equal(batch.column("topic"), rows.topic)).as_py():
        return "it has rows of another topic in their place"
    if not parquet.contiguous(batch.column("offset"), rows.first_offset):
        return "its offsets are not those it says it has"
    if parquet.timestamp_range_us(batch) != (rows.min_timestamp_us, rows.max_timestamp_us):
        return "its timestamps are not those it says it has"
    return None
