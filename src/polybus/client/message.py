"""What a subscriber gets: messages, each with its place in the log."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from polybus.errors import UsageError

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


class Position(NamedTuple):
    """A place in a topic: `offset` counts from 0 in each `epoch` (incarnation) of the topic."""

    epoch: int
    offset: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read `EPOCH:OFFSET`. Raises UsageError `position.invalid`."""
        epoch, colon, offset = text.partition(":")
        if not (colon and _is_number(epoch) and _is_number(offset)):
            raise UsageError("position.invalid", f"{text[:40]!r} is not EPOCH:OFFSET")
        return cls(int(epoch), int(offset))


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of a topic.

    Attributes:
        value: the payload, byte for byte as it was published.
        headers: names and values; empty on protocols that carry none (Boson frames).
        epoch, offset: its place in the log; offset -1 when the bus did not say.
        gap: messages between the one before and this one are lost to this subscription: retention
            removed them, the topic was recreated, or the bus dropped them as it read too slowly.
    """

    topic: str
    value: bytes
    headers: Mapping[str, bytes] = NO_HEADERS
    epoch: int = 0
    offset: int = -1
    gap: bool = False

    @property
    def position(self) -> Position | None:
        return Position(self.epoch, self.offset) if self.offset >= 0 else None

    @property
    def text(self) -> str:
        """The value as UTF-8. Raises UnicodeDecodeError if it is none."""
        return self.value.decode()

    def json(self) -> Any:
        """The value as JSON. Raises msgspec.DecodeError if it is none."""
        return msgspec.json.decode(self.value)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
