"""verify: checks everything that a stopped bus has on disk, and reports what is damaged.

It reads every topic.json and manifest, every history file (checksums of file and pages, rows,
order) and every commit of the journal (checksum, columns, index). Then it checks that each offset
from a topic's start to its end exists once, in history or in the journal, that each blob that
messages refer to exists and is intact, and that the table of an exposed topic has its files.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.log import checked_json, layout
from polybus.log.columns import TopicRows
from polybus.log.history import manifest as manifests
from polybus.log.history import parquet
from polybus.log.history.exposed import is_exposed
from polybus.log.history.manifest import HistoryFile, Manifest
from polybus.log.journal import floor as floors
from polybus.log.journal.commit import HEAD
from polybus.log.journal.recovery import torn_from
from polybus.log.journal.segment import CommitEntry, Segment, SegmentScan, read_index, read_rows
from polybus.log.topics import is_unfinished, read_data_metadata, read_topic_metadata, was_deleted
from polybus.log.verify.blobs import BlobCheck
from polybus.log.verify.tables import table_damages, wrong_content

DAMAGES_MAX = 10_000
VerifyProgress = Callable[[str, int, int], None]
"""Called with what was checked, the bytes checked so far, and the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged file, with the topic and offsets that are lost, if known."""

    file: str
    reason: str
    topic: str | None = None
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        where = "" if self.topic is None else f"topic {self.topic!r}, "
        offsets = "" if self.first is None else f", offsets {self.first} to {self.last}"
        return f"{where}{self.file}{offsets}: {self.reason}"


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """The result of a check. `damages` has the first DAMAGES_MAX of `damage_count`.

    `messages` counts readable messages. System topics are counted separately. `notes` are harmless
    leftovers of a crash, which the next start or hand-over removes. A cluster has no files.
    """

    is_cluster: bool = False

    topics: int = 0
    segments: int = 0
    files: int = 0
    messages: int = 0
    system_topics: int = 0
    system_messages: int = 0
    bytes: int = 0
    damage_count: int = 0
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        return self.damage_count == 0

    def count(self, topic: str, *, topics: int = 0, messages: int = 0) -> None:
        """Count a topic, or intact messages of a topic."""
        if names.is_reserved(topic):
            self.system_topics += topics
            self.system_messages += messages
        else:
            self.topics += topics
            self.messages += messages

    def add(self, damage: Damage) -> None:
        self.damage_count += 1
        if len(self.damages) < DAMAGES_MAX:
            self.damages.append(damage)


def verify(data: Path, *, progress: VerifyProgress | None = None) -> VerifyReport:
    """Check the data directory of a stopped bus.

    Raises UsageError `log.no-data` if the directory does not exist; StorageError `log.locked` if a
    bus is running on it.
    """
    if not data.is_dir():
        raise UsageError("log.no-data", f"{data} is not a data directory")
    notes = []
    try:
        lock: AbstractContextManager[object] = layout.DataLock(data, shared=True)
    except OSError as error:
        text = f"{error.strerror}; while a bus runs on the folder, the result is not reliable"
        notes.append(f"{data / 'lock'} cannot be locked: {text}")
        lock = nullcontext()
    with lock, _without_handover(data):
        return _Check(data, progress, notes).run()


def _without_handover(data: Path) -> AbstractContextManager[object]:
    """Wait for the end of a hand-over that outlives its killed bus. Raises BusyError."""
    try:
        return manifests.HistoryLock(data, shared=True, wait_s=manifests.WAIT_S)
    except OSError:
        return nullcontext()  # The folder is read-only: nothing is handed over.


@dataclass(slots=True)
class _CheckedTopic:
    """A topic on disk: its history ends at `handed_over`, its journal has `first` to `stop`.

    `epoch` and `handed_over` are None if they are unreadable.
    """

    epoch: int | None = None
    handed_over: int | None = None
    first: int | None = None
    stop: int = 0


class _Check:
    """One check of a data directory."""

    def __init__(self, data: Path, progress: VerifyProgress | None, notes: list[str]) -> None:
        self._data = data
        self._progress = progress
        self._report = VerifyReport(notes=notes)
        self._topics: dict[Path, _CheckedTopic] = {}
        """By folder."""
        self._deleted: dict[tuple[str, int], bool] = {}
        self._abandoned = 0
        self._is_old = False
        files = [*layout.segments(data)]
        files += layout.accounts_folder(data).glob("*/topics/*/history/*/*.parquet")
        self._blobs = BlobCheck(data)
        self._total_bytes = sum(path.stat().st_size for path in files) + self._blobs.bytes

    def run(self) -> VerifyReport:
        self._check_data_note()
        for path in layout.leftovers(self._data):
            self.add_note(f"{path}: a write was interrupted; the next start removes it")
        for folder in layout.topic_folders(self._data):
            if is_unfinished(folder):
                self.add_note(f"{folder}: the creation of a topic was interrupted")
            else:
                self._topics[folder] = self._check_topic(folder)
        paths = layout.segments(self._data)
        for path in paths:
            self._report.segments += 1
            self._check_segment(path, last=path is paths[-1])
            self._checked(f"journal segment {path.name}", path.stat().st_size)
        for path in layout.orphan_indexes(self._data):
            self._check_orphan(path)
        self._check_floor()
        for folder, state in self._topics.items():
            if state.epoch is not None and state.first != 0 and manifests.is_lost(folder):
                self._damaged(folder / manifests.NAME, "is missing", layout.topic_in(folder))
        self._check_blobs()
        if self._abandoned:
            self.add_note(f"{self._abandoned} messages of deleted topics are still in the journal")
        return self._report

    def _check_blobs(self) -> None:
        for path, size, reason in self._blobs.damages():
            if reason is not None:
                self._damaged(path, reason)
            self._checked(f"blob {path.name[:12]}", size)
        for path, reason, topic, offsets in self._blobs.missing():
            self._damaged(path, reason, topic, offsets)

    def _check_floor(self) -> None:
        file = layout.journal_folder(self._data) / floors.NAME
        try:
            floor = floors.load(self._data) or {}
        except StorageError as error:
            self._damaged(file, error.text)
            return
        for topic, (epoch, stop) in floor.items():
            folder = layout.topic_folder(self._data, topic)
            state = self._topics.get(folder)
            if state is None and not was_deleted(folder, epoch):
                self._damaged(folder, "is missing", topic, (0, stop - 1))
            if state is None or state.epoch is None or state.handed_over is None:
                continue
            stop = max(state.stop, state.handed_over)
            lost = floors.missing(topic, state.epoch, stop, floor)
            if lost is not None:
                reason = "removed from the journal but missing from history"
                self._damaged(file, reason, topic, lost)

    def _check_data_note(self) -> None:
        path = self._data / "polybus.json"
        try:
            found = read_data_metadata(self._data)
        except StorageError as error:
            if error.code != "log.damaged":
                raise
            self._damaged(path, error.text)
            return
        if found is not None:
            self._is_old = not checked_json.is_checked(path.read_bytes())
        elif layout.segments(self._data) or layout.topic_folders(self._data):
            self._damaged(path, "is missing")

    def _was_deleted(self, rows: TopicRows, state: _CheckedTopic | None) -> bool:
        """Whether rows of another epoch belong to a topic that was deleted before this one."""
        key = (rows.topic, rows.epoch)
        if key not in self._deleted:
            is_older = state is None or (state.epoch is not None and rows.epoch < state.epoch)
            folder = layout.topic_folder(self._data, rows.topic)
            # Earlier versions left no tombstones.
            self._deleted[key] = (self._is_old and is_older) or was_deleted(folder, rows.epoch)
        return self._deleted[key]

    def _checked(self, what: str, size: int) -> None:
        self._report.bytes += size
        if self._progress is not None:
            total_bytes = max(self._report.bytes, self._total_bytes)
            self._progress(what, self._report.bytes, total_bytes)

    def add_note(self, text: str) -> None:
        self._report.notes.append(text)

    def _damaged(
        self,
        file: object,
        reason: str,
        topic: str | None = None,
        offsets: tuple[int | None, int | None] = (None, None),
    ) -> None:
        first, last = offsets
        damage = Damage(file=str(file), reason=reason, topic=topic, first=first, last=last)
        self._report.add(damage)

    # Topics and their history.

    def _check_topic(self, folder: Path) -> _CheckedTopic:
        self._report.count(folder.name, topics=1)
        state = _CheckedTopic()
        note_file = folder / "topic.json"
        try:
            note = read_topic_metadata(folder)
        except StorageError as error:
            self._damaged(note_file, error.text, layout.topic_in(folder))
            return state
        if note is None:
            self._damaged(note_file, "is missing", layout.topic_in(folder))
            return state
        state.epoch = self._blobs.found.epochs[note.name] = note.epoch
        try:
            manifest = manifests.load_for_epoch(folder, note.epoch)
        except StorageError as error:
            self._damaged(folder / manifests.NAME, error.text, note.name)
            return state
        state.handed_over = manifest.handed_over
        self._check_history(folder, manifest, note.name)
        table = layout.exposed_folder(folder)
        if is_exposed(folder):
            sums = {folder / file.path: file.xxh3 for file in manifest.files}
            check = partial(_check_link, table, folder / manifests.HISTORY, sums)
            for path, reason in table_damages(table, check):
                self._damaged(path, reason, note.name)
        elif table.is_dir() and not (folder / manifests.NAME).exists():
            text = "is missing, although the topic has a table"
            self._damaged(folder / manifests.NAME, text, note.name)
        elif table.is_dir():
            self.add_note(f"{table}: its removal was interrupted; the next hand-over continues")
        return state

    def _check_history(self, folder: Path, manifest: Manifest, topic: str) -> None:
        for file in manifest.files:
            self._report.files += 1
            reason = _check_file(folder / file.path, file, topic, self._blobs)
            if reason is None:
                self._report.count(topic, messages=file.rows)
            else:
                self._damaged(folder / file.path, reason, topic, (file.first, file.last))
            self._checked(f"{topic} {file.first} to {file.last}", file.bytes)
        named = {file.path for file in manifest.files}
        for path in sorted(folder.glob("history/*/*.parquet")):
            if str(path.relative_to(folder)) not in named:
                self.add_note(f"{path} is not in the manifest: a hand-over was interrupted")

    # The journal.

    def _check_orphan(self, path: Path) -> None:
        """Check an index without a segment: left by an interrupted hand-over, or the segment is
        lost.
        """
        index = read_index(path)
        lost = False
        for rows in index.rows():
            state = self._topics.get(layout.topic_folder(self._data, rows.topic))
            last = rows.stop_offset - 1
            if state is not None and state.epoch == rows.epoch:
                if last < (state.handed_over or 0):
                    continue
            elif self._was_deleted(rows, state):
                continue
            lost = True
            segment = path.with_suffix(layout.SEGMENT_SUFFIX).name
            self._damaged(segment, "is missing", rows.topic, (rows.first_offset, last))
        if not lost and index.is_complete:
            self.add_note(f"{path.name}: a hand-over was interrupted; the next start removes it")
        elif not lost:
            self._damaged(path.name, "its segment is missing")

    def _check_segment(self, path: Path, *, last: bool) -> None:
        segment = Segment(path)
        index = segment.index
        scan = SegmentScan(path, segment.head or len(HEAD))
        torn_at = torn_from(segment) if last else None
        if segment.head is None and not (last and not index.entries and not scan.entries):
            self._damaged(path.name, "the head of the stream is damaged")
        if index.intact_bytes < index.file_bytes:
            self.add_note(f"the index of {path.name} is damaged; the next start rebuilds it")
        if index.sealed and not scan.sealed and not scan.tail:
            self._damaged(path.name, "the end of the stream is missing")
        intact_bytes = segment.file_bytes
        if torn_at is not None:
            intact_bytes = torn_at
            text = f"an unfinished write from byte {torn_at} on; the next start cuts it"
            self.add_note(f"{path.name}: {text}")
        indexed = {entry.position: entry for entry in index.entries}
        # Bytes that are not a commit and not in the index, up to a torn write.
        for start, stop, reason in scan.all_holes():
            if start < intact_bytes and not any(start <= at < stop for at in indexed):
                self._damaged(path.name, f"bytes {start} to {stop}, topics unknown: {reason}")
        whole = {entry.position: entry for entry in scan.entries}
        for position in sorted(indexed.keys() | whole.keys()):
            entry = whole.get(position)
            if entry is None:
                self._report_lost(path, indexed[position])
            elif position < intact_bytes:
                if position in indexed and indexed[position] != entry:
                    reason = f"commit {entry.commit}: the index does not match it"
                    self._damaged(path.name, reason)
                self._check_commit(path, entry)

    def _report_lost(self, path: Path, entry: CommitEntry) -> None:
        """Report a commit that is in the index but not intact in the segment."""
        try:
            read_rows(path, entry)
            reason = "the index points into another commit"
        except StorageError as error:
            reason = error.text.rsplit("): ", 1)[-1]
        for rows in entry.topics:
            self._take(path, entry, rows, reason)

    def _check_commit(self, path: Path, entry: CommitEntry) -> None:
        try:
            batch = read_rows(path, entry)
            batch.validate(full=True)
        except (StorageError, pa.ArrowException) as error:
            self._damaged(path.name, f"commit {entry.commit}: {error}")
            return
        right = _is_right(entry, batch)
        for rows in entry.topics:
            part = batch.slice(rows.first_row, rows.row_count)
            state = self._topics.get(layout.topic_folder(self._data, rows.topic))
            if state is not None and state.epoch == rows.epoch and right:
                # Rows that history has may have expired there.
                skipped = max(0, (state.handed_over or 0) - rows.first_offset)
                self._blobs.found.take(rows.topic, part.slice(skipped))
            self._take(path, entry, rows, None if right else _check_topic_rows(rows, part))

    def _take(self, path: Path, entry: CommitEntry, rows: TopicRows, reason: str | None) -> None:
        """Check the offsets of a topic's rows, in the order of the journal; report damage."""
        offsets = (rows.first_offset, rows.stop_offset - 1)
        self._check_offsets(path, rows, offsets, intact=reason is None)
        # Rows of a deleted topic may be missing.
        if reason is not None and not self._deleted.get((rows.topic, rows.epoch)):
            self._damaged(path.name, f"commit {entry.commit}: {reason}", rows.topic, offsets)

    def _check_offsets(
        self, path: Path, rows: TopicRows, offsets: tuple[int, int], *, intact: bool
    ) -> None:
        """Rows below the hand-over offset are served from history and do not count."""
        state = self._topics.get(layout.topic_folder(self._data, rows.topic))
        if state is None or rows.epoch != state.epoch:
            if self._was_deleted(rows, state):
                self._abandoned += rows.row_count
            elif state is None or state.epoch is not None:
                known = "does not exist" if state is None else f"has epoch {state.epoch}"
                reason = f"the journal has epoch {rows.epoch}, topic.json {known}"
                self._damaged(path.name, reason, rows.topic, offsets)
            return  # A damaged topic.json is reported already.
        if state.first is None:
            state.first = rows.first_offset
        if state.handed_over is None:
            return  # It was reported, and nothing can be compared.
        expected = max(state.stop, state.handed_over)
        if rows.first_offset > expected:
            gap = (expected, rows.first_offset - 1)
            reason = "missing before the next commit of this segment"
            self._damaged(path.name, reason, rows.topic, gap)
        elif rows.first_offset < state.stop:
            self._damaged(path.name, "duplicate offsets", rows.topic, offsets)
        state.stop = max(state.stop, rows.stop_offset)
        if intact:
            readable = max(0, rows.stop_offset - max(rows.first_offset, expected))
            self._report.count(rows.topic, messages=readable)


