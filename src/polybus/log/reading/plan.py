"""Plans: where a range of a topic is, of one look at the journal and the manifest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polybus.errors import StorageError
from polybus.log.history.manifest import Manifest
from polybus.log.reading.index import JournalIndex, SegmentCommits
from polybus.log.reading.pieces import ALWAYS, Piece, Times


@dataclass(frozen=True, slots=True)
class Plan:
    """Where offsets `start` to `stop` of a topic are; the pieces are in offset order.

    What `times` excludes may be missing from the pieces.
    """

    topic: str
    epoch: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    times: Times = ALWAYS


def history_pieces(
    folder: Path, manifest: Manifest, start: int, stop: int, times: Times
) -> Iterator[Piece]:
    """The history files with offsets from `start` to `stop`, each cut to them."""
    files = manifest.files
    number = max(0, bisect_right(files, start, key=lambda file: file.first) - 1)
    for file in files[number:]:
        if file.first >= stop:
            return
        if file.last >= start and times.meet(file.min_timestamp_us, file.max_timestamp_us):
            whole = Piece(folder / file.path, file.first, file.last + 1, file.bytes, file)
            yield whole.cut(start, stop)


def journal_pieces(journal: JournalIndex, plan: Plan, start: int) -> Iterator[Piece]:
    """The segments with the plan's offsets from `start` on.

    Raises:
        StorageError: `log.damaged`, naming offsets that are in no segment.
    """
    for segment, commits in journal.commits((plan.topic, plan.epoch)):
        if commits.stop <= start or start >= plan.stop:
            continue
        if commits.first > start:
            break
        stop = min(commits.stop, plan.stop)
        numbers = commits.within(start, stop)
        _check_row(plan.topic, segment, commits, numbers)
        yield from _segment_pieces(segment, commits, numbers, (start, stop), plan.times)
        start = stop
    if start < plan.stop:
        text = f"topic {plan.topic!r}: offsets {start} to {plan.stop - 1} are in no file of the log"
        raise StorageError("log.damaged", f"{text}; polybus verify says more")


def _check_row(topic: str, segment: Path, commits: SegmentCommits, numbers: range) -> None:
    """Raise StorageError unless the commits' offsets follow each other."""
    for number in numbers[1:]:
        expected = commits.firsts[number - 1] + commits.counts[number - 1]
        if commits.firsts[number] != expected:
            text = f"{segment.name}: topic {topic!r} goes on at offset {commits.firsts[number]}"
            raise StorageError(
                "log.damaged", f"{text}, not at {expected}; polybus verify says more"
            )


def _segment_pieces(
    segment: Path, commits: SegmentCommits, numbers: range, bounds: tuple[int, int], times: Times
) -> Iterator[Piece]:
    """One piece, or one for each run of commits that the times do not exclude."""
    run: list[int] = []
    for number in numbers:
        if times.meet(commits.times_min[number], commits.times_max[number]):
            run.append(number)
        elif run:
            yield _piece(segment, commits, run, bounds)
            run = []
    if run:
        yield _piece(segment, commits, run, bounds)


def _piece(
    segment: Path, commits: SegmentCommits, run: list[int], bounds: tuple[int, int]
) -> Piece:
    found = tuple(commits.commit(number) for number in run)
    size = sum(one.size for one in found)
    whole = Piece(segment, found[0].first_offset, found[-1].stop_offset, size, None, found)
    return whole.cut(*bounds)
