"""LogReader: a data folder read by another process than the bus, which may run or not.

It takes no lock and writes nothing. What it shows is durable: messages whose commit is indexed, and
history. Messages that subscribers saw live but that no fsync has reached are not there yet; after a
crash their offsets may be given to others.

The hand-over moves rows from the journal to history and replaces small history files by larger
ones, retention removes old ones, all while we read. So a plan is a guess: when a file is gone, or
is not what the plan says, the rest of the range is planned again from what is there now. The order
of looking makes that safe: journal first, manifest second, because rows are in the manifest before
their segment goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import StorageError, UsageError
from polybus.log import layout
from polybus.log.columns import SCHEMA
from polybus.log.history.manifest import Manifest
from polybus.log.interface import Bounds
from polybus.log.journal.commit import Damaged
from polybus.log.reading.batches import joined
from polybus.log.reading.index import JournalIndex
from polybus.log.reading.notes import TopicNotes
from polybus.log.reading.pieces import ALWAYS, Piece, Rows, Times, read_piece, row_group_starts
from polybus.log.reading.plan import Plan, history_pieces, journal_pieces
from polybus.log.topics import DataNote

__all__ = [
    "ALWAYS",
    "HistoryPath",
    "LogReader",
    "Lost",
    "Piece",
    "Plan",
    "Times",
    "TopicHistory",
    "joined",
    "row_group_starts",
]

Lost = Callable[[UsageError], None]
"""Is told that messages that were to be read are gone."""

ROWS_MAX = 65_536
BATCH_BYTES_MAX = 32 << 20
_ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class HistoryPath:
    """One Parquet file of a topic's history: offsets `first` to `last`, both included."""

    path: Path
    first: int
    last: int
    min_timestamp_us: int
    max_timestamp_us: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TopicHistory:
    """A topic's history by one manifest: offsets `start` (included) to `handed_over` (excluded)."""

    topic: str
    epoch: int
    start: int
    handed_over: int
    files: list[HistoryPath]


