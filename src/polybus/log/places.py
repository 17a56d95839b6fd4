"""Where a topic's messages are in the journal, in memory: flat arrays, one entry per commit.

A busy journal holds hundreds of thousands of commits, so an entry is six integers, not an object.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import NamedTuple

from polybus.log.commit import TopicRows
from polybus.log.index import CommitEntry


class Place(NamedTuple):
    """One commit's rows of a topic, and where the commit is."""

    segment: Path
    position: int
    size: int
    first_row: int
    first_offset: int
    count: int  # type: ignore[assignment]


class SegmentPlaces:
    """A topic's entries in one segment. `latest` is the largest timestamp so far."""

    __slots__ = ("counts", "firsts", "latest", "positions", "rows", "segment", "sizes")

    def __init__(self, segment: Path) -> None:
        self.segment = segment
        self.firsts = array("q")
        self.counts = array("q")
        self.positions = array("q")
        self.sizes = array("q")
        self.rows = array("q")
        self.latest = array("q")

    def place(self, index: int) -> Place:
        return Place(
            self.segment,
            self.positions[index],
            self.sizes[index],
            self.rows[index],
            self.firsts[index],
            self.counts[index],
        )


class Places:
    """A topic's entries over all segments, in offset order. The log's lock guards it."""

    def __init__(self) -> None:
        self._segments: list[SegmentPlaces] = []

    @property
    def start(self) -> int | None:
        """The first offset, or None if there is none."""
        return self._segments[0].firsts[0] if self._segments else None

    def add(self, segment: Path, entry: CommitEntry, rows: TopicRows) -> None:
        last = self._segments[-1] if self._segments else None
        # The same object as a rule, and comparing paths takes longer than all the rest.
        if last is None or (last.segment is not segment and last.segment != segment):
            last = SegmentPlaces(segment)
            self._segments.append(last)
        last.firsts.append(rows.first_offset)
        last.counts.append(rows.count)
        last.positions.append(entry.position)
        last.sizes.append(entry.size)
        last.rows.append(rows.first_row)
        latest = rows.max_timestamp_us
        if last.latest and last.latest[-1] > latest:
            latest = last.latest[-1]
        last.latest.append(latest)

    def find(self, offset: int, *, places_max: int) -> list[Place]:
        """The entry that holds the offset and those that follow; [] if no entry holds it."""
        number = bisect_right(self._segments, offset, key=_first_offset) - 1
        if number < 0:
            return []
        found: list[Place] = []
        index = bisect_right(self._segments[number].firsts, offset) - 1
        for part in self._segments[number:]:
            for at in range(index, min(len(part.firsts), index + places_max - len(found))):
                place = part.place(at)
                if place.first_offset + place.count <= offset or place.first_offset > offset:
                    return found
                found.append(place)
                offset = place.first_offset + place.count
            if len(found) == places_max:
                break
            index = 0
        return found

    def find_time(self, timestamp_us: int, *, offset_min: int) -> Place | None:
        """The first entry with a message at or after both the time and the offset."""
        for part in self._segments:
            index = bisect_left(part.latest, timestamp_us)
            index = max(index, bisect_right(part.firsts, offset_min) - 1, 0)
            if index < len(part.firsts) and part.firsts[index] + part.counts[index] > offset_min:
                return part.place(index)
        return None

    def stop_in(self, segment: Path) -> int | None:
        """Where the topic's offsets in a segment end, or None if it has none there."""
        for part in self._segments:
            if part.segment == segment:
                return part.firsts[-1] + part.counts[-1]
        return None

    def forget(self, segment: Path) -> None:
        self._segments = [part for part in self._segments if part.segment != segment]


def _first_offset(part: SegmentPlaces) -> int:
    return part.firsts[0]
