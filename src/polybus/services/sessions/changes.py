"""The content of a save of sessions, and of a notice."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polybus.services.sessions.contents import Content
from polybus.wire.msgstream import OVERFLOW, encode_notice


class LostMessages(NamedTuple):
    """Lost messages for a notice: their number in a topic, from this position on."""

    topic: str
    epoch: int
    offset: int
    messages: int

    def encode(self, shown: Callable[[str], str] = str) -> bytes:
        """`shown` is the client's name for the topic."""
        data: dict[str, Any] = {"topic": None, "position": None, "count": self.messages}
        if self.topic:
            data["topic"] = shown(self.topic)
            data["position"] = f"{self.epoch}:{self.offset}"
        return encode_notice(OVERFLOW, data)


PackKey = tuple[int, int]
"""A session's number, and the number of a pack."""


@dataclass(slots=True)
class SessionChanges:
    """The content of one save of sessions.

    Attributes:
        rows: number, time to live, next number, mark, topics with epoch and offset, losses, the
            first number that its client may wait for, the number of packs, account and token.
        digests: those of the rows' keys.
        first: packs below these were removed.
        renumbered: packs from these on have other numbers now.
        confirmed: packs that are on disk and were confirmed since the last save.
        fresh: packs that are not on disk yet, or no longer under their number.
        ended: the numbers of sessions that are over.
        direct: direct packs that are not on disk yet.
        direct_gone: the numbers of direct packs that no session has any more.
        reserves: whether marks may rise above the packs that are saved.
    """

    rows: list[tuple[object, ...]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    first: list[PackKey] = field(default_factory=list)
    renumbered: list[PackKey] = field(default_factory=list)
    confirmed: list[PackKey] = field(default_factory=list)
    fresh: list[tuple[PackKey, Content]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    direct: list[Content] = field(default_factory=list)
    direct_gone: list[int] = field(default_factory=list)
    reserves: bool = True
