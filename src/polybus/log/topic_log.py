"""One topic of the log on disk: history, then the journal, then the tail in memory.

The tail has the batches that are not written yet, and recently written ones within the log's limit.
Ownership: `stop` and the right end of `tail` belong to the thread of the bus; `places` (the
commits) and the left end of `tail` belong to the committer, under the log's lock. A batch is in
`places` before it leaves `tail`, so a reader that looks at the tail first and at `places` second
never finds a gap.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable

import pyarrow as pa

from polybus import scan
from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log import columns
from polybus.log.history.topic_history import TopicHistory
from polybus.log.journal.cache import CommitCache, RecentBatches
from polybus.log.journal.commit import Damaged
from polybus.log.journal.message import read_rows as rows_of
from polybus.log.journal.segment import read_message
from polybus.log.journal.topic_commits import CommitRows, TopicCommits

_COMMITS_MAX = 64
_RECENT_BATCHES_MAX = 1024
_RETRIES_MAX = 5
_BATCH_BYTES_MIN = 1024
"""The least that a batch counts against `bytes_max`, so that a read of tiny commits ends."""


class LogShared:
    """The lock and caches that all topics of a log share."""

    def __init__(self, *, recent_bytes_max: int, reread_bytes_max: int) -> None:
        self.lock = threading.Lock()
        self.recent = RecentBatches(bytes_max=recent_bytes_max)
        self.reread = CommitCache(bytes_max=reread_bytes_max)
        self.on_damage: Callable[[CommitRows, StorageError], None] = lambda place, error: None

    def rows(self, place: CommitRows) -> pa.RecordBatch:
        """The commit's rows. Raises Damaged, or FileNotFoundError if the segment was deleted."""
        rows = self.reread.get(place.segment, place.position)
        if rows is None:
            rows = rows_of(read_message(place.segment, place.position, place.size))
            self.reread.put(place.segment, place.position, rows)
        return rows


