"""Damaged topics: found before a batch is planned, and held in place while the others go on.

The end offset of a batch is final once Spark has written it to its checkpoint: the batch runs again
with it until it succeeds. So with `failOnDamage` false the reader verifies a range before it plans
it: it reads the offsets of the range, which compares all checksums, and plans up to the damage.
The topic keeps that offset until the file is restored. Damage that occurs after the plan fails the
batch until the file is restored, because a batch that ran once must not change.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic

from polybus.errors import StorageError, UsageError
from polybus.log.interface import Bounds
from polybus.spark.origin import BATCH_BYTES_MAX, Origin
from polybus.spark.source.offsets import TopicOffset

logger = logging.getLogger("polybus.spark")

CODES = ("log.damaged", "log.frozen")
RECHECK_S = 10.0
"""How long a damaged topic is left alone: each check reads the damaged range again."""
CHECK_ROWS = 500
"""How exactly damage is located: up to this many intact messages before it are held too."""


@dataclass(frozen=True, slots=True)
class TopicDamage:
    """What is wrong with a topic; `offset` is where it is held, None if its bounds are unknown."""

    text: str
    offset: int | None
    found_at_s: float

    def is_recent(self) -> bool:
        return monotonic() - self.found_at_s < RECHECK_S


class HeldTopics:
    """The damaged topics of a stream. They are found again after a restart, so none are stored.

    With `fail` no topic is held: damage is raised.
    """

    def __init__(self, origin: Origin, *, fail: bool) -> None:
        self._origin = origin
        self._fail = fail
        self._damages: dict[str, TopicDamage] = {}
        self._short: dict[str, str] = {}

    @property
    def texts(self) -> dict[str, str]:
        """What is wrong, by topic."""
        damages = {topic: damage.text for topic, damage in self._damages.items()}
        return dict(sorted((self._short | damages).items()))

    def bounds(self, topics: Iterable[str]) -> dict[str, Bounds]:
        """The bounds of the topics whose bounds can be read."""
        selected = list(topics)
        asked = [topic for topic in selected if not self._has_unknown_bounds(topic)]
        try:
            found = self._origin.all_bounds(asked)
        except StorageError as error:
            self._check_is_damage(error)
            found = {}
            for topic in asked:
                try:
                    found |= self._origin.all_bounds([topic])
                except StorageError as damage:
                    self._hold(topic, damage, None)
        for topic, known in list(self._damages.items()):
            # Its bounds can be read again, or it was deleted.
            if (known.offset is None) == (topic in found) or topic not in selected:
                del self._damages[topic]
        return found

    def complete(
        self, found: Mapping[str, Bounds], ends: Mapping[str, TopicOffset]
    ) -> dict[str, Bounds]:
        """Leave out the topics that end before what was already read: a file of them is missing.

        If reading went back to their end, it would repeat messages once the file is restored.
        """
        short = {
            topic: _short_text(topic, end.offset)
            for topic, end in ends.items()
            if topic in found and self._is_short(found[topic], end)
        }
        for topic in short.keys() - self._short.keys():
            logger.warning("topic %r is held in place: log.damaged: %s", topic, short[topic])
        self._short = short
        return {topic: bounds for topic, bounds in found.items() if topic not in short}

    def stop(self, topic: str, stop: int) -> int:
        """The stop offset of a topic, or the offset where it is known to be held."""
        damage = self._damages.get(topic)
        if damage is None or damage.offset is None or not damage.is_recent():
            return stop
        return min(stop, damage.offset)

    def intact_stop(self, topic: str, first: int, stop: int) -> int:
        """Verify a range; return the offset before which every message can be read."""
        if self._fail:
            return stop
        if self.stop(topic, stop) <= first:
            return first
        offset = first
        try:
            plan = self._origin.plan(topic, first, stop)
            for rows in self._origin.read_plan(
                plan, columns=("offset",), rows_max=CHECK_ROWS, bytes_max=BATCH_BYTES_MAX
            ):
                offset += rows.num_rows
        except StorageError as error:
            self._hold(topic, error, offset)
            return offset
        except UsageError:
            # Expired or deleted just now, which is data loss and not damage.
            pass
        self._damages.pop(topic, None)
        return stop

    def _has_unknown_bounds(self, topic: str) -> bool:
        damage = self._damages.get(topic)
        return damage is not None and damage.offset is None and damage.is_recent()

    def check_complete(self, topic: str, bounds: Bounds, end: TopicOffset) -> None:
        """Raises StorageError `log.damaged`: a batch that ran once waits for a missing file."""
        if self._is_short(bounds, end):
            raise StorageError("log.damaged", _short_text(topic, end.offset))

    def _is_short(self, bounds: Bounds, end: TopicOffset) -> bool:
        """Whether a topic ends before a durable offset: its end never moves back by itself."""
        return not self._fail and bounds.epoch == end.epoch and bounds.stop < end.offset

    def _hold(self, topic: str, error: StorageError, offset: int | None) -> None:
        self._check_is_damage(error)
        known = self._damages.get(topic)
        text = error.text
        if known is not None and known.offset == offset:
            # The text names the range that was asked for: keep it, or each check looks like news.
            text = known.text
        else:
            logger.warning("topic %r is held in place: %s: %s", topic, error.code, text)
        self._damages[topic] = TopicDamage(text, offset, monotonic())

    def _check_is_damage(self, error: StorageError) -> None:
        if self._fail or error.code not in CODES:
            raise error


def _short_text(topic: str, offset: int) -> str:
    text = f"topic {topic!r}: messages before offset {offset} are in no file of the log"
    return f"{text}; run polybus verify"
