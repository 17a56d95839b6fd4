"""LogReader: reads a data folder from another process than the bus, which may run or not.

It takes no lock and writes nothing. It shows durable messages only: history, and commits that are
indexed. Messages that subscribers saw live before their fsync are not visible yet; after a crash
their offsets may be given to other messages.

While we read, the hand-over moves rows from the journal to history and replaces small history files
by larger ones, and retention removes old ones. So a plan is a guess: when a file is missing, or is
not what the plan says, the rest of the range is planned again. The order of looking makes that
safe: journal first, manifest second, because rows are in the manifest before their segment is
deleted.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.columns import SCHEMA
from polybus.log.history import manifest as manifests
from polybus.log.history.manifest import Manifest
from polybus.log.history.topic_history import ALWAYS, TimeRange, offset_at
from polybus.log.interface import Bounds
from polybus.log.journal.commit import Damaged
from polybus.log.reading.folder import JournalIndex, TopicNotes
from polybus.log.reading.pieces import (
    Piece,
    ReadPlan,
    history_pieces,
    journal_pieces,
    read_piece,
)
from polybus.log.topics import read_data_note, was_deleted

Lost = Callable[[UsageError], None]
"""Called when messages of a plan no longer exist."""

ROWS_MAX = 65_536
BATCH_BYTES_MAX = 32 << 20
_ATTEMPTS_MAX = 5


class LogReader:
    """The topics of a data folder. For one thread at a time."""

    def __init__(self, data: Path) -> None:
        """Open a data folder.

        Raises UsageError `data.not-found`, it is not a data folder; StorageError `log.format`, a
        newer version wrote it.
        """
        self.data = data
        try:
            note = read_data_note(data)
        except OSError as error:
            text = f"{data}: cannot read polybus.json: {error.strerror}"
            raise UsageError("data.not-found", text) from error
        if note is None:
            text = f"{data} is not a data folder of polybus (it has no polybus.json)"
            raise UsageError("data.not-found", text)
        self._notes = TopicNotes(data)
        self._journal = JournalIndex(data)

    def topics(self, *, system: bool = False) -> list[str]:
        """The names of all topics, sorted; system topics (`$…`) only on request."""
        return self._notes.names(system=system)

    def bounds(self, topic: str) -> Bounds:
        """The offsets of the topic's durable messages.

        Raises UsageError `topic.unknown`; StorageError `log.damaged`.
        """
        self._journal.refresh()
        return self._bounds(topic, self._manifest(topic))

    def all_bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """The bounds of many topics by one look at the journal; unknown topics are left out."""
        self._journal.refresh()
        found = {}
        for topic in topics:
            try:
                found[topic] = self._bounds(topic, self._manifest(topic))
            except UsageError:
                continue
        return found

    def _bounds(self, topic: str, manifest: Manifest) -> Bounds:
        stop = max(manifest.handed_over, self._journal.stop((topic, manifest.epoch)))
        return Bounds(manifest.epoch, manifest.start, stop)

    def history(self, topic: str) -> Manifest:
        """The manifest of the topic's history. Raises as `bounds`."""
        self._journal.refresh()
        return self._manifest(topic)

    def _manifest(self, topic: str) -> Manifest:
        """The topic's manifest, after a look at the journal. Raises as `bounds`."""
        folder = layout.topic_folder(self.data, topic)
        try:
            manifest = self._notes.manifest(topic)
        except UsageError:
            if self._is_folder_lost(topic, folder):
                raise StorageError("log.damaged", f"{folder}: is missing") from None
            raise
        if self._seems_lost(topic, folder, manifest):
            # Unless its first rows came, and went to history, since the look at the journal.
            self._journal.refresh()
            manifest = self._notes.manifest(topic)
            if self._seems_lost(topic, folder, manifest):
                raise StorageError("log.damaged", f"{folder / manifests.NAME}: is missing")
        return manifest

    def _seems_lost(self, topic: str, folder: Path, manifest: Manifest) -> bool:
        """Whether the topic had rows, and neither manifest nor journal knows the first of them."""
        if manifest.handed_over or self._journal.start((topic, manifest.epoch)) == 0:
            return False
        floor_epoch, _ = self._journal.floor().get(topic, (0, 0))
        return floor_epoch == manifest.epoch or manifests.is_lost(folder)

    def _is_folder_lost(self, topic: str, folder: Path) -> bool:
        epoch, _ = self._journal.floor().get(topic, (0, 0))
        # The proof of a deletion stays until the floor has forgotten the topic: look again.
        return epoch > 0 and not was_deleted(folder, epoch) and topic in self._journal.floor()

    def plan(self, topic: str, start: int, stop: int, *, times: TimeRange = ALWAYS) -> ReadPlan:
        """Where the offsets `start` to `stop` are; files outside `times` are left out.

        Raises UsageError `topic.unknown`; `log.offset-unknown`, the range is outside the bounds;
        StorageError `log.damaged`, naming the offsets that no file has.
        """
        self._journal.refresh()
        manifest = self._manifest(topic)
        bounds = self._bounds(topic, manifest)
        if start < bounds.start or stop > bounds.stop or start > stop:
            text = f"offsets {start} to {stop} of topic {topic!r} were requested; the log holds"
            raise UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")
        plan = ReadPlan(topic, manifest.epoch, start, stop, (), times)
        folder = layout.topic_folder(self.data, topic)
        pieces = list(history_pieces(folder, manifest, start, stop, times))
        if stop > manifest.handed_over:
            pieces += journal_pieces(self._journal, plan, max(start, manifest.handed_over))
        return ReadPlan(topic, manifest.epoch, start, stop, tuple(pieces), times)

    def read(
        self,
        topic: str,
        start: int,
        stop: int,
        *,
        columns: Sequence[str] | None = None,
        rows_max: int = ROWS_MAX,
    ) -> Iterator[pa.RecordBatch]:
        """The offsets `start` to `stop`, each once and in order, with all columns or some.

        Batches have up to `rows_max` rows and about 32 MiB. The call raises as `plan`, the
        iterator as `read_plan`.
        """
        plan = self.plan(topic, start, stop)
        return self.read_plan(plan, columns=columns, rows_max=rows_max)

    def read_plan(
        self,
        plan: ReadPlan,
        *,
        columns: Sequence[str] | None = None,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BATCH_BYTES_MAX,
        lost: Lost | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a plan, which another process may have made some time ago.

        Raises:
            UsageError: `log.offset-unknown`, retention removed a part of it; `topic.unknown` or
                `topic.recreated`, the topic is not the one that was planned. With `lost`, `lost`
                is called with the error instead, and reading continues with what is left.
            StorageError: `log.damaged`, naming file, topic and offsets.
        """
        wanted = SCHEMA.names if columns is None else list(columns)
        found = self._rows(plan, wanted, (rows_max, bytes_max), lost)
        return joined(found, rows_max=rows_max, bytes_max=bytes_max)

    def _rows(
        self, plan: ReadPlan, columns: Sequence[str], maxima: tuple[int, int], lost: Lost | None
    ) -> Iterator[pa.RecordBatch]:
        pieces = deque(plan.pieces)
        attempts = 0
        while pieces:
            piece = pieces.popleft()
            offset = piece.first
            try:
                found = read_piece(piece, plan, columns, rows_max=maxima[0], bytes_max=maxima[1])
                for following, rows in found:
                    offset, attempts = following, 0
                    yield rows
            except (FileNotFoundError, Damaged) as error:
                attempts += 1
                rest = piece.cut(offset, piece.stop)
                try:
                    pieces.extendleft(reversed(self._again(plan, rest, error, attempts)))
                except UsageError as gone:
                    if lost is None:
                        raise
                    lost(gone)
                    pieces.extendleft(reversed(self._kept(plan, rest)))

    def _again(
        self, plan: ReadPlan, rest: Piece, error: Exception, attempts: int
    ) -> tuple[Piece, ...]:
        """Where the rest of a piece is now. Raises StorageError if it is damaged there."""
        bounds = self.bounds(plan.topic)
        text = f"topic {plan.topic!r}, offsets {rest.first} to {rest.stop - 1}: {rest.path}: "
        if bounds.epoch == plan.epoch and bounds.stop < rest.stop:
            # Retention moves the start. Only a missing file moves the end back.
            raise StorageError("log.damaged", f"{text}the log ends at {bounds.stop}") from error
        fresh = self.plan(plan.topic, rest.first, rest.stop, times=plan.times)
        if fresh.epoch != plan.epoch:
            gone = f"topic {plan.topic!r} was deleted and created again while it was read"
            raise UsageError("topic.recreated", gone)
        same = [piece for piece in fresh.pieces if piece.path == rest.path]
        unchanged = same and same[0].file == rest.file and same[0].commits[:1] == rest.commits[:1]
        missing = isinstance(error, FileNotFoundError)
        if attempts >= _ATTEMPTS_MAX or (unchanged and not missing):
            reason = "it is missing" if missing else str(error)
            raise StorageError("log.damaged", text + reason) from error
        return fresh.pieces

    def _kept(self, plan: ReadPlan, rest: Piece) -> tuple[Piece, ...]:
        """What is left of a piece after a loss; nothing if the topic is gone."""
        try:
            bounds = self.bounds(plan.topic)
            start, stop = max(rest.first, bounds.start), min(rest.stop, bounds.stop)
            if bounds.epoch != plan.epoch or start >= stop:
                return ()
            return self.plan(plan.topic, start, stop, times=plan.times).pieces
        except UsageError:
            return ()

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        """The first offset whose timestamp is at or after the time, else `stop`.

        Raises as `bounds`.
        """
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
            # Retention moved the start meanwhile: look again from there.
            if error.code != "log.offset-unknown" or self.bounds(topic).start <= bounds.start:
                raise
            return self.offset_at(topic, timestamp_us)
        return bounds.stop


def joined(
    batches: Iterable[pa.RecordBatch], *, rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of up to `rows_max` rows and about `bytes_max` bytes.

    Small batches are joined and large ones cut, but a row is never cut. Joining copies, so batches
    of a useful size are passed on as they are.
    """
    held: list[pa.RecordBatch] = []
    held_rows = held_bytes = 0
    for batch in batches:
        for part in _cut(batch, rows_max, bytes_max):
            size = part.nbytes
            if held and (held_rows + part.num_rows > rows_max or held_bytes + size > bytes_max):
                yield _one(held)
                held, held_rows, held_bytes = [], 0, 0
            held.append(part)
            held_rows += part.num_rows
            held_bytes += size
    if held:
        yield _one(held)


def _one(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    return held[0] if len(held) == 1 else pa.concat_batches(held)


def _cut(batch: pa.RecordBatch, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows <= rows_max and (batch.num_rows <= 1 or batch.nbytes <= bytes_max):
        yield batch
        return
    half = min(rows_max, batch.num_rows // 2 or 1)
    for start in range(0, batch.num_rows, half):
        yield from _cut(batch.slice(start, half), rows_max, bytes_max)
