"""One topic of the log on disk: history, then the journal, then what is not yet committed.

Who may touch what: `stop` and the right end of `tail` belong to the bus's thread; `places` and the
left end of `tail` to the committer, under the log's lock. A batch is in `places` before it leaves
`tail`, so a reader that looks at the tail first and at the places second never meets a gap.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log import commit as commits
from polybus.log import rows as stored_rows
from polybus.log.cache import CommitCache
from polybus.log.commit import Damaged, TopicRows
from polybus.log.history import History
from polybus.log.index import CommitEntry
from polybus.log.places import Place, Places
from polybus.log.segment import read_message

_PLACES_MAX = 64
_RECENT_PLACES_MAX = 1024
_RETRIES_MAX = 5
_BATCH_BYTES_MIN = 1024
"""What a batch counts at least against `bytes_max`, so that a read of tiny commits ends."""


class Shared:
    """What all topics of a log use."""

    def __init__(self, *, recent_bytes_max: int, reread_bytes_max: int) -> None:
        self.lock = threading.Lock()
        self.recent = CommitCache(bytes_max=recent_bytes_max)
        self.reread = CommitCache(bytes_max=reread_bytes_max)
        self.on_damage: Callable[[Place, StorageError], None] = lambda place, error: None

    def rows(self, place: Place) -> pa.RecordBatch:
        """The commit's rows. Raises Damaged, or FileNotFoundError if the segment is gone."""
        rows = self.cached(place)
        if rows is None:
            rows = commits.rows_of(read_message(place.segment, place.position, place.size))
            self.reread.put(place.segment, place.position, rows)
        return rows

    def cached(self, place: Place) -> pa.RecordBatch | None:
        rows = self.recent.get(place.segment, place.position)
        return self.reread.get(place.segment, place.position) if rows is None else rows