def _check_file(path: Path, file: HistoryFile, topic: str, blobs: BlobCheck) -> str | None:
    """What is wrong with a history file, or None."""
    try:
        if path.stat().st_size != file.bytes:
            return f"its size is {path.stat().st_size} bytes, not {file.bytes}"
        if parquet.xxh3_of(path) != file.xxh3:
            return "its checksum is wrong"
        return _check_rows(path, file, topic, blobs)
    except FileNotFoundError:
        return "is missing"
    except (OSError, pa.ArrowException) as error:
        return str(error)


def _check_link(
    table: Path, history: Path, sums: dict[Path, str], path: Path, xxh3: str | None
) -> str | None:
    """What is wrong with a file of a topic's table, which is a link unless the folder is a copy.

    The table may still have a file that the history has replaced.
    """
    source = history / path.relative_to(table)
    try:
        if source in sums and os.path.samefile(source, path):
            return None  # It is checked as a history file.
    except OSError:
        return None  # A missing file was reported.
    return wrong_content(path, xxh3 or sums.get(source))


def _check_rows(path: Path, file: HistoryFile, topic: str, blobs: BlobCheck) -> str | None:
    offset = file.first
    low, high = file.max_timestamp_us, file.min_timestamp_us
    with parquet.open_file(path) as opened:
        for rows in opened.iter_batches(batch_size=8192, use_threads=False):
            if not parquet.contiguous(rows.column("offset"), offset):
                return f"its rows do not continue at offset {offset}"
            if not pc.all(pc.equal(rows.column("topic"), topic)).as_py():
                return "it has rows of another topic"
            low = min(low, parquet.timestamp_range_us(rows)[0])
            high = max(high, parquet.timestamp_range_us(rows)[1])
            blobs.found.take(topic, rows)
            offset += rows.num_rows
    if offset != file.last + 1:
        return f"its rows end at offset {offset - 1}"
    if (low, high) != (file.min_timestamp_us, file.max_timestamp_us):
        return "its timestamps are not those of the manifest"
    return None


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
