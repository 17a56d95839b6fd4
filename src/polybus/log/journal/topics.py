"""Topics as the journal knows them: where the messages of each are in it, and which are damaged."""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa

from polybus import scan
from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log import columns
from polybus.log.journal.cache import LruCache, RecentBatches
from polybus.log.journal.commit import Damaged
from polybus.log.journal.message import read_rows
from polybus.log.journal.segment import CommitEntry, read_index, read_message
from polybus.log.journal.topic_commits import CommitRows, TopicCommits
from polybus.log.layout import index_path
from polybus.log.topics import frozen_error

logger = logging.getLogger("polybus.log")

RECENT_BYTES_MAX = 8 << 20
"""Memory for the batches written last, of all topics together."""
REREAD_BYTES_MAX = 8 << 20
"""Memory for the commits read last from the journal."""


class JournalTopics:
    """The topics of a log and the complete segments, with the lock and the caches for them."""

    def __init__(
        self,
        topics: "Mapping[str, JournalTopic]",
        owners: Mapping[str, str],
        on_frozen: Callable[[str], None],
    ) -> None:
        """`owners` are the accounts of topics, without those of the default account.

        `on_frozen` gets the topics that are found to be damaged after `opened`.
        """
        self.lock = threading.Lock()
        self.topics = topics
        self.owners = owners
        self.sealed: list[Path] = []
        self._on_frozen = on_frozen
        self._is_open = False
        self._recent = RecentBatches(bytes_max=RECENT_BYTES_MAX)
        self._reread: LruCache[tuple[Path, int], pa.RecordBatch] = LruCache(REREAD_BYTES_MAX)

    def opened(self) -> None:
        """The log is open: report damage from now on. `Log.frozen` has the damage found before."""
        self._is_open = True

    def report_frozen(self, topic: str) -> None:
        if self._is_open:
            self._on_frozen(topic)

    def add(
        self, segment: Path, entry: CommitEntry, batches: list[Batch], *, wait: bool = True
    ) -> bool:
        """A commit can be read from its segment. Without `wait`, False if a reader has the lock."""
        if not self.lock.acquire(blocking=wait):
            return False
        try:
            scan.add_places(entry.topics, self.topics, segment, entry.position, entry.size)
            self._recent.keep(batches, self.topics)
        finally:
            self.lock.release()
        return True

    def seal(self, segment: Path) -> None:
        # Maintenance is not woken: under full load a segment fills every second, and the hand-over
        # would run all the time. Every `handover-interval-s` it takes all sealed segments.
        with self.lock:
            self.sealed = [*self.sealed, segment]

    def forget(self, segment: Path) -> None:
        with self.lock:
            for log in list(self.topics.values()):
                log.places.forget(segment)
                log.forget_entries()
            # Under the lock, because the committer may add to the list meanwhile.
            self.sealed = [path for path in self.sealed if path != segment]

    def rows(self, place: CommitRows, topic: str, offset: int) -> pa.RecordBatch:
        """A topic's rows from an offset on.

        Raises StorageError, or FileNotFoundError if the segment was deleted.
        """
        try:
            commit = self._reread.get((place.segment, place.position))
            if commit is None:
                commit = read_rows(read_message(place.segment, place.position, place.size))
                weight = commit.nbytes + columns.STORED_OVERHEAD_BYTES
                self._reread.put((place.segment, place.position), commit, weight)
            return place.part_of(commit, offset)
        except Damaged as error:
            raise self._damage(place, topic, str(error)) from error

    def _damage(self, place: CommitRows, topic: str, reason: str) -> StorageError:
        """The error for a damaged commit; freezes every topic that has messages in it."""
        text = (
            f"journal segment {place.segment.name}, byte {place.position}: topic {topic!r}, "
            f"offsets {place.first_offset} to {place.stop_offset - 1}: {reason}"
        )
        logger.error("%s", text)
        for entry in read_index(index_path(place.segment)).entries:
            for rows in entry.topics if entry.position == place.position else ():
                log = self.topics.get(rows.topic)
                if log is not None and log.epoch == rows.epoch:
                    log.freeze(text)
        return StorageError("log.damaged", text)


class JournalTopic(scan.TopicEnd):
    """The end of a topic, and its commits in the journal. TopicLog has the older messages.

    Attributes:
        restored_mean_bytes: the estimated mean size of the messages that the journal had when the
        log was opened (log/journal/restored.py); None if it had none.
    """

    __slots__ = ("_shared", "name", "restored_mean_bytes")
    places: TopicCommits
    frozen: StorageError | None

    def __init__(self, name: str, epoch: int, shared: JournalTopics) -> None:
        super().__init__(epoch, 0, TopicCommits())
        self.name = name
        self.restored_mean_bytes: float | None = None
        self._shared = shared

    @property
    def handed_over(self) -> int:
        """The messages before this offset are not read from the journal."""
        return 0

    def freeze(self, reason: str) -> None:
        if self.frozen is None:
            self.frozen = frozen_error(self.name, reason)
            self._shared.report_frozen(self.name)
