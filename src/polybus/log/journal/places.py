"""Where a topic's messages are in the journal, in memory: flat arrays, one entry per commit.

A busy journal holds hundreds of thousands of commits, so an entry is six integers, not an object.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """One commit's rows of a topic, and where the commit is."""

    segment: Path
    position: int
    size: int
    first_row: int
    first_offset: int
    row_count: int


FIELDS = 6


class SegmentPlaces:
    """A topic's entries in one segment.

    One array has all of them, since each commit adds one for every topic in it: first offset,
    count, position, size, first row, and the largest timestamp so far.
    """

    __slots__ = ("entries", "segment")

    def __init__(self, segment: Path) -> None:
        self.segment = segment
        self.entries = array("q")

    def __len__(self) -> int:
        return len(self.entries) // FIELDS

    def place(self, index: int) -> Place:
        at = index * FIELDS
        first, count, position, size, row = self.entries[at : at + FIELDS - 1]
        return Place(self.segment, position, size, row, first, count)

    def first(self, index: int) -> int:
        return self.entries[index * FIELDS]

    def stop(self, index: int) -> int:
        return self.entries[index * FIELDS] + self.entries[index * FIELDS + 1]

    def latest(self, index: int) -> int:
        return self.entries[index * FIELDS + FIELDS - 1]

    def at_offset(self, offset: int) -> int:
        """The last entry that begins at or before an offset; -1 if none does."""
        return bisect_right(range(len(self)), offset, key=self.first) - 1

    def at_time(self, timestamp_us: int) -> int:
        """The first entry with a message at or after a time; past the last if none has."""
        return bisect_left(range(len(self)), timestamp_us, key=self.latest)


class Places:
    """A topic's entries over all segments, in offset order. The log's lock guards it."""

    def __init__(self) -> None:
        self._segments: list[SegmentPlaces] = []

    @property
    def start(self) -> int | None:
        """The first offset, or None if there is none."""
        return self._segments[0].first(0) if self._segments else None

    def in_segment(self, segment: Path) -> SegmentPlaces:
        """Where entries of a segment go: the last one, or a new one after it."""
        last = self._segments[-1] if self._segments else None
        # The same object as a rule, and comparing paths takes longer than all the rest.
        if last is None or (last.segment is not segment and last.segment != segment):
            last = SegmentPlaces(segment)
            self._segments.append(last)
        return last

    def find(self, offset: int, *, places_max: int) -> list[Place]:
        """The entry that holds the offset and those that follow; [] if no entry holds it."""
        number = bisect_right(self._segments, offset, key=_first_offset) - 1
        if number < 0:
            return []
        found: list[Place] = []
        index = self._segments[number].at_offset(offset)
        for part in self._segments[number:]:
            for at in range(index, min(len(part), index + places_max - len(found))):
                place = part.place(at)
                if place.first_offset + place.row_count <= offset or place.first_offset > offset:
                    return found
                found.append(place)
                offset = place.first_offset + place.row_count
            if len(found) == places_max:
                break
            index = 0
        return found

    def find_time(self, timestamp_us: int, *, offset_min: int) -> Place | None:
        """The first entry with a message at or after both the time and the offset."""
        for part in self._segments:
            index = max(part.at_time(timestamp_us), part.at_offset(offset_min), 0)
            if index < len(part) and part.stop(index) > offset_min:
                return part.place(index)
        return None

    def stop_in(self, segment: Path) -> int | None:
        """Where the topic's offsets in a segment end, or None if it has none there."""
        for part in self._segments:
            if part.segment == segment:
                return part.stop(len(part) - 1)
        return None

    def forget(self, segment: Path) -> None:
        self._segments = [part for part in self._segments if part.segment != segment]


def _first_offset(part: SegmentPlaces) -> int:
    return part.first(0)