class TopicLog(scan.TopicEnd):
    """A topic's messages. The module docstring has the ownership of its fields."""

    __slots__ = ("_shared", "history", "name")
    places: TopicCommits
    frozen: StorageError | None

    def __init__(
        self, name: str, epoch: int, history: TopicHistory | None, shared: LogShared
    ) -> None:
        super().__init__(epoch, 0, TopicCommits())
        self.name = name
        self.history = history
        self.stop = self.handed_over
        self._shared = shared

    @property
    def start(self) -> int:
        return 0 if self.history is None else self.history.start

    @property
    def handed_over(self) -> int:
        return 0 if self.history is None else self.history.handed_over

    def freeze(self, reason: str) -> None:
        if self.frozen is None:
            text = f"topic {self.name!r} is damaged and cannot be written: {reason}"
            self.frozen = StorageError("log.frozen", text)

    def check(self, offset: int) -> int:
        """Return `stop` if the offset is within the bounds, else raise UsageError."""
        stop = self.stop
        if not self.start <= offset <= stop:
            text = f"topic {self.name!r} has no offset {offset}; it holds {self.start} to {stop}"
            raise UsageError("log.offset-unknown", text)
        return stop

    def read(self, offset: int, *, bytes_max: int) -> list[Batch]:
        stop = self.check(offset)
        found: list[Batch] = []
        while offset < stop and bytes_max > 0:
            try:
                batches = self._read_some(offset, stop, bytes_max=bytes_max)
            except StorageError:
                # Serve what comes before the damage. A read that begins there raises.
                if found:
                    break
                raise
            found += batches
            offset = found[-1].last_offset + 1
            bytes_max -= sum([max(batch.value_bytes, _BATCH_BYTES_MIN) for batch in batches])
        return found

    def _read_some(self, offset: int, stop: int, *, bytes_max: int) -> list[Batch]:
        """At least one batch, from wherever the offset is."""
        for _ in range(_RETRIES_MAX):
            if self.history is not None and offset < self.history.handed_over:
                return self._read_history(self.history, offset, bytes_max=bytes_max)
            tail = self._tail_from(offset, stop)
            if tail is not None:
                return list(_limited(tail, bytes_max))
            with self._shared.lock:
                places = self.places.find(offset, commits_max=_COMMITS_MAX)
            # A hand-over may have moved the rows to history meanwhile: look again.
            if places:
                try:
                    return self._read_places(places, offset, bytes_max=bytes_max)
                except FileNotFoundError:
                    continue
        text = f"topic {self.name!r}, offset {offset}: it is in no file of the log"
        self.freeze(text)
        raise StorageError("log.damaged", text)

    def _read_history(self, history: TopicHistory, offset: int, *, bytes_max: int) -> list[Batch]:
        found = []
        for rows in history.read(offset, bytes_max=bytes_max):
            found.append(
                columns.batch_of(rows, topic=self.name, epoch=self.epoch, first_offset=offset)
            )
            offset += rows.num_rows
        return found

    def _read_places(self, places: list[CommitRows], offset: int, *, bytes_max: int) -> list[Batch]:
        found: list[Batch] = []
        for place in places:
            try:
                batch = self._batch_at(place, self._shared.rows(place), offset, bytes_max=bytes_max)
            except (Damaged, FileNotFoundError) as error:
                if found:
                    break
                if isinstance(error, FileNotFoundError):
                    raise
                raise self._damage(place, str(error)) from error
            found.append(batch)
            offset = batch.last_offset + 1
            bytes_max -= max(batch.value_bytes, _BATCH_BYTES_MIN)
            if bytes_max <= 0 or offset < place.stop_offset:
                break
        return found

    def _batch_at(
        self, place: CommitRows, rows: pa.RecordBatch, offset: int, *, bytes_max: int
    ) -> Batch:
        skipped = offset - place.first_offset
        part = rows.slice(place.first_row + skipped, place.row_count - skipped)
        if part.column(2)[0].as_py() != offset:
            raise Damaged("the index and the segment do not agree")
        part = columns.cut(part, bytes_max=bytes_max)
        return columns.batch_of(part, topic=self.name, epoch=self.epoch, first_offset=offset)

    def _damage(self, place: CommitRows, reason: str) -> StorageError:
        last = place.stop_offset - 1
        text = (
            f"journal segment {place.segment.name}, byte {place.position}: topic {self.name!r}, "
            f"offsets {place.first_offset} to {last}: {reason}"
        )
        error = StorageError("log.damaged", text)
        self._shared.on_damage(place, error)
        return error

    def read_recent(self, offset: int) -> list[Batch] | None:
        stop = self.check(offset)
        if offset == stop:
            return []
        tail = self._tail_from(offset, stop)
        if tail is None or len(tail) > _RECENT_BATCHES_MAX:
            return None
        return [_same(batch) for batch in tail]

    def _tail_from(self, offset: int, stop: int) -> list[Batch] | None:
        """The batches in memory from an offset on; None if the offset is not in memory.

        Batches at or after `stop` are left out: an offset beyond `stop` is not readable yet.
        """
        # Copying is atomic, so other threads may change the tail meanwhile.
        tail = list(self.tail)
        while tail and tail[-1].first_offset >= stop:
            tail.pop()
        first = bisect_right(tail, offset, key=_first_offset) - 1
        if first < 0:
            return None
        found = tail[first:]
        skipped = offset - found[0].first_offset
        if skipped >= len(found[0]):
            return None
        if skipped:
            found[0] = found[0].slice(skipped, len(found[0]))
        return found

    def offset_at(self, timestamp_us: int) -> int:
        for _ in range(_RETRIES_MAX):
            try:
                return self._find_time(timestamp_us)
            except FileNotFoundError:
                # A hand-over moved the rows to history.
                continue
        raise StorageError("log.damaged", f"topic {self.name!r}: files of the log are missing")

    def _find_time(self, timestamp_us: int) -> int:
        stop = self.stop
        tail = tuple(self.tail)
        offset = self.start
        if self.history is not None and self.history.handed_over:
            found = self.history.offset_at(timestamp_us)
            if found is not None:
                return found
            offset = self.history.handed_over
        while True:
            with self._shared.lock:
                place = self.places.find_time(timestamp_us, offset_min=offset)
            if place is None or (tail and place.first_offset >= tail[0].first_offset):
                break
            try:
                rows = self._shared.rows(place)
            except Damaged as error:
                raise self._damage(place, str(error)) from error
            row = columns.row_at(rows.slice(place.first_row, place.row_count), timestamp_us)
            if row is not None and place.first_offset + row >= offset:
                return place.first_offset + row
            offset = place.stop_offset
        for batch in tail:
            if batch.timestamp_us >= timestamp_us:
                # During an append the tail is ahead of `stop` for a moment.
                return min(batch.first_offset, stop)
        return stop


def _first_offset(batch: Batch) -> int:
    return batch.first_offset


def _same(batch: Batch) -> Batch:
    """A copy for a reader, whose cached encodings must not stay in memory with ours."""
    return batch.slice(0, len(batch))


def _limited(batches: Iterable[Batch], bytes_max: int) -> Iterable[Batch]:
    for batch in batches:
        part = columns.cut_batch(batch, bytes_max=bytes_max)
        yield _same(batch) if part is batch else part
        bytes_max -= max(part.value_bytes, _BATCH_BYTES_MIN)
        if bytes_max <= 0 or part is not batch:
            return
