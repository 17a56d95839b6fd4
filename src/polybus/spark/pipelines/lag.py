"""The lag of flows behind the log: one read of the log serves all flows and topics.

The log is opened once and kept open. An update reads the additions to the journal's indexes, and
the changed metadata files and manifests.
"""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from polybus.errors import PolybusError
from polybus.log.interface import Bounds
from polybus.log.opening import open_reader
from polybus.log.reading.offset_reader import OffsetReader


class LogEnds:
    """The ends of the topics of a data folder at the last update. Not thread-safe."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._reader: OffsetReader | None = None
        self._bounds: dict[str, Bounds] = {}

    def look(self, topics: Collection[str]) -> None:
        """Update these topics; unknown or damaged ones have no end."""
        with contextlib.suppress(PolybusError):  # the folder has no log
            self._reader = self._reader or open_reader(self._data)
            try:
                self._bounds = self._reader.all_bounds(topics)
            except PolybusError:  # one of them is damaged
                self._bounds = {}
                for topic in topics:
                    with contextlib.suppress(PolybusError):
                        self._bounds |= self._reader.all_bounds([topic])

    def behind(self, positions: Mapping[str, int]) -> int | None:
        """The messages after these positions; None if the folder has no log."""
        if self._reader is None:
            return None
        known = self._bounds
        return sum(
            one.stop - max(one.start, at)
            for topic, at in positions.items()
            if (one := known.get(topic)) is not None and one.stop > at
        )
