"""The hand-over: moves sealed journal segments to Parquet history, topic by topic.

It runs in its own process (`python -m polybus.log.history.handover --data DIR`) at the lowest
priority, takes no lock of the bus, and reads only sealed segments. It may be killed at any moment.
Order of writes for a topic's rows of a segment, each durable before the next:

1. A file in `scratch/`, moved to `history/` when complete. A file that a crash leaves in either
   folder is not in the manifest; the next hand-over removes it (`sweep`, `sweep_scratch`).
2. The manifest. With its rename the rows belong to history, and a small file that was merged into
   a new one does not. The next hand-over continues at the manifest's hand-over offset, so no row
   is missing or repeated.
3. A version of the topic's Delta table, if it has one (log/history/exposed.py).
4. Files that the manifest no longer names move to `scratch/`. They are removed after a grace
   period, in which readers that already chose a file may still open it.
5. The caller deletes the segment and then its index, when the manifests of all its topics cover it.
   Until then the rows are in both; readers take them from history (log/journal/recovery.py). A
   damaged segment is kept and reported.

`history.lock` is released after each segment: all manifests cover it then, so a backup that waits
copies what a kill at this moment would leave.

Memory is bounded by a window of commits and the open row groups of a group of topics. A segment is
read once per group.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow as pa

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log import file_modes, layout
from polybus.log.columns import TopicRows
from polybus.log.disk import Disk
from polybus.log.history import exposed, parquet
from polybus.log.history.handover_topic import TopicHandover, sweep_scratch
from polybus.log.history.manifest import WAIT_S, HistoryLock, load_current
from polybus.log.journal.floor import Floor
from polybus.log.journal.recovery import recover
from polybus.log.journal.segment import CommitEntry, Segment, delete_segments, read_rows
from polybus.log.topics import storage_error
from polybus.log.without_pandas import block_pandas

REPLACED_GRACE_S = 60.0
_WINDOW_BYTES_MAX = 16 << 20
_WINDOW_SLICES_MAX = 4096
"""In Arrow each topic's slice of a commit takes some kilobytes, even with few rows."""
_GROUP_BYTES_MAX = 48 << 20
_GROUP_TOPICS_MAX = 1024

HandoverProgress = Callable[[str], None]


def hand_over(
    data: Path,
    *,
    progress: HandoverProgress | None = None,
    finished: Callable[[Path], None] | None = None,
    grace_s: float = REPLACED_GRACE_S,
    retention_bytes: int | None = None,
    wait_s: float = 0.0,
) -> list[Path]:
    """Hand over every sealed segment; return those that are completely in history.

    They may be deleted, each after `finished` was called for it. A damaged segment is not among
    them: its topics are handed over up to the first gap in their offsets, and `progress` is called
    with the damage. `retention_bytes` is the limit for topics that set none themselves; files are
    sized to fit it. Raises BusyError `log.history-busy` if another hand-over runs, or a backup runs
    or waits, for longer than `wait_s`; OSError if the disk failed. Rows handed over so far stay in
    history.
    """
    report = progress or (lambda _: None)
    with HistoryLock(data, wait_s=wait_s):
        for folder in layout.topic_folders(data):
            sweep_scratch(folder, grace_s=grace_s)
            exposed.catch_up(folder)
        exposed.sweep(data)
    done = []
    for segment in layout.segments(data):
        found = Segment(segment)
        if not found.sealed:
            continue
        with HistoryLock(data, wait_s=wait_s):
            work = _SegmentHandover(data, found, report, retention_bytes=retention_bytes)
            for group in _groups(work.topics.values()):
                work.run(group, grace_s=grace_s)
        if work.complete():
            done.append(segment)
            if finished is not None:
                finished(segment)
        report(f"{segment.name}: {'handed over' if work.complete() else 'kept'}")
    return done


def _handed_over(data: Path) -> Floor:
    floor: Floor = {}
    for folder in layout.topic_folders(data):
        # A start freezes a damaged topic until the repair.
        with suppress(StorageError):
            manifest = load_current(folder)
            if manifest is not None and manifest.handed_over:
                floor[layout.topic_in(folder)] = (manifest.epoch, manifest.handed_over)
    return floor


def compact(data: Path, *, progress: HandoverProgress | None = None) -> list[Path]:
    """Hand over the journal of a stopped bus; return the segments that were deleted.

    Raises StorageError `log.locked` if a bus is running on this data directory; `log.full` or
    `log.failed`; UsageError `log.no-data` if there is no data directory.
    """
    if not data.is_dir():
        raise UsageError("log.no-data", f"{data} is not a data directory")
    try:
        with layout.DataLock(data):
            _seal_journal(data)
            segments = hand_over(data, progress=progress, grace_s=0.0, wait_s=WAIT_S)
            delete_segments(segments, handed_over=lambda: _handed_over(data))
            return segments
    except OSError as error:
        raise storage_error(error, f"cannot compact {data}") from error


def _seal_journal(data: Path) -> None:
    """Recover the journal as a start of the bus would, and seal its open segment."""
    disk = Disk()
    for segment in recover(data, disk).segments:
        if segment.entries and segment.is_open:
            writer = segment.writer(disk)
            try:
                writer.seal()
            finally:
                writer.close()


