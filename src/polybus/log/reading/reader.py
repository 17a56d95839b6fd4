"""LogReader: the OffsetReader of a data folder.

Its durable messages are those in history and in indexed commits. Messages that subscribers saw live
before their fsync are not visible yet; after a crash their offsets may be given to other messages.

While we read, the hand-over moves rows from the journal to history and replaces small history files
by larger ones, and retention removes old ones. So a plan may be outdated: when a file is missing,
or is not the planned one, the rest of the range is planned again. The order of reads makes that
safe: journal first, manifest second, because rows are in the manifest before their segment is
deleted.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.history import manifest as manifests
from polybus.log.history.manifest import Manifest
from polybus.log.history.topic_history import ALWAYS, NextAndRows, TimeRange, offset_at
from polybus.log.interface import Bounds
from polybus.log.journal.commit import Damaged
from polybus.log.reading.folder import JournalIndex, TopicNotes
from polybus.log.reading.offset_reader import OffsetReader, check_range, recreated
from polybus.log.reading.pieces import (
    Piece,
    ReadPlan,
    history_pieces,
    journal_pieces,
    read_piece,
)
from polybus.log.topics import read_data_metadata, storage_error, was_deleted

FRESH_TOPICS = 16
"""The bounds of up to this many topics are never cached: reading them takes less than 1 ms."""
KNOWN_S = 1.0
"""How long bounds are cached if no change to them is visible."""
_ATTEMPTS_MAX = 5


class LogReader(OffsetReader):
    """The topics of a data folder."""

    def __init__(self, data: Path) -> None:
        """Open a data folder.

        Raises UsageError `data.not-found` if it is not a data folder; StorageError `log.format` if
        a newer version wrote it, `log.denied` or `log.failed` if it cannot be read.
        """
        self.place: Path = data
        try:
            note = read_data_metadata(data)
        except OSError as error:
            raise storage_error(error, f"cannot read {data / 'polybus.json'}") from error
        if note is None:
            text = f"{data} is not a data folder of polybus (it has no polybus.json)"
            raise UsageError("data.not-found", text)
        self._notes = TopicNotes(data)
        self._journal = JournalIndex(data)
        self._known: dict[str, Bounds] = {}
        self._known_at: object = None
        self._known_until_s = 0.0

    def topics(self, *, system: bool = False) -> list[str]:
        return self._notes.names(system=system)

    def all_bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """Of many topics, only those that may have changed are read.

        Commits and removed segments show in the index of the journal, and new and deleted topics in
        the state of their parent folder. Changes by retention, and damage, are noticed within
        `KNOWN_S`.
        """
        wanted = list(topics)
        self._refresh()
        seen, is_settled = self._notes.changes()
        is_known = is_settled and seen == self._known_at
        if not is_known or time.monotonic() > self._known_until_s:
            self._known = {}
            self._known_at = seen if is_settled else None
            self._known_until_s = time.monotonic() + KNOWN_S
        known = self._known if len(wanted) > FRESH_TOPICS else {}
        found = {topic: known[topic] for topic in wanted if topic in known}
        for topic in wanted if len(found) < len(wanted) else ():
            if topic in found:
                continue
            with suppress(UsageError):
                # At once: `_manifest` refreshes the journal, which may make earlier bounds
                # outdated.
                bounds = self._bounds(topic, self._manifest(topic))
                self._known[topic] = found[topic] = bounds
        return found

    def _refresh(self) -> None:
        """Refresh the journal, and drop the cached bounds of topics with new commits.

        Raises StorageError `log.denied` or `log.failed`.
        """
        try:
            changed = self._journal.refresh()
        except OSError as error:
            raise storage_error(error, f"cannot read the journal of {self.place}") from error
        if changed is None:
            self._known = {}
        for topic, _ in changed or ():
            self._known.pop(topic, None)

    def _bounds(self, topic: str, manifest: Manifest) -> Bounds:
        stop = max(manifest.handed_over, self._journal.stop((topic, manifest.epoch)))
        return Bounds(manifest.epoch, manifest.start, stop)

    def history(self, topic: str) -> Manifest:
        self._refresh()
        return self._manifest(topic)

    def _manifest(self, topic: str) -> Manifest:
        """The topic's manifest, after a refresh of the journal. Raises as `bounds` does."""
        try:
            manifest = self._notes.manifest(topic)
        except UsageError:
            folder = layout.topic_folder(self.place, topic)
            if self._is_folder_lost(topic, folder):
                raise StorageError("log.damaged", f"{folder}: is missing") from None
            raise
        if self._seems_lost(topic, manifest):
            # Unless its first rows came, and were handed over, since the refresh of the journal.
            self._refresh()
            manifest = self._notes.manifest(topic)
            if self._seems_lost(topic, manifest):
                path = layout.topic_folder(self.place, topic) / manifests.NAME
                raise StorageError("log.damaged", f"{path}: is missing")
        return manifest

    def _seems_lost(self, topic: str, manifest: Manifest) -> bool:
        """Whether the topic had rows, but neither manifest nor journal has the first of them."""
        if manifest.handed_over or self._journal.start((topic, manifest.epoch)) == 0:
            return False
        floor_epoch, _ = self._journal.floor().get(topic, (0, 0))
        is_removed = floor_epoch == manifest.epoch
        return is_removed or manifests.is_lost(layout.topic_folder(self.place, topic))

    def _is_folder_lost(self, topic: str, folder: Path) -> bool:
        epoch, _ = self._journal.floor().get(topic, (0, 0))
        # The tombstone stays until the topic is removed from the floor: check again.
        return epoch > 0 and not was_deleted(folder, epoch) and topic in self._journal.floor()

    def plan(self, topic: str, start: int, stop: int, *, times: TimeRange = ALWAYS) -> ReadPlan:
        """Also raises StorageError `log.damaged`, which names the offsets that no file has."""
        self._refresh()
        manifest = self._manifest(topic)
        bounds = self._bounds(topic, manifest)
        check_range(topic, start, stop, bounds)
        plan = ReadPlan(topic, manifest.epoch, start, stop, (), times)
        folder = layout.topic_folder(self.place, topic)
        pieces = list(history_pieces(folder, manifest, start, stop, times))
        if stop > manifest.handed_over:
            pieces += journal_pieces(self._journal, plan, max(start, manifest.handed_over))
        return ReadPlan(topic, manifest.epoch, start, stop, tuple(pieces), times)

    def _rows(
        self, plan: ReadPlan, columns: Sequence[str], *, rows_max: int, bytes_max: int
    ) -> Iterator[NextAndRows]:
        pieces = deque(plan.pieces)
        attempts = 0
        while pieces:
            piece = pieces.popleft()
            offset = piece.first
            try:
                found = read_piece(piece, plan, columns, rows_max=rows_max, bytes_max=bytes_max)
                for offset, rows in found:
                    attempts = 0
                    yield offset, rows
            except (FileNotFoundError, Damaged) as error:
                attempts += 1
                rest = piece.cut(offset, piece.stop)
                pieces.extendleft(reversed(self._again(plan, rest, error, attempts)))

    def _again(
        self, plan: ReadPlan, rest: Piece, error: Exception, attempts: int
    ) -> tuple[Piece, ...]:
        """Where the rest of a piece is now. Raises StorageError if it is damaged."""
        bounds = self.bounds(plan.topic)
        text = f"topic {plan.topic!r}, offsets {rest.first} to {rest.stop - 1}: {rest.path}: "
        if bounds.epoch == plan.epoch and bounds.stop < rest.stop:
            # Retention moves the start. Only a missing file moves the end back.
            raise StorageError("log.damaged", f"{text}the log ends at {bounds.stop}") from error
        fresh = self.plan(plan.topic, rest.first, rest.stop, times=plan.times)
        if fresh.epoch != plan.epoch:
            raise recreated(plan.topic)
        same = [piece for piece in fresh.pieces if piece.path == rest.path]
        unchanged = same and same[0].file == rest.file and same[0].commits[:1] == rest.commits[:1]
        missing = isinstance(error, FileNotFoundError)
        if attempts >= _ATTEMPTS_MAX or (unchanged and not missing):
            reason = "it is missing" if missing else str(error)
            raise StorageError("log.damaged", text + reason) from error
        return fresh.pieces

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        bounds = self.bounds(topic)
        try:
            plan = self.plan(
                topic, bounds.start, bounds.stop, times=TimeRange(since_us=timestamp_us)
            )
            for rows in self.read_plan(plan, columns=("offset", "timestamp")):
                found = offset_at(rows, timestamp_us)
                if found is not None:
                    return found
        except UsageError as error:
            # Retention moved the start meanwhile: search again from there.
            if error.code != "log.offset-unknown" or self.bounds(topic).start <= bounds.start:
                raise
            return self.offset_at(topic, timestamp_us)
        return bounds.stop
