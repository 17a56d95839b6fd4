"""The report of `verify`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from polybus import names

DAMAGES_MAX = 10_000
Progress = Callable[[str, int, int], None]
"""Called with what was checked, the bytes checked so far, and the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A damaged file, with the topic and offsets that are lost, if known."""

    file: str
    reason: str
    topic: str | None = None
    first: int | None = None
    last: int | None = None

    def __str__(self) -> str:
        where = "" if self.topic is None else f"topic {self.topic!r}, "
        offsets = "" if self.first is None else f", offsets {self.first} to {self.last}"
        return f"{where}{self.file}{offsets}: {self.reason}"


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """The result of a check. `damages` has the first DAMAGES_MAX of `damage_count`.

    `messages` counts readable messages. System topics are counted separately. `notes` are harmless
    leftovers of a crash, which the next start or hand-over removes.
    """

    topics: int = 0
    segments: int = 0
    files: int = 0
    messages: int = 0
    system_topics: int = 0
    system_messages: int = 0
    bytes: int = 0
    damage_count: int = 0
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def intact(self) -> bool:
        return self.damage_count == 0

    def count(self, topic: str, *, topics: int = 0, messages: int = 0) -> None:
        """Count a topic, or intact messages of a topic."""
        if names.is_reserved(topic):
            self.system_topics += topics
            self.system_messages += messages
        else:
            self.topics += topics
            self.messages += messages

    def add(self, damage: Damage) -> None:
        self.damage_count += 1
        if len(self.damages) < DAMAGES_MAX:
            self.damages.append(damage)


@dataclass(slots=True, kw_only=True)
class CheckedTopic:
    """A topic on disk; its history ends at `handed_over`. None if damage hides it."""

    epoch: int | None = None
    handed_over: int | None = None


class Checked:
    """Reports the progress of a check."""

    def __init__(self, report: VerifyReport, progress: Progress | None, total_bytes: int) -> None:
        self._report = report
        self._progress = progress
        self._total_bytes = total_bytes

    def add(self, what: str, size: int) -> None:
        self._report.bytes += size
        if self._progress is not None:
            self._progress(what, self._report.bytes, max(self._report.bytes, self._total_bytes))
