"""The committer: the thread that decides when queued batches are written and when fsync happens.

The thread of the bus queues batches. The committer writes all queued batches, of all topics, as one
commit, syncs it, records it in the index, and only then reports it as durable. Batches that arrive
during a sync form the next commit.

    queued → (commit_bytes, commit_delay_ms, or urgent) → written → synced → indexed → durable

log/journal/direct.py takes small commits from this thread.

With durability "fsync" every commit is synced before the next; with "interval" the commits of
`fsync_interval_ms` are synced together on a second thread while commits continue. Written batches
are released from memory. When the disk fails, the committer accepts nothing more, and every second
it writes unsynced commits again at their positions. log/journal/recovery.py says how a restart
recovers from each prefix of these writes.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeVar

from polybus import config, scan
from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.disk import Disk
from polybus.log.interface import LogCallbacks
from polybus.log.journal.commit import Encoder
from polybus.log.journal.segment import CommitEntry, SegmentWriter
from polybus.log.journal.timings import Timings
from polybus.log.journal.topics import JournalTopics
from polybus.log.layout import segment_path
from polybus.log.topics import storage_error

logger = logging.getLogger("polybus.log")
T = TypeVar("T")

RETRY_S = 1.0
NEVER = 1 << 62
BATCH_OVERHEAD_BYTES = 512
MESSAGE_OVERHEAD_BYTES = 32
GRACE = 0.25
"""The part of `commit_delay_ms` that a commit waits longer for an append to trigger it: the bus has
then just delivered, so it rarely competes with the commit for the interpreter's lock.
"""
COMMIT_BYTES_FACTOR = 2
"""A commit takes up to this many times `commit_bytes`; the rest of the queue goes into further
commits under the same sync. Larger commits are slower, because they exceed the CPU caches."""
UNSYNCED_BYTES_MAX = 16 << 20
"""A sync starts at the latest when this much is written."""


class Written(NamedTuple):
    """A written commit that is not synced yet; `tickets` is its number of batches."""

    entry: CommitEntry
    weight: int
    tickets: int
    appended_us: int


class Running(Protocol):
    """A sync on another thread."""

    def done(self) -> bool: ...

    def result(self) -> bool | None:
        """Wait for its end; whether the commits are in the index, too. Raises OSError."""

    def exception(self) -> BaseException | None:
        """Wait for its end, whatever it is."""


class AutoResetEvent:
    """Wakes the one thread that waits for it; set several times, it wakes it once.

    A bare lock: unlike with threading.Event, a wait makes no objects and runs no Python.
    """

    __slots__ = ("_unset",)

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        try:
            self._unset.release()
        except RuntimeError:
            # It is set already, and no thread has waited since.
            pass

    def clear(self) -> None:
        self._unset.acquire(blocking=False)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is set, or was since the last wait or `clear`; at most this long."""
        self._unset.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Committer:
    """Writes the journal. `append` is for one thread, everything else for any thread.

    It passes commits and complete segments to `shared`, and calls `callbacks`, on its own thread.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durability: Literal["fsync", "interval"],
        settings: config.Journal,
        disk: Disk,
        shared: JournalTopics,
        callbacks: LogCallbacks,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._each_synced = durability == "fsync"
        self._disk = disk
        self._shared = shared
        self._callbacks = callbacks
        self._encoder = Encoder(shared.owners)
        # Written by the thread of the bus, read by the committer.
        self._queue: deque[tuple[list[Batch], int]] = deque()
        self._ticket = 0
        self._appended_bytes = 0
        self._urgent = False
        # Written by who has `_turn`.
        self.durable = 0
        self.sync_times = Timings()
        self.durable_times = Timings()
        self.failure: StorageError | None = None
        self._taken_bytes = 0
        self._released_bytes = 0
        self._wake_at = NEVER
        self._due_at = 0.0
        self._groups: deque[tuple[list[Batch], int]] = deque()
        self._unsynced: list[Written] = []
        self._syncing: list[Written] = []
        self._sync_running: Running | None = None
        self._sync_thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-sync")
        self._commit = 0
        self._gather_until: float | None = None
        self._synced_at = 0.0
        self._opened_at = 0.0
        self._retry_at = 0.0
        self._writer: SegmentWriter | None = None
        self._wake_up = AutoResetEvent()
        self._settled = threading.Condition()
        self._turn = threading.Lock()
        self._flush = 0
        self._seal_wanted = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="polybus-committer", daemon=True)

    def start(self, next_commit: int, live: SegmentWriter | None) -> None:
        """Continue the live segment or begin a new one, and start the thread. Raises OSError."""
        self._commit = next_commit
        self._writer = live or self._begin_segment()
        self._opened_at = time.monotonic()
        self._thread.start()

    @property
    def last_ticket(self) -> int:
        return self._ticket

    @property
    def commits_stop(self) -> int:
        """A number above that of every commit that holds what was appended so far."""
        # Read before `_commit`: what is written meanwhile is counted twice, not left out.
        durable = self.durable
        return self._commit + self._ticket - durable

    @property
    def pending_bytes(self) -> int:
        return self._appended_bytes - self._released_bytes

    def append(self, batches: list[Batch], urgent: bool) -> int:
        """Queue batches that go into the same commit; return the ticket of the last."""
        if not batches:
            return self._ticket
        weight = scan.weigh(batches, MESSAGE_OVERHEAD_BYTES, BATCH_OVERHEAD_BYTES)
        self._queue.append((batches, weight))
        self._ticket += len(batches)
        self._appended_bytes += weight
        if urgent and self._each_synced:
            self._urgent = True
        # Waking the thread costs more than all of the above, so only if it sleeps and has work.
        if self._wake_at != NEVER and (
            self._urgent
            or self._appended_bytes - self._taken_bytes >= self._wake_at
            or time.monotonic() >= self._due_at
        ):
            if not self._commit_here():
                self._wake()
        return self._ticket

    def _commit_here(self) -> bool:
        """Begin the commit that is due on this thread; False if the committer's must do it."""
        return False

    def _wake(self) -> None:
        self._wake_at = NEVER
        self._wake_up.set()

    def sync(self) -> None:
        """Block until everything appended so far is durable. Raises StorageError if it fails."""
        ticket = self._ticket
        with self._settled:
            self._flush = max(self._flush, ticket)
        self._wait_until(lambda: self.durable >= ticket)

    def seal(self) -> None:
        """Make everything durable and seal the segment, unless it is empty. Raises StorageError."""
        self.sync()
        self._seal_wanted = True
        self._wait_until(lambda: not self._seal_wanted)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        with self._settled:
            while not done():
                if self.failure is not None:
                    raise self.failure.copy()
                self._wake_up.set()
                self._settled.wait(1.0)

    def close(self) -> None:
        """Sync and stop. Raises StorageError if something could not be made durable."""
        try:
            self.sync()
        finally:
            self._closing = True
            self._wake_up.set()
            self._thread.join()
            self._end_threads()
            if self._writer is not None:
                self._writer.close()

    def _end_threads(self) -> None:
        self._sync_thread.shutdown()

    # On the committer's thread.

    def _run(self) -> None:
        while self._wait():
            with self._turn:
                self._round()

    def _round(self) -> None:
        try:
            if self.failure is not None:
                self._repair()
            self._work()
            if self.failure is not None:
                self._recovered()
                # Health is restored even if nothing was waiting to be written.
                _tell(self._callbacks.on_durable, self.durable)
        except Exception as error:
            self._fail_of(error)

    def _wait(self) -> bool:
        """Sleep until there is work; False on close."""
        while not self._closing:
            with self._turn:
                self._wake_up.clear()
                if self._closing:
                    # What was cleared may have been the call of `close`.
                    break
                if self._queue and self._gather_until is None:
                    self._gather()
                is_idle = self._gather_until is None
                self._due_at = math.inf if self._gather_until is None else self._gather_until
                self._wake_at = 1 if is_idle else self._settings.commit_bytes
                if is_idle and self._queue:
                    continue
                timeout_s = self._due_in_s()
                if timeout_s is not None and timeout_s <= 0:
                    break
            self._wake_up.wait(timeout_s)
        self._wake_at = NEVER
        return not self._closing

    def _gathering_is_over(self) -> bool:
        return self._gather_until is not None and time.monotonic() >= self._gather_until

    def _gather(self) -> None:
        self._gather_until = time.monotonic() + self._settings.commit_delay_ms / 1000

    def _due_in_s(self) -> float | None:
        """The time until the next work; None means until the next append."""
        now = time.monotonic()
        if self.failure is not None:
            return self._retry_at - now
        due = []
        if (self._queue and self._commit_wanted()) or self._groups or self._seal_wanted:
            return 0.0
        if self._gather_until is not None:
            if now >= self._gather_until:
                return 0.0
            due.append(self._gather_until + GRACE * self._settings.commit_delay_ms / 1000)
        interval_s = self._settings.fsync_interval_ms / 1000
        if self._sync_running is not None:
            if self._sync_running.done() or self._flush > self.durable:
                return 0.0
            if self._unsynced:
                # Their sync comes next. The end of this one may wake only a loop that is blocked.
                due.append(now + max(interval_s, 0.001))
        elif self._unsynced:
            if self._flush > self.durable:
                return 0.0
            due.append(self._synced_at + interval_s)
        if self._writer is not None and self._writer.commit_count:
            due.append(self._opened_at + self._settings.segment_age_s)
        return min(due) - now if due else None

    def _commit_wanted(self) -> bool:
        waiting = self._appended_bytes - self._taken_bytes
        return self._urgent or waiting >= self._settings.commit_bytes or self._flush > self.durable

    def _work(self) -> None:
        if self._writer is None or self._writer.ended:
            self._roll()
        if self._gather_until is None or self._commit_wanted() or self._gathering_is_over():
            self._urgent = False
            self._take()
            if self._groups:
                # More will probably follow. Polling after the delay is cheaper than being woken.
                self._gather()
            else:
                self._gather_until = None
        while self._groups:
            self._write(*self._groups[0])
            self._groups.popleft()
            self._sync_if_due()
        self._sync_if_due()
        if self._seal_wanted or self._roll_is_due():
            self._roll()

    def _take(self) -> None:
        """Move the queue into groups; each group becomes a commit."""
        weight_max = self._settings.commit_bytes * COMMIT_BYTES_FACTOR
        groups = scan.take_groups(self._queue, weight_max)
        self._groups += groups
        self._taken_bytes += sum([weight for _, weight in groups])

    def _write(self, batches: list[Batch], weight: int) -> None:
        writer = self._writer
        assert writer is not None
        pieces, entry = self._encode(writer, batches)
        if not self._unsynced:
            self._synced_at = time.monotonic()
        writer.append(*pieces)
        self._shared.add(writer.path, entry, batches)
        self._unsynced.append(self._count_written(entry, weight, batches))

    def _encode(
        self, writer: SegmentWriter, batches: list[Batch]
    ) -> tuple[list[memoryview], CommitEntry]:
        """The next commit, at the end of the segment; its bytes are valid until the one after."""
        synced = self._commit - 1 - len(self._syncing) - len(self._unsynced)
        pieces, topics = self._encoder.encode(self._commit, synced, batches, mark=writer.mark)
        size = sum([piece.nbytes for piece in pieces])
        return pieces, CommitEntry(self._commit, writer.bytes, size, topics)

    def _count_written(self, entry: CommitEntry, weight: int, batches: list[Batch]) -> Written:
        self._released_bytes += weight
        self._commit += 1
        return Written(entry, weight, len(batches), batches[0].timestamp_us)

    def _sync_if_due(self) -> None:
        if self._sync_running is not None and self._sync_running.done():
            self._end_sync()
        if not (self._unsynced or self._syncing):
            return
        if self._flush > self.durable or self._seal_wanted or self._roll_is_due():
            self._sync()
        elif self._each_synced:
            unsynced_bytes = sum([one.weight for one in self._unsynced])
            if not self._groups or unsynced_bytes >= UNSYNCED_BYTES_MAX:
                self._sync()
        elif self._unsynced and self._interval_is_over():
            self._begin_sync()

    def _interval_is_over(self, within_s: float = 0.0) -> bool:
        """Whether the next sync on the other thread is due, or will be soon."""
        due_at = self._synced_at + self._settings.fsync_interval_ms / 1000
        return self._sync_running is None and time.monotonic() + within_s >= due_at

    def _sync(self) -> None:
        """Make everything written durable before this returns."""
        if self._sync_running is not None:
            self._end_sync()
        if self._unsynced:
            self._begin_sync(here=True)
            self._end_sync()

    def _begin_sync(self, *, here: bool = False) -> None:
        """Sync everything written so far: on this thread, or on the other one meanwhile."""
        assert self._writer is not None
        self._syncing, self._unsynced = self._unsynced, []
        self._synced_at = time.monotonic()
        if here:
            self._writer.sync()
        else:
            self._sync_running = self._submit_sync(self._writer)

    def _submit_sync(self, writer: SegmentWriter) -> Running:
        running = self._sync_thread.submit(writer.sync)
        running.add_done_callback(lambda _: self._wake_up.set())
        return running

    def _end_sync(self) -> None:
        """Index the synced commits and report them as durable. Raises the OSError of the sync."""
        assert self._writer is not None
        is_indexed: bool | None = False
        if self._sync_running is not None:
            running, self._sync_running = self._sync_running, None
            is_indexed = running.result()
        took_s = time.monotonic() - self._synced_at
        synced, self._syncing = self._syncing, []
        if not is_indexed:
            self._writer.index([one.entry for one in synced])
        self._announce(synced, took_s)

    def _announce(self, synced: list[Written], took_s: float) -> None:
        """Report commits as durable that are synced and indexed."""
        self.durable += sum([one.tickets for one in synced])
        # Before a receipt is sent: a peer that then sends more must not be refused.
        self._recovered()
        _tell(self._callbacks.on_durable, self.durable)
        # Receipts do not wait for the rest.
        with self._settled:
            self._settled.notify_all()
        self.sync_times.add(took_s)
        now_us = time.time_ns() // 1000
        for one in synced:
            self.durable_times.add((now_us - one.appended_us) / 1e6)

    def _roll_is_due(self) -> bool:
        holds_any = self._unsynced or self._syncing
        if self._writer is None or not (self._writer.commit_count or holds_any):
            return False
        if self._writer.bytes >= self._settings.segment_bytes_max:
            return True
        return time.monotonic() >= self._opened_at + self._settings.segment_age_s

    def _roll(self) -> None:
        """Sync every commit, seal the segment and begin the next."""
        # The age may have been reached, or a seal requested, just after the last check of what is
        # due: commits that are indexed later would be in the next segment's index.
        self._sync()
        writer = self._writer
        if writer is not None and writer.commit_count:
            writer.seal()
            writer.close()
            self._writer = None
            self._shared.seal(writer.path)
        if self._writer is None:
            self._writer = self._begin_segment()
        with self._settled:
            self._seal_wanted = False
            self._settled.notify_all()

    def _begin_segment(self) -> SegmentWriter:
        self._opened_at = time.monotonic()
        return SegmentWriter.create(segment_path(self._folder, self._commit), self._disk)

    def _repair(self) -> None:
        """After a failure: cut off a partial write, and write unsynced commits again."""
        if self._sync_running is not None:
            self._sync_running.exception()
            self._sync_running = None
        self._unsynced = self._syncing + self._unsynced
        self._syncing = []
        if self._writer is not None:
            self._writer.repair([one.entry for one in self._unsynced])

    def _recovered(self) -> None:
        if self.failure is not None:
            logger.warning("the journal can be written again")
            self.failure = None

    def _fail_of(self, error: Exception) -> None:
        if isinstance(error, OSError):
            self._fail(storage_error(error, "the journal cannot be written"))
        else:
            # A bug must not end the thread silently: receipts would stop without an error.
            logger.error("the committer failed", exc_info=error)
            self._fail(StorageError("log.failed", f"the committer failed: {error!r}"))

    def _fail(self, failure: StorageError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        if self.failure is not None:
            return
        self.failure = failure
        logger.error("%s; retrying every %g s", failure.text, RETRY_S)
        with self._settled:
            self._settled.notify_all()
        _tell(self._callbacks.on_failed, failure)


def _tell(listener: Callable[[T], None], news: T) -> None:
    """Call a callback. Its failure, for example a closed loop, must not look like a disk error."""
    try:
        listener(news)
    except Exception:
        logger.exception("a callback of the log failed")
