"""Small commits by the thread of the bus, and writers that never take the interpreter's lock.

The committer's thread needs that lock some ten times per commit, often just when the thread of the
bus needs it. So the latter encodes a small commit itself, with the first append that finds it due:
what it encodes is in its caches. A `Writer` (_writing.pyx) then writes, syncs and indexes it, and
increments an eventfd, at which the thread of the bus takes the result (`take_results`). The thread
of the committer sleeps meanwhile; each commit puts off its alarm.

    due → encoded → [written → synced → indexed] → durable → readable from the segment

The committer's thread does everything else, under `_turn`, and first ends what was begun here:
commits that are large, or due without a further append; the disk's errors and what follows them;
sealing. It does all of it unless the log has the real disk, the compiled module and somebody who
watches the eventfd.
"""

import contextlib
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from polybus.batch import Batch
from polybus.log.disk import Disk
from polybus.log.journal.committer import NEVER, Committer, Running
from polybus.log.journal.segment import CommitEntry, SegmentWriter, encode_entry
from polybus.scan import plain

SMALL_BYTES = 64 << 10
"""Up to this much the thread of the bus encodes a commit itself."""
UNPLACED_MAX = 64
"""With this many commits that a reader keeps from being placed, the committer waits for it."""


def _load() -> Any:
    """The compiled module; None without it."""
    if plain.PURE:
        return None
    try:
        return importlib.import_module("polybus.log.journal._writing")
    except ImportError:
        return None


_writing = _load()


class _Begun(NamedTuple):
    """A commit that a writer writes."""

    batches: list[Batch]
    weight: int
    entry: CommitEntry
    records: bytes


class _Sync:
    """A sync of everything written, and its index, by a writer."""

    def __init__(self, by: Any, writer: SegmentWriter, entries: list[CommitEntry]) -> None:
        self._by = by
        self._writer = writer
        self._bytes = writer.bytes
        self._entries = entries
        self._records = _records_of(entries)
        by.begin(writer.descriptor, writer.begin_sync_elsewhere(), b"", self._records)

    def done(self) -> bool:
        return bool(self._by.is_done())

    def result(self) -> bool:
        _, sync_error, index_error, _ = self._by.result()
        _check(sync_error)
        self._writer.synced(self._bytes, self._entries, None if index_error else self._records)
        return True

    def exception(self) -> None:
        self._by.result()


