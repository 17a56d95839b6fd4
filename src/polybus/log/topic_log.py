"""One topic of the log on disk: history, then the journal, then the tail in memory.

The tail has the batches that are not written yet, and recent ones within the log's limit.
Ownership: `stop` and the right end of `tail` belong to the thread of the bus; `places` (the
commits) and the left end of `tail` belong to the journal, under the log's lock. A batch is in
`places` before it leaves `tail`, so a reader that looks at the tail first and at `places` second
never finds a gap.
"""

import logging
from bisect import bisect_right

import pyarrow as pa

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.log import columns
from polybus.log.history.topic_history import TopicHistory
from polybus.log.journal.topics import JournalTopic, JournalTopics
from polybus.log.topics import storage_error

logger = logging.getLogger("polybus.log")

_RECENT_BATCHES_MAX = 1024
# If commits have one message each, a read ends before Arrow's objects take megabytes.
_READ_BATCHES_MAX = 256
_RETRIES_MAX = 5


class TopicLog(JournalTopic):
    """A topic's messages. The module docstring has the ownership of its fields."""

    __slots__ = ("history",)

    def __init__(
        self, name: str, epoch: int, history: TopicHistory | None, shared: JournalTopics
    ) -> None:
        super().__init__(name, epoch, shared)
        self.history = history
        self.stop = self.handed_over

    @property
    def start(self) -> int:
        return 0 if self.history is None else self.history.start

    @property
    def handed_over(self) -> int:
        return 0 if self.history is None else self.history.handed_over

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
        while offset < stop and bytes_max > 0 and len(found) < _READ_BATCHES_MAX:
            try:
                batches = self._read_some(offset, stop, bytes_max=bytes_max)
            except (StorageError, OSError) as error:
                # Return the messages before the damage. A read that begins at the damage raises.
                if found:
                    break
                if isinstance(error, OSError):
                    raise storage_error(error, f"cannot read topic {self.name!r}") from error
                raise
            found += batches
            offset = found[-1].last_offset + 1
            bytes_max -= sum([columns.weight_of(batch) for batch in batches])
        return found

    def _read_some(self, offset: int, stop: int, *, bytes_max: int) -> list[Batch]:
        """At least one batch, from history, journal or tail."""
        for _ in range(_RETRIES_MAX):
            if self.history is not None and offset < self.history.handed_over:
                try:
                    rows = self.history.read(offset, bytes_max=bytes_max)
                except StorageError as error:
                    if error.code == "log.damaged" and self.frozen is None:
                        logger.error("log.damaged: topic %r is frozen: %s", self.name, error.text)
                        self.freeze(error.text)
                    raise
                if rows is not None:
                    return [self._batch_of(rows, offset)]
            tail = self._tail_from(offset, stop)
            if tail is not None:
                return columns.limited(tail, bytes_max=bytes_max)
            with self._shared.lock:
                place = self.places.find(offset)
            if place is not None:
                try:
                    rows = self._shared.rows(place, self.name, offset)
                    return [self._batch_of(columns.cut(rows, bytes_max=bytes_max), offset)]
                except FileNotFoundError:
                    continue  # A hand-over moved the rows to history meanwhile: try again.
        text = f"topic {self.name!r}, offset {offset} is missing from the log"
        self.freeze(text)
        raise StorageError("log.damaged", text)

    def _batch_of(self, rows: pa.RecordBatch, offset: int) -> Batch:
        return columns.batch_of(rows, topic=self.name, epoch=self.epoch, first_offset=offset)

    def read_recent(self, offset: int) -> list[Batch] | None:
        stop = self.check(offset)
        if offset == stop:
            return []
        tail = self._tail_from(offset, stop)
        if tail is None or len(tail) > _RECENT_BATCHES_MAX:
            return None
        return [columns.copy_of(batch) for batch in tail]

    def _tail_from(self, offset: int, stop: int) -> list[Batch] | None:
        """The batches in memory from an offset on; None if the offset is not in memory.

        Batches at or after `stop` are left out: an offset beyond `stop` is not readable yet.
        """
        try:
            if self.tail[0].first_offset > offset:
                return None
        except IndexError:
            return None
        # Copying is atomic, so other threads may change the tail meanwhile.
        tail = list(self.tail)
        while tail and tail[-1].first_offset >= stop:
            tail.pop()
        first = bisect_right(tail, offset, key=lambda batch: batch.first_offset) - 1
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
            rows = self._shared.rows(place, self.name, place.first_offset)
            row = columns.row_at(rows, timestamp_us)
            if row is not None and place.first_offset + row >= offset:
                return place.first_offset + row
            offset = place.stop_offset
        for batch in tail:
            if batch.timestamp_us >= timestamp_us:
                # During an append the tail is ahead of `stop` for a moment.
                return min(batch.first_offset, stop)
        return stop
