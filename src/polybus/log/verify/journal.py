"""The journal in verify: every commit of every segment, and their offsets."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus import names
from polybus.errors import StorageError
from polybus.log import layout
from polybus.log.columns import TopicRows
from polybus.log.history import parquet
from polybus.log.journal.commit import HEAD
from polybus.log.journal.recovery import torn_from
from polybus.log.journal.segment import (
    CommitEntry,
    Segment,
    SegmentIndex,
    SegmentScan,
    read_index,
    read_rows,
)
from polybus.log.verify.report import Checked, CheckedTopic, Damage, VerifyReport


def check_journal(
    data: Path, topics: dict[str, CheckedTopic], report: VerifyReport, checked: Checked
) -> None:
    """Check all segments; `topics` has, by folder name, where each topic's history ends."""
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
    """Check an index without a segment: from an interrupted hand-over, or the segment is lost."""
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
        report.notes.append(f"{path.name}: a hand-over was interrupted; the next start removes it")
    elif not lost:
        report.add(Damage(file=path.name, reason="its segment is missing"))


class _Offsets:
    """The next expected offset of each topic in the journal."""

    def __init__(self, topics: dict[str, CheckedTopic], report: VerifyReport) -> None:
        self.abandoned = 0
        self._topics = topics
        self._report = report
        self._next: dict[str, int] = {}

    def take(self, segment: Path, rows: TopicRows, *, intact: bool) -> None:
        """Check rows in the order of the journal. Rows below the hand-over offset are served from
        history and do not count."""
        state = self._topics.get(names.folder_of(rows.topic))
        if state is None or (state.epoch is not None and rows.epoch < state.epoch):
            self.abandoned += rows.row_count
            return
        last = rows.first_offset + rows.row_count - 1
        if state.epoch is None or state.handed_over is None:
            return  # Reported already, and nothing can be compared.
        if rows.epoch > state.epoch:
            reason = f"epoch {rows.epoch} is newer than topic.json's {state.epoch}"
            self._add(segment, rows.topic, (rows.first_offset, last), reason)
            return
        expected = max(self._next.get(rows.topic, 0), state.handed_over)
        if rows.first_offset > expected:
            gap = (expected, rows.first_offset - 1)
            self._add(segment, rows.topic, gap, "missing before the next commit of this segment")
        elif rows.first_offset < self._next.get(rows.topic, rows.first_offset):
            self._add(segment, rows.topic, (rows.first_offset, last), "they are there twice")
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
    segment = Segment(path)
    index = segment.index
    scan = SegmentScan(path, segment.head or len(HEAD))
    torn_at = torn_from(segment) if last else None
    if segment.head is None and not (last and not index.entries and not scan.entries):
        report.add(Damage(file=path.name, reason="the head of the stream is damaged"))
    if index.intact_bytes < index.file_bytes:
        report.notes.append(f"the index of {path.name} is damaged; the next start rebuilds it")
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
                reason = f"commit {entry.commit}: the index does not match it"
                report.add(Damage(file=path.name, reason=reason))
            _check_commit(path, entry, offsets, report)


def _check_holes(
    path: Path, scan: SegmentScan, index: SegmentIndex, report: VerifyReport, *, intact_bytes: int
) -> None:
    """Report bytes that are not a commit and not in the index, up to a torn write."""
    for start, stop, reason in scan.all_holes():
        known = any(start <= entry.position < stop for entry in index.entries)
        if start < intact_bytes and not known:
            text = f"bytes {start} to {stop}, topics unknown: {reason}"
            report.add(Damage(file=path.name, reason=text))


def _report_lost(path: Path, entry: CommitEntry, offsets: _Offsets, report: VerifyReport) -> None:
    """Report a commit that is in the index but not intact in the segment."""
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
    """Damage of a topic's rows in a commit."""
    return Damage(
        file=path.name,
        reason=f"commit {entry.commit}: {reason}",
        topic=rows.topic,
        first=rows.first_offset,
        last=rows.first_offset + rows.row_count - 1,
    )


def _is_right(entry: CommitEntry, batch: pa.RecordBatch) -> bool:
    """Whether the rows match the commit's note, checked for all topics at once."""
    topics = entry.topics
    ends = [rows.first_row + rows.row_count for rows in topics]
    if [rows.first_row for rows in topics] != [0, *ends[:-1]] or ends[-1:] != [batch.num_rows]:
        return False

    def column(values: list[object], kind: pa.DataType) -> pa.Array:
        runs = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, kind))
        return pc.run_end_decode(runs)

    if not batch.column("topic").equals(column([rows.topic for rows in topics], pa.string())):
        return False
    # Offset minus row number is the same for all rows of a topic.
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
        return f"it has {batch.num_rows} rows of the topic instead of {rows.row_count}"
    if not pc.all(pc.equal(batch.column("topic"), rows.topic)).as_py():
        return "it has rows of another topic"
    if not parquet.contiguous(batch.column("offset"), rows.first_offset):
        return "its offsets do not match its note"
    if parquet.timestamp_range_us(batch) != (rows.min_timestamp_us, rows.max_timestamp_us):
        return "its timestamps do not match its note"
    return None
