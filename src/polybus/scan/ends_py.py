"""The log's loops over many batches: the pure-Python twin of `_ends.pyx`."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from polybus.scan.batch_py import Batch

T = TypeVar("T")


class _SegmentEntries(Protocol):
    """A topic's commits in one segment, six numbers each."""

    @property
    def entries(self) -> array[int]: ...


class _CommitIndex(Protocol):
    def in_segment(self, segment: Path) -> _SegmentEntries: ...


class TopicEnd:
    """The end of a topic's log and the index of its commits; `frozen` says why it is read-only."""

    __slots__ = ("epoch", "frozen", "places", "stop", "tail")

    def __init__(self, epoch: int, stop: int, places: _CommitIndex) -> None:
        self.epoch = epoch
        self.stop = stop
        self.tail: deque[Batch] = deque()
        self.frozen: Exception | None = None
        self.places = places

    def forget_entries(self) -> None:
        """Drop the cached index entries; this twin caches none."""


E = TypeVar("E", bound=TopicEnd)


def find_ends(batches: Iterable[Batch], ends: dict[str, E]) -> list[E] | None:
    """The end of each batch's topic; None if a topic does not exist or is read-only."""
    found = [ends.get(batch.topic) for batch in batches]
    usable = [end for end in found if end is not None and end.frozen is None]
    return usable if len(usable) == len(found) else None


def take_batches(batches: Sequence[Batch], ends: Sequence[TopicEnd], now_us: int) -> list[Batch]:
    """Assign each batch its topic's epoch and next offsets, and append it to the topic's tail.

    A batch without a timestamp gets `now_us`. Empty batches are not appended; returns the others.
    """
    taken = []
    for batch, end in zip(batches, ends, strict=True):
        batch.epoch = end.epoch
        batch.first_offset = end.stop
        batch.timestamp_us = batch.timestamp_us or now_us
        if not batch.spans:
            continue
        # The tail before `stop`: a reader that sees the new end finds the messages.
        end.tail.append(batch)
        end.stop += len(batch)
        taken.append(batch)
    return taken


def keep_batches(
    batches: Iterable[Batch],
    ends: Mapping[str, TopicEnd],
    last_owner: object,
    batch_bytes: int,
    extra_bytes: Callable[[Batch], int],
) -> tuple[list[tuple[list[deque[Batch]], int]], object]:
    """For each read buffer the tails of its batches and its memory; and the last buffer.

    A batch keeps its whole read buffer alive, and consecutive batches share it, so each buffer is
    counted once. Batches that continue with `last_owner` do not count it again. Batches of deleted
    topics are left out and encodings dropped; `extra_bytes` is the memory of keys and headers.
    """
    reads: list[tuple[list[deque[Batch]], int]] = []
    tails: list[deque[Batch]] | None = None
    weight = 0
    for batch in batches:
        end = ends.get(batch.topic)
        if end is None or end.epoch != batch.epoch:
            continue
        batch.forget_encodings()
        owner: object = batch.buffer
        if isinstance(owner, memoryview):
            owner = owner.obj or owner
        if tails is None or owner is not last_owner:
            if tails is not None:
                reads.append((tails, weight))
            tails = []
            weight = 0 if owner is last_owner else memoryview(owner).nbytes  # type: ignore[arg-type]
            last_owner = owner
        weight += batch_bytes + 4 * len(batch.spans)
        if batch.keys is not None or batch.headers is not None:
            weight += extra_bytes(batch)
        tails.append(end.tail)
    if tails is not None:
        reads.append((tails, weight))
    return reads, last_owner


def drop_oldest(tails: Iterable[deque[Batch]]) -> None:
    """Remove the first batch of each tail."""
    for tail in tails:
        tail.popleft()


def rows_by_topic(
    batches: Iterable[Batch], kind: Callable[..., T], account: str
) -> tuple[list[Batch], array[int], tuple[T, ...], tuple[list[str], array[int], array[int]]]:
    """The batches ordered by topic and epoch, the rows of each, and a `kind` for each topic.

    `kind` is a named tuple of account, topic, epoch, first offset, row count, first row, and
    smallest and largest timestamp. The last value repeats the topics' names, first offsets and row
    counts as columns.
    """
    groups: dict[tuple[str, int], list[Batch]] = {}
    for batch in batches:
        groups.setdefault((batch.topic, batch.epoch), []).append(batch)
    ordered: list[Batch] = []
    topics = []
    names: list[str] = []
    firsts, counts = array("q"), array("q")
    row = 0
    for (topic, epoch), group in groups.items():
        count = sum(map(len, group))
        times = [batch.timestamp_us for batch in group]
        first = group[0].first_offset
        topics.append(kind(account, topic, epoch, first, count, row, min(times), max(times)))
        names.append(topic)
        firsts.append(first)
        counts.append(count)
        row += count
        ordered += group
    return ordered, array("q", map(len, ordered)), tuple(topics), (names, firsts, counts)


def merge_runs(
    batches: Sequence[Batch], counts: array[int]
) -> tuple[
    tuple[array[int], array[int]], tuple[list[str], array[int]], tuple[list[str], array[int]]
]:
    """Timestamps, protocols and senders of the batches' rows, each as runs of equal values."""
    times, time_counts = _merged([batch.timestamp_us for batch in batches], counts)
    return (
        (array("q", times), time_counts),
        _merged([batch.protocol for batch in batches], counts),
        _merged([batch.sender for batch in batches], counts),
    )


def _merged(values: Sequence[T], counts: array[int]) -> tuple[list[T], array[int]]:
    merged: list[T] = []
    merged_counts = array("q")
    for value, count in zip(values, counts, strict=True):
        if merged and merged[-1] == value:
            merged_counts[-1] += count
        else:
            merged.append(value)
            merged_counts.append(count)
    return merged, merged_counts


def add_places(
    parts: Iterable[tuple[str, str, int, int, int, int, int, int]],
    ends: Mapping[str, TopicEnd],
    segment: Path,
    position: int,
    size: int,
) -> None:
    """Add a commit to the index of each of its topics; `parts` come from `rows_by_topic`."""
    for _, topic, epoch, first_offset, count, first_row, _, latest in parts:
        end = ends.get(topic)
        if end is None or end.epoch != epoch:
            continue
        entries = end.places.in_segment(segment).entries
        # The maximum so far, because the clock may be set back.
        latest = max(latest, entries[-1]) if entries else latest
        entries.extend((first_offset, count, position, size, first_row, latest))
