"""FileLog: the Log on a local disk, a shared journal in front of each topic's history.

`append` and `append_all` give each message its offset: the next one of its topic.

The order in which journal, history, topic.json and their indexes are written, and how each prefix
is recovered, is in log/journal/recovery.py, log/history/handover.py and log/topics.py.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from polybus import config, scan
from polybus.batch import Batch
from polybus.errors import BusyError, StorageError
from polybus.log import layout
from polybus.log.disk import Disk
from polybus.log.history import retention
from polybus.log.history.maintenance import Maintenance
from polybus.log.history.manifest import NAME as MANIFEST
from polybus.log.history.manifest import HistoryLock, is_lost
from polybus.log.history.topic_history import TopicHistory
from polybus.log.interface import LogCallbacks
from polybus.log.journal import floor as floors
from polybus.log.journal.committer import NEVER
from polybus.log.journal.direct import DirectCommitter
from polybus.log.journal.recovery import (
    Recovered,
    orphan_keys,
    recover,
    restore,
    settle_orphans,
)
from polybus.log.journal.restored import estimate_sizes
from polybus.log.journal.segment import delete_segments
from polybus.log.journal.timings import Timings
from polybus.log.journal.topics import JournalTopics
from polybus.log.layout import (
    first_commit_of,
    folders_in,
    journal_folder,
    topic_folder,
    trash_folder,
)
from polybus.log.topic_log import TopicLog
from polybus.log.topics import (
    WHAT_TO_DO,
    TopicMetadata,
    TopicStore,
    opened_data,
    unknown,
    was_deleted,
)

logger = logging.getLogger("polybus.log")


class FileLog(TopicStore[TopicLog]):
    """The Log on disk (polybus.log.interface has the promises).

    `create_topic` and `delete_topic` sync small files, so they may take some milliseconds.

    Attributes:
        data: the data directory, locked while the log is open.
    """

    def __init__(  # noqa: PLR0913 - all named by the caller
        self,
        data: Path,
        *,
        durability: Literal["fsync", "interval"],
        journal: config.Journal,
        retention: config.Retention,
        clock: Callable[[], int],
        callbacks: LogCallbacks | None = None,
        disk: Disk | None = None,
        maintenance: bool = True,
    ) -> None:
        """Open the data directory, create what is missing, and recover from a crash.

        Raises StorageError `log.locked`, `log.format`, `log.damaged` (no topic can be trusted),
        `log.full` or `log.failed`.
        """
        super().__init__(data, clock=clock, disk=disk or Disk())
        self.data = data
        self._callbacks = callbacks or LogCallbacks()
        self._retention = retention
        self._tombstones: dict[int, int] = {}
        """The epoch of each, and the commit from which on the journal has no row of its topic."""
        self._undeleted: set[Path] = set()
        """Segments that are handed over; the disk has failed to delete all of their files."""
        self._shared = JournalTopics(self._topics, self._owners, self._callbacks.on_frozen)
        self._journal = DirectCommitter(
            journal_folder(data),
            durability=durability,
            settings=journal,
            disk=self._disk,
            shared=self._shared,
            callbacks=self._callbacks,
        )
        self._maintenance = Maintenance(
            self,
            interval_s=journal.handover_interval_s,
            retention_bytes=retention.bytes,
            clock_us=clock,
        )
        with opened_data(data, self._disk) as self._lock:
            self._open()
        self._shared.opened()
        if maintenance:
            self._maintenance.start()

    def _open(self) -> None:
        self._disk.make_folder(journal_folder(self.data))
        self._load_notes(self.data)
        self._open_topics()
        # A kill may have come between the creation of a name and the fsync of its folder, and this
        # start relies on the names that it finds without another fsync.
        for folder in (self.data.parent, self.data, journal_folder(self.data)):
            self._disk.sync_folder(folder)
        recovered = recover(self.data, self._disk)
        floor = floors.load_or_make(self.data, self._handed_over(), self._disk)
        self._settle_strays(recovered, floor)
        estimate_sizes(self._topics.values())
        settle_orphans(self._topics, self.data, self._disk)
        for log in self._topics.values():
            if log.history is not None and log.places.start != 0 and is_lost(log.history.folder):
                path = log.history.folder / MANIFEST
                log.freeze(f"{path}: is missing; {WHAT_TO_DO}")
                logger.error("log.damaged: topic %r is frozen: %s: is missing", log.name, path)
        for log in self._topics.values():
            lost = floors.missing(log.name, log.epoch, log.stop, floor)
            if lost is not None:
                reason = "removed from the journal but missing from history"
                log.freeze(f"offsets {lost[0]} to {lost[1]}: {reason}")
                logger.error("%s", log.frozen)
        self._shared.sealed = [segment.path for segment in recovered.segments if segment.sealed]
        live = recovered.live
        writer = None if live is None else live.writer(self._disk)
        self._journal.start(recovered.next_commit, writer)

    def _handed_over(self) -> floors.Floor:
        logs = list(self._topics.values())
        return {log.name: (log.epoch, log.handed_over) for log in logs if log.handed_over}

    def _opened(self, note: TopicMetadata) -> TopicLog:
        history = None
        try:
            history = TopicHistory(topic_folder(self.data, note.name))
            history.check_files()
        except StorageError as error:
            log = TopicLog(note.name, note.epoch, history, self._shared)
            if note.name not in self._damaged:
                logger.error("%s: topic %r is frozen: %s", error.code, note.name, error.text)
                log.freeze(error.text)
            return log
        return TopicLog(note.name, note.epoch, history, self._shared)

    def _settle_strays(self, recovered: Recovered, floor: floors.Floor) -> None:
        """Find rows without a topic, and whether that topic was deleted or is lost."""
        strays = restore(self._topics, recovered)
        orphans = orphan_keys(self.data)
        handed_over = {(topic, epoch) for topic, (epoch, _) in floor.items()}
        found = strays | {key for key in orphans | handed_over if not self._is_open(*key)}
        deleted_max, self._epoch_max = (
            self._epoch_max,
            max([self._epoch_max, *[epoch for _, epoch in found]]),
        )
        for topic, epoch in sorted(found):
            if was_deleted(topic_folder(self.data, topic), epoch):
                continue
            if self._is_old and epoch <= deleted_max and self._is_older(topic, epoch):
                self._bury(self.data, topic, epoch)
                continue
            reason = f"the journal knows it with epoch {epoch}, but there is no topic.json"
            if topic in self._notes:
                reason = f"the journal knows it with epoch {epoch}, topic.json with another"
            logger.error("log.damaged: topic %r: %s; %s", topic, reason, WHAT_TO_DO)
            self._strays.setdefault(topic, []).append(epoch)
            if topic not in self._notes:
                self._damaged[topic] = f"{reason}; {WHAT_TO_DO}"
                self._notes[topic] = TopicMetadata(topic, epoch, "")
                self._topics[topic] = TopicLog(topic, epoch, None, self._shared)
            if not self._is_older(topic, epoch):
                self._topics[topic].freeze(f"{reason}; {WHAT_TO_DO}")
        if self._is_old:
            self._is_old = False
            self._write_data_note(self.data)
        # Damaged or missing segments may have rows of unknown topics, so every tombstone stays.
        is_whole = not orphans and not any(segment.holes for segment in recovered.segments)
        names = [path.name for path in folders_in(trash_folder(self.data))]
        buried = {int(name) for name in names if name.isdigit()}
        self._tombstones = dict.fromkeys(buried, recovered.next_commit if is_whole else NEVER)
        if is_whole:
            self._drop_tombstones(buried - {epoch for _, epoch in strays}, floor)

    def _is_open(self, topic: str, epoch: int) -> bool:
        return topic in self._topics and self._topics[topic].epoch == epoch

    def _is_older(self, topic: str, epoch: int) -> bool:
        """Whether rows belong to an earlier topic of the same name."""
        log = self._topics.get(topic)
        return log is None or (topic not in self._damaged and epoch < log.epoch)

    def _buried(self, topic: str, epoch: int) -> None:
        log = self._topics.get(topic)
        self._tombstones[epoch] = self._journal.commits_stop
        if log is not None and log.epoch == epoch and log.frozen is None and not log.stop:
            self._drop_tombstone(epoch)  # It never had a message.

    def _drop_tombstones(self, epochs: set[int], floor: floors.Floor) -> None:
        """Remove tombstones of topics without rows in the journal, after the floor is without them.

        A tombstone that cannot be read now stays, because the floor still has its topic.
        """
        if epochs:
            kept = floors.save_without_deleted(self.data, floor, self._disk)
            for epoch in epochs - {epoch for epoch, _ in kept.values()}:
                self._drop_tombstone(epoch)

    def _drop_tombstone(self, epoch: int) -> None:
        self._tombstones.pop(epoch, None)
        self._disk.remove_folder(trash_folder(self.data) / str(epoch))

    # The Log.

    def describe(self, topic: str) -> dict[str, int]:
        log = self._log_of(topic)
        files = [] if log.history is None else log.history.manifest.files
        return {
            "history-files": len(files),
            "history-bytes": sum(file.bytes for file in files),
            "handed-over": log.handed_over,
        }

    def stored_bytes(self, topic: str, messages: int = 0, value_bytes: int = 0) -> int:
        log = self._log_of(topic)
        files = [] if log.history is None else log.history.manifest.files
        waiting = max(0, log.stop - max(log.start, log.handed_over))
        # The newest uncommitted messages are those that were appended since the start.
        newer = min(messages, waiting)
        mean = value_bytes / messages if messages else 0.0
        before = mean if log.restored_mean_bytes is None else log.restored_mean_bytes
        older = (waiting - newer) * before
        return sum(file.bytes for file in files) + int(newer * mean + older)

    def append(self, batch: Batch, *, urgent: bool = False) -> int:
        log = self._topics.get(batch.topic)
        if log is None:
            raise unknown(batch.topic)
        if log.frozen is not None:
            raise log.frozen.copy()
        if self._journal.failure is not None:
            raise self._journal.failure.copy()
        if not batch.timestamp_us:
            batch.timestamp_us = self._clock()
        batch.epoch = log.epoch
        batch.first_offset = log.stop
        if not batch.spans:
            return self._journal.last_ticket
        # The tail before `stop`: a reader that sees the new end finds the messages.
        log.tail.append(batch)
        log.stop += len(batch.spans) >> 1
        return self._journal.append([batch], urgent)

    def takes(self, batches: Sequence[Batch]) -> bool:
        return self._journal.failure is None and scan.find_ends(batches, self._topics) is not None

    def append_all(
        self, batches: Sequence[Batch], *, urgent: bool = False, is_taken: bool = False
    ) -> int:
        logs = scan.find_ends(batches, self._topics)
        if logs is None:
            for batch in batches:
                log = self._log_of(batch.topic)
                if log.frozen is not None:
                    raise log.frozen.copy()
            raise AssertionError("every topic exists and can be written")
        if self._journal.failure is not None and not is_taken:
            raise self._journal.failure.copy()
        # Nothing below can fail. The bus has set the time of all batches, or of none.
        now_us = (batches[0].timestamp_us if batches else 0) or self._clock()
        return self._journal.append(scan.take_batches(batches, logs, now_us), urgent)

    @property
    def durable(self) -> int:
        return self._journal.durable

    @property
    def pending_bytes(self) -> int:
        return self._journal.pending_bytes

    @property
    def sync_figures(self) -> tuple[int, float]:
        """The number of fsyncs of the journal, and their total time in seconds."""
        times = self._journal.sync_times
        return sum(times.counts), times.total_s

    @property
    def timings(self) -> dict[str, tuple[str, Timings]]:
        """Histograms by name, each with its meaning."""
        durable = "From append to durable, for the oldest batch of each commit."
        return {
            "fsync_duration_seconds": ("Fsyncs of the journal.", self._journal.sync_times),
            "durable_latency_seconds": (durable, self._journal.durable_times),
        }

    def watch(self) -> int:
        """A descriptor; call `take_results` on the bus's thread when it is readable, until `close`.

        -1 if there is nothing to watch. Receipts then take less time (log/journal/direct.py).
        """
        return self._journal.watch()

    def take_results(self) -> None:
        self._journal.take_results()

    def read(self, topic: str, offset: int, *, bytes_max: int = 1 << 20) -> list[Batch]:
        log = self._log_of(topic)
        try:
            return log.read(offset, bytes_max=bytes_max)
        except (StorageError, OSError):
            # A deletion during the read removes the files.
            if self._topics.get(topic) is not log:
                raise unknown(topic) from None
            raise

    def read_recent(self, topic: str, offset: int) -> list[Batch] | None:
        return self._log_of(topic).read_recent(offset)

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        return self._log_of(topic).offset_at(timestamp_us)

    def sync(self) -> None:
        self._journal.sync()

    def close(self) -> None:
        self._maintenance.stop()
        try:
            self._journal.close()
        finally:
            self._lock.release()

    # Beyond the Log: health and maintenance.

    @property
    def failure(self) -> StorageError | None:
        """Why nothing can be appended at the moment, or None. The log retries by itself."""
        return self._journal.failure

    def seal(self) -> None:
        """Seal the live segment, so that it can be handed over. Blocks like `sync`."""
        self._journal.seal()

    def sealed_segments(self) -> list[Path]:
        return [*self._shared.sealed, *sorted(self._undeleted)]

    def after_handover(self, segments: list[Path]) -> None:
        """Reload the manifests; delete these segments, and those that an earlier call could not."""
        for log in list(self._topics.values()):
            with self._shared.lock:
                is_placed = log.places.start is not None
            if log.history is not None and is_placed:
                log.history.reload()
        done = [segment for segment in segments if self._is_handed_over(segment)]
        for segment in done:
            self._shared.forget(segment)
        self._undeleted.update(done)
        delete_segments(sorted(self._undeleted), self._disk, handed_over=self._handed_over)
        self._undeleted.clear()

    def _is_handed_over(self, segment: Path) -> bool:
        """Check every topic's manifest before the segment, perhaps the only copy, is deleted."""
        for log in list(self._topics.values()):
            with self._shared.lock:
                stop = log.places.stop_in(segment)
            if stop is not None and stop > log.handed_over:
                logger.error("%s is kept: topic %r is not handed over", segment.name, log.name)
                return False
        return True

    def set_retention(self, retention: config.Retention) -> None:
        """Limits of topics without their own, from the next maintenance on."""
        self._retention = retention
        self._maintenance.retention_bytes = retention.bytes

    def apply_retention(self, now_us: int) -> None:
        # A damaged topic keeps everything until it is repaired.
        frozen = self.frozen
        settings = {
            topic: note.settings for topic, note in list(self._notes.items()) if topic not in frozen
        }
        changed = retention.apply(
            self.data, settings, self._retention, now_us=now_us, held_from=self._callbacks.held_from
        )
        for topic in changed:
            log = self._topics.get(topic)
            if log is not None and log.history is not None:
                log.history.reload()
        self._forget_deleted()

    def _forget_deleted(self) -> None:
        """Remove the tombstones of topics that nothing in the journal names any more."""
        # An index without its segment names topics, too.
        paths = [*layout.segments(self.data), *layout.orphan_indexes(self.data)]
        oldest = min(map(first_commit_of, paths), default=0)
        gone = {epoch for epoch, stop in self._tombstones.copy().items() if stop <= oldest}
        if gone:
            # A backup shares the lock: it copies tombstones after the journal, too.
            with suppress(BusyError), HistoryLock(self.data):
                self._drop_tombstones(gone, floors.current(self.data, self._handed_over))