class TopicLog:
    """A topic's messages. The module docstring says who may touch what."""

    __slots__ = ("_shared", "epoch", "frozen", "history", "name", "places", "stop", "tail")

    def __init__(self, name: str, epoch: int, history: History | None, shared: Shared) -> None:
        self.name = name
        self.epoch = epoch
        self.history = history
        self.frozen: StorageError | None = None
        self.stop = self.handed_over
        self.tail: deque[Batch] = deque()
        self.places = Places()
        self._shared = shared

    @property
    def start(self) -> int:
        return 0 if self.history is None else self.history.start

    @property
    def handed_over(self) -> int:
        return 0 if self.history is None else self.history.handed_over

    def freeze(self, reason: str) -> None:
        if self.frozen is None:
            text = f"topic {self.name!r} is damaged and takes no writes: {reason}"
            self.frozen = StorageError("log.frozen", text)

    def add(self, segment: Path, entry: CommitEntry, rows: TopicRows) -> None:
        """A commit is written: it is read from the journal from now on. Under the log's lock."""
        self.places.add(segment, entry, rows)
        end = rows.first_offset + rows.count
        while self.tail and self.tail[0].first_offset < end:
            self.tail.popleft()

    def check(self, offset: int) -> int:
        """Return `stop` if the offset is within the bounds, else raise UsageError."""
        stop = self.stop
        if not self.start <= offset <= stop:
            text = f"offset {offset} of {self.name!r}; it holds {self.start} to {stop}"
            raise UsageError("log.offset-unknown", text)
        return stop

    def read(self, offset: int, *, bytes_max: int) -> list[Batch]:
        stop = self.check(offset)
        found: list[Batch] = []
        while offset < stop and bytes_max > 0:
            try:
                batches = self._read_some(offset, bytes_max=bytes_max)
            except StorageError:
                # What comes before the damage is served; a read that begins there raises.
                if found:
                    break
                raise
            found += batches
            offset = found[-1].last_offset + 1
            bytes_max -= sum([max(batch.value_bytes, _BATCH_BYTES_MIN) for batch in batches])
        return found

    def _read_some(self, offset: int, *, bytes_max: int) -> list[Batch]:
        """One batch at least, from the one place that has the offset."""
        for _ in range(_RETRIES_MAX):
            if self.history is not None and offset < self.history.handed_over:
                return self._read_history(self.history, offset, bytes_max=bytes_max)
            tail = self._tail_from(offset)
            if tail is not None:
                return list(_limited(tail, bytes_max))
            with self._shared.lock:
                places = self.places.find(offset, places_max=_PLACES_MAX)
            # A hand-over may come between any two of these lines: then history has it now.
            if places:
                try:
                    return self._read_places(places, offset, bytes_max=bytes_max)
                except FileNotFoundError:
                    continue
        text = f"topic {self.name!r}, offset {offset}: no file of the log has it"
        self.freeze(text)
        raise StorageError("log.damaged", text)

    def _read_history(self, history: History, offset: int, *, bytes_max: int) -> list[Batch]:
        found = []
        for rows in history.read(offset, bytes_max=bytes_max):
            found.append(
                stored_rows.batch_of(rows, topic=self.name, epoch=self.epoch, first_offset=offset)
            )
            offset += rows.num_rows
        return found

    def _read_places(self, places: list[Place], offset: int, *, bytes_max: int) -> list[Batch]:
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
            if bytes_max <= 0 or offset < place.first_offset + place.count:
                break
        return found

    def _batch_at(
        self, place: Place, rows: pa.RecordBatch, offset: int, *, bytes_max: int | None
    ) -> Batch:
        skipped = offset - place.first_offset
        part = rows.slice(place.first_row + skipped, place.count - skipped)
        if part.column(2)[0].as_py() != offset:
            raise Damaged("the index and the segment do not agree")
        if bytes_max is not None:
            part = stored_rows.cut(part, bytes_max=bytes_max)
        return stored_rows.batch_of(part, topic=self.name, epoch=self.epoch, first_offset=offset)

    def _damage(self, place: Place, reason: str) -> StorageError:
        last = place.first_offset + place.count - 1
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
        tail = self._tail_from(offset)
        if tail is not None:
            return tail
        with self._shared.lock:
            tail = list(self.tail)
            places = self.places.find(offset, places_max=_RECENT_PLACES_MAX)
        found: list[Batch] = []
        for place in places:
            rows = self._shared.recent.get(place.segment, place.position)
            if rows is None:
                return None
            found.append(self._batch_at(place, rows, offset, bytes_max=None))
            offset = found[-1].last_offset + 1
        if offset != (tail[0].first_offset if tail else stop):
            return None
        return found + tail

    def _tail_from(self, offset: int) -> list[Batch] | None:
        """The uncommitted batches from an offset on, or None if it is not among them."""
        try:
            return _from(reversed(self.tail), offset)
        except RuntimeError:
            # The committer took some meanwhile; a copy is made in one step.
            return _from(reversed(tuple(self.tail)), offset)

    def offset_at(self, timestamp_us: int) -> int:
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
            row = stored_rows.row_at(rows.slice(place.first_row, place.count), timestamp_us)
            if row is not None and place.first_offset + row >= offset:
                return place.first_offset + row
            offset = place.first_offset + place.count
        for batch in tail:
            if batch.timestamp_us >= timestamp_us:
                return batch.first_offset
        return stop


def _from(newest_first: Iterable[Batch], offset: int) -> list[Batch] | None:
    found: list[Batch] = []
    for batch in newest_first:
        if batch.first_offset <= offset:
            skipped = offset - batch.first_offset
            if skipped >= len(batch):
                return None
            found.append(batch.slice(skipped, len(batch)) if skipped else batch)
            found.reverse()
            return found
        found.append(batch)
    return None


def _limited(batches: Iterable[Batch], bytes_max: int) -> Iterable[Batch]:
    for batch in batches:
        part = stored_rows.cut_batch(batch, bytes_max=bytes_max)
        yield part
        bytes_max -= max(part.value_bytes, _BATCH_BYTES_MIN)
        if bytes_max <= 0 or part is not batch:
            return