class _SegmentHandover:
    """The hand-over of one segment."""

    def __init__(
        self, data: Path, segment: Segment, report: HandoverProgress, *, retention_bytes: int | None
    ) -> None:
        self.topics: dict[str, TopicHandover] = {}
        self._path = segment.path
        self._entries = segment.entries
        self._report = report
        self._damaged: set[int] = set()
        self._whole = not segment.damage()
        for damage in segment.damage():
            report(f"damaged: {damage}")
        inflation = self._inflation()
        for entry in self._entries:
            row_count = sum(rows.row_count for rows in entry.topics)
            row_bytes = inflation * entry.size / max(1, row_count)
            for rows in entry.topics:
                topic = self.topics.get(rows.topic)
                if topic is None:
                    topic = self.topics[rows.topic] = TopicHandover(
                        rows.topic,
                        layout.topic_folder(data, rows.topic),
                        retention_bytes=retention_bytes,
                    )
                topic.expect(rows, int(rows.row_count * row_bytes))

    def _inflation(self) -> float:
        """The ratio of the rows' size in memory to that in the segment, where they may be
        compressed.
        """
        for entry in self._entries[:1]:
            with suppress(StorageError):
                return max(1.0, float(read_rows(self._path, entry).nbytes) / entry.size)
        return 1.0

    def run(self, group: list[TopicHandover], *, grace_s: float) -> None:
        """Hand over the rows of some topics in one pass over the segment."""
        members = {topic.name: topic for topic in group}
        window_bytes = window_slices = 0
        try:
            for entry in self._entries:
                wanted = [
                    (members[rows.topic], rows)
                    for rows in entry.topics
                    if rows.topic in members and members[rows.topic].wants(rows)
                ]
                if wanted:
                    window_bytes += self._run_commit(entry, wanted)
                    window_slices += len(wanted)
                if window_bytes >= _WINDOW_BYTES_MAX or window_slices >= _WINDOW_SLICES_MAX:
                    window_bytes = window_slices = 0
                    for topic in group:
                        topic.write()
                    _bound_memory(group)
            for topic in group:
                topic.finish(grace_s=grace_s)
                if topic.problem is not None:
                    self._report(f"topic {topic.name!r} stays in the journal: {topic.problem}")
        finally:
            for topic in group:
                topic.release()

    def _run_commit(self, entry: CommitEntry, wanted: list[tuple[TopicHandover, TopicRows]]) -> int:
        """Pass a commit's rows to their topics; return how much memory they take."""
        try:
            batch = read_rows(self._path, entry)
        except StorageError as error:
            if entry.commit not in self._damaged:
                self._damaged.add(entry.commit)
                self._report(f"damaged: {error.text}")
            for topic, _ in wanted:
                topic.stop(f"commit {entry.commit} is damaged")
            return 0
        for topic, rows in wanted:
            topic.add(rows, batch.slice(rows.first_row, rows.row_count))
        return int(batch.nbytes)

    def complete(self) -> bool:
        """Whether all rows of the segment are in history, so that it can be deleted."""
        return (
            self._whole
            and not self._damaged
            and all(
                self.topics[rows.topic].has(rows)
                for entry in self._entries
                for rows in entry.topics
            )
        )


def _groups(topics: Iterable[TopicHandover]) -> Iterator[list[TopicHandover]]:
    """Groups of topics whose rows fit in memory together."""
    group: list[TopicHandover] = []
    group_bytes = 0
    for topic in topics:
        topic_bytes = min(topic.expected_bytes, parquet.ROW_GROUP_BYTES)
        full = group_bytes + topic_bytes > _GROUP_BYTES_MAX or len(group) >= _GROUP_TOPICS_MAX
        if group and full:
            yield group
            group, group_bytes = [], 0
        group.append(topic)
        group_bytes += topic_bytes
    if group:
        yield group


def _bound_memory(group: list[TopicHandover]) -> None:
    """If rows are larger than estimated, write the row groups of the largest topics early."""
    while sum(topic.buffered_bytes for topic in group) > 2 * _GROUP_BYTES_MAX:
        max(group, key=lambda topic: topic.buffered_bytes).flush()


def main(arguments: list[str] | None = None) -> int:
    """The process. It prints `{"segment": path}` for one that is handed over, and damages."""
    parser = argparse.ArgumentParser(prog="python -m polybus.log.history.handover")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--retention-bytes", type=int)
    # Not read here: a bus that was killed during our start is no longer our parent.
    parser.add_argument("--parent", type=int, default=os.getppid())
    options = parser.parse_args(arguments)
    file_modes.adopt(options.data)
    os.nice(19)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    threading.Thread(
        target=_end_with_parent, args=(options.parent,), name="polybus-parent", daemon=True
    ).start()
    try:
        hand_over(
            options.data,
            progress=lambda text: _say(text) if text.startswith("damaged") else None,
            finished=lambda segment: _say(msgspec.json.encode({"segment": str(segment)}).decode()),
            retention_bytes=options.retention_bytes,
        )
    except (PolybusError, OSError) as error:
        sys.stderr.write(f"hand-over failed: {error}\n")
        return 1
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _end_with_parent(parent: int) -> None:
    """Exit with the bus: without it a hand-over is useless, and it may be killed at any time."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    block_pandas()
    sys.exit(main())