class DirectCommitter(Committer):
    """A committer whose small commits do not need its thread, once `watch` was called."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._alarm: Any = None if _writing is None else _writing.Alarm()
        self._wake_up = self._alarm or self._wake_up
        self._event = -1
        self._writers: list[tuple[Any, threading.Thread]] = []
        self._begun: _Begun | None = None
        self._are_left = False
        """Whether the committer's thread must take the results."""
        self._unplaced: deque[tuple[Path, CommitEntry, list[Batch]]] = deque()
        """Written commits that cannot be read from the segment yet."""

    # On the thread of the bus.

    def watch(self) -> int:
        """Begin with small commits; return a descriptor, readable when `take_results` is due.

        -1 if this cannot be.
        """
        if _writing is None or type(self._disk) is not Disk:
            return -1
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # With "interval" the second one syncs, while commits continue.
        for _ in range(1 if self._each_synced else 2):
            writer = _writing.Writer(self._event)
            thread = threading.Thread(target=writer.run, name="polybus-writer", daemon=True)
            thread.start()
            self._writers.append((writer, thread))
        return self._event

    def take_results(self) -> None:
        """End what the writers have done: receipts become due before this returns."""
        os.eventfd_read(self._event)
        if not self._turn.acquire(blocking=False):
            self._are_left = True
            self._wake_up.set()
            return
        try:
            if self.failure is not None:
                # The repair ends them.
                return
            if self._begun is not None and self._writers[0][0].is_done():
                self._end()
            if isinstance(self._sync_running, _Sync) and self._sync_running.done():
                self._end_sync()
                if self._unsynced:
                    # When the committer's thread fell asleep, their sync could not be due yet.
                    self._wake_up.set()
        except Exception as error:
            self._fail_of(error)
            self._wake()
        finally:
            self._turn.release()
        if self._urgent and self._queue and self._wake_at != NEVER and not self._commit_here():
            self._wake()

    def _commit_here(self) -> bool:
        is_small = self._appended_bytes - self._taken_bytes <= SMALL_BYTES
        if not (self._writers and is_small and self._turn.acquire(blocking=False)):
            return False
        try:
            # Its thread may have been faster.
            return not self._queue or self._begin()
        except Exception as error:
            self._fail_of(error)
            return False
        finally:
            self._turn.release()

    def _begin(self) -> bool:
        """Encode what is queued and pass it to the writer, unless there is more to do."""
        writer, is_gathering = self._writer, self._gather_until is not None
        if not self._writers or not (self._urgent or is_gathering):
            return False
        by, _ = self._writers[0]
        if self._begun is not None:
            if not by.is_done():
                # `take_results` begins, or a later append, or the committer's thread in time.
                return True
            self._end()
        if writer is None or writer.ended:
            return False
        if not self._is_regular() or (self._each_synced and not self._can_sync(writer)):
            return False
        self._urgent = False
        self._take()
        pieces, entry = self._encode(writer, self._groups[0][0])
        if len(self._groups) > 1 or len(pieces) > 1:
            return False
        batches, weight = self._groups[0]
        records, index = b"", -1
        if self._each_synced:
            records, index = _records_of([entry]), writer.begin_sync_elsewhere()
        begun = _Begun(batches, weight, entry, records)
        # An error until here leaves the batches in `_groups`, from where the repair writes them.
        by.begin(writer.descriptor, index, pieces[0], records)
        self._begun = begun
        self._groups.popleft()
        if is_gathering:
            self._gather()
            self._due_at = self._gather_until or 0.0
        if not self._each_synced and self._unsynced:
            # Before the committer's thread must wake for it.
            if self._interval_is_over(within_s=self._settings.commit_delay_ms / 1000):
                self._begin_sync()
        timeout_s = self._due_in_s()
        if timeout_s is not None and timeout_s <= 0:
            self._wake_up.set()
        else:
            self._alarm.put_off(timeout_s)
        return True

    def _is_regular(self) -> bool:
        """Whether nothing but a small commit is to be done."""
        return not (
            self.failure is not None
            or self._groups
            or self._flush > self.durable
            or self._seal_wanted
            or self._closing
            or self._roll_is_due()
            or len(self._unplaced) >= UNPLACED_MAX
        )

    def _can_sync(self, writer: SegmentWriter) -> bool:
        return not (self._unsynced or self._syncing) and writer.can_sync_elsewhere()

    # On either thread, under `_turn`.

    def _end(self) -> None:
        """Take the writer's result, after waiting for it. Raises its OSError."""
        begun, writer = self._begun, self._writer
        assert begun is not None and writer is not None
        write_error, sync_error, index_error, took_s = self._writers[0][0].result()
        self._begun = None
        if write_error:
            self._groups.appendleft((begun.batches, begun.weight))
            _check(write_error)
        if not self._unsynced:
            self._synced_at = time.monotonic()
        writer.wrote(begun.entry.size)
        written = self._count_written(begun.entry, begun.weight, begun.batches)
        self._unplaced.append((writer.path, begun.entry, begun.batches))
        if begun.records and not sync_error:
            writer.synced(writer.bytes, [begun.entry], None if index_error else begun.records)
            self._announce([written], took_s)
        else:
            self._unsynced.append(written)
        self._place(wait=False)
        _check(sync_error)

    def _place(self, *, wait: bool) -> None:
        """Let written commits be read from the segment, in their order.

        Until then they are in memory. The thread of the bus does not wait for a reader.
        """
        while self._unplaced and self._shared.add(*self._unplaced[0], wait=wait):
            self._unplaced.popleft()

    def _submit_sync(self, writer: SegmentWriter) -> Running:
        if len(self._writers) < 2 or not writer.can_sync_elsewhere():
            return super()._submit_sync(writer)
        return _Sync(self._writers[1][0], writer, [one.entry for one in self._syncing])

    # On the committer's thread.

    def _work(self) -> None:
        self._are_left = False
        if self._begun is not None:
            self._end()
        self._place(wait=True)
        super()._work()

    def _repair(self) -> None:
        if self._begun is not None:
            # What it could not write or sync is queued for this repair and what follows it.
            with contextlib.suppress(OSError):
                self._end()
        super()._repair()

    def _due_in_s(self) -> float | None:
        is_awaited = self._begun is not None and self._flush > self.durable
        # After a failure only the next repair is due.
        is_due = self.failure is None and (self._are_left or is_awaited)
        return 0.0 if is_due else super()._due_in_s()

    def _end_threads(self) -> None:
        super()._end_threads()
        with self._turn:
            writers, self._writers = self._writers, []
        for writer, thread in writers:
            writer.stop()
            thread.join()
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


def _records_of(entries: Iterable[CommitEntry]) -> bytes:
    return b"".join([encode_entry(entry) for entry in entries])


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