class LogReader:
    """The topics of a data folder. Not for several threads at once."""

    def __init__(self, data: Path) -> None:
        """Look at the folder.

        Raises:
            UsageError: `data.not-found`, it is no data folder.
            StorageError: `log.format`, a newer version wrote it.
        """
        self.data = data
        note = data / "polybus.json"
        try:
            found = msgspec.json.decode(note.read_bytes(), type=DataNote)
        except OSError as error:
            text = f"{data} is not a data folder of polybus ({note.name} is not in it)"
            raise UsageError("data.not-found", text) from error
        except msgspec.DecodeError as error:
            raise StorageError("log.damaged", f"{note}: {error}") from error
        if found.format != layout.FORMAT:
            text = f"{note} says format {found.format}; this version knows {layout.FORMAT}"
            raise StorageError("log.format", text)
        self._notes = TopicNotes(data)
        self._journal = JournalIndex(data)

    def topics(self, *, system: bool = False) -> list[str]:
        """The names of all topics, sorted; the system's own (`$…`) only when asked for."""
        return self._notes.names(system=system)

    def bounds(self, topic: str) -> Bounds:
        """What the topic holds, durable messages only.

        Raises:
            UsageError: `topic.unknown`.
            StorageError: `log.damaged`.
        """
        self._journal.refresh()
        return self._bounds(topic, self._notes.manifest(topic))

    def all_bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """The bounds of many topics by one look at the journal; unknown ones are left out."""
        self._journal.refresh()
        found = {}
        for topic in topics:
            try:
                found[topic] = self._bounds(topic, self._notes.manifest(topic))
            except UsageError:
                continue
        return found

    def _bounds(self, topic: str, manifest: Manifest) -> Bounds:
        stop = max(manifest.handed_over, self._journal.stop((topic, manifest.epoch)))
        return Bounds(manifest.epoch, manifest.start, stop)

    def history(self, topic: str) -> TopicHistory:
        """The topic's history, all of one manifest. Raises as `bounds`."""
        manifest = self._notes.manifest(topic)
        folder = layout.topic_folder(self.data, topic)
        files = [
            HistoryPath(
                path=folder / file.path,
                first=file.first,
                last=file.last,
                min_timestamp_us=file.min_timestamp_us,
                max_timestamp_us=file.max_timestamp_us,
                rows=file.rows,
                bytes=file.bytes,
            )
            for file in manifest.files
        ]
        return TopicHistory(topic, manifest.epoch, manifest.start, manifest.handed_over, files)

    def pieces(self, topic: str, start: int, stop: int) -> list[Piece]:
        """The history files and journal segments that hold the offsets `start` to `stop`.

        Raises as `plan`.
        """
        return list(self.plan(topic, start, stop).pieces)

    def plan(self, topic: str, start: int, stop: int, *, times: Times = ALWAYS) -> Plan:
        """Where the offsets `start` to `stop` are; what lies outside of the times is left out.

        Raises:
            UsageError: `topic.unknown`; `log.offset-unknown`, the range is outside the bounds.
            StorageError: `log.damaged`, naming the offsets that no file has.
        """
        self._journal.refresh()
        manifest = self._notes.manifest(topic)
        bounds = self._bounds(topic, manifest)
        if start < bounds.start or stop > bounds.stop or start > stop:
            text = f"offsets {start} to {stop} of topic {topic!r} are wanted; the log holds"
            raise UsageError("log.offset-unknown", f"{text} {bounds.start} to {bounds.stop}")
        plan = Plan(topic, manifest.epoch, start, stop, (), times)
        folder = layout.topic_folder(self.data, topic)
        pieces = list(history_pieces(folder, manifest, start, stop, times))
        if stop > manifest.handed_over:
            pieces += journal_pieces(self._journal, plan, max(start, manifest.handed_over))
        return Plan(topic, manifest.epoch, start, stop, tuple(pieces), times)

    def read(
        self,
        topic: str,
        start: int,
        stop: int,
        *,
        columns: Sequence[str] | None = None,
        rows_max: int = ROWS_MAX,
    ) -> Iterator[pa.RecordBatch]:
        """The offsets `start` to `stop`, each once and in order, with the log's columns or some.

        Batches have up to `rows_max` rows and about 32 MiB. Raises as `plan` when it is called,
        and while it is read as `read_plan`.
        """
        plan = self.plan(topic, start, stop)
        return self.read_plan(plan, columns=columns, rows_max=rows_max)

    def read_plan(
        self,
        plan: Plan,
        *,
        columns: Sequence[str] | None = None,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BATCH_BYTES_MAX,
        lost: Lost | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """What a plan is for, also if it was made by another process some time ago.

        Raises:
            UsageError: `log.offset-unknown`, some of it expired meanwhile; `topic.unknown` or
                `topic.recreated`, the topic is not the one that was planned. With `lost`, that is
                told the error instead, and reading goes on with what is still there.
            StorageError: `log.damaged`, naming file, topic and offsets.
        """
        wanted = SCHEMA.names if columns is None else list(columns)
        found = self._rows(plan, wanted, (rows_max, bytes_max), lost)
        return joined(found, rows_max=rows_max, bytes_max=bytes_max)

    def _rows(
        self, plan: Plan, columns: Sequence[str], maxima: tuple[int, int], lost: Lost | None
    ) -> Iterator[pa.RecordBatch]:
        pieces = deque(plan.pieces)
        attempts = 0
        while pieces:
            piece = pieces.popleft()
            offset = piece.first
            try:
                for following, rows in self._read_piece(piece, plan, columns, maxima):
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

    def _read_piece(
        self, piece: Piece, plan: Plan, columns: Sequence[str], maxima: tuple[int, int]
    ) -> Iterator[Rows]:
        rows_max, bytes_max = maxima
        return read_piece(
            piece,
            (plan.topic, plan.epoch),
            columns,
            rows_max=rows_max,
            bytes_max=bytes_max,
            times=plan.times,
        )

    def _again(self, plan: Plan, rest: Piece, error: Exception, attempts: int) -> tuple[Piece, ...]:
        """Where the rest of a piece is now. Raises what is wrong if it is still there."""
        fresh = self.plan(plan.topic, rest.first, rest.stop, times=plan.times)
        if fresh.epoch != plan.epoch:
            text = f"topic {plan.topic!r} was deleted and created again while it was read"
            raise UsageError("topic.recreated", text)
        same = [piece for piece in fresh.pieces if piece.path == rest.path]
        unchanged = same and same[0].file == rest.file and same[0].commits[:1] == rest.commits[:1]
        missing = isinstance(error, FileNotFoundError)
        if attempts >= _ATTEMPTS_MAX or (unchanged and not missing):
            reason = "it is missing" if missing else str(error)
            text = f"topic {plan.topic!r}, offsets {rest.first} to {rest.stop - 1}: {rest.path}: "
            raise StorageError("log.damaged", text + reason) from error
        return fresh.pieces

    def _kept(self, plan: Plan, rest: Piece) -> tuple[Piece, ...]:
        """What is still there of a piece of which some was lost; nothing if the topic is not."""
        try:
            bounds = self.bounds(plan.topic)
            start, stop = max(rest.first, bounds.start), min(rest.stop, bounds.stop)
            if bounds.epoch != plan.epoch or start >= stop:
                return ()
            return self.plan(plan.topic, start, stop, times=plan.times).pieces
        except UsageError:
            return ()

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        """The first offset whose timestamp is at or after the time; `stop` if there is none.

        Raises as `bounds`.
        """
        bounds = self.bounds(topic)
        try:
            plan = self.plan(topic, bounds.start, bounds.stop, times=Times(since_us=timestamp_us))
            for rows in self.read_plan(plan, columns=("offset", "timestamp")):
                late = pc.greater_equal(rows.column(1).cast(pa.int64()), timestamp_us)
                row = pc.index(late, True).as_py()
                if row >= 0:
                    return int(rows.column(0)[row].as_py())
        except UsageError as error:
            # What expires while we look is older than what is looked for, or comes first now.
            if error.code != "log.offset-unknown" or self.bounds(topic).start <= bounds.start:
                raise
            return self.offset_at(topic, timestamp_us)
        return bounds.stop
