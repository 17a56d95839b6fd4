"""What a subscriber receives: messages with their positions; and where a subscription starts."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec

from polybus import references
from polybus.errors import UsageError
from polybus.references import Reference
from polybus.wire.positions import Position

__all__ = ["NO_HEADERS", "Message", "Position", "StartFrom", "start_text"]

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})
StartFrom = str | datetime | Position
_POSITION = re.compile(r"[0-9]+:[0-9]+")


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message of a topic.

    Attributes:
        value: the payload, byte for byte as it was published; of a large one, on goMS and HTTP,
            the reference as JSON. Boson and queues have the bytes of large ones, too.
        headers: names and values; empty on protocols without headers (Boson frames).
        epoch, offset: its position in the log; offset -1 if the bus did not send it.
        gap: this subscription lost messages before this one: retention removed them, the topic was
            recreated, or the bus dropped them because the subscriber was too slow.
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
    def reference(self) -> Reference | None:
        """The reference to a large payload, for `Client.download`; None if `value` is it."""
        return references.parse(self.value) if references.HEADER in self.headers else None

    @property
    def text(self) -> str:
        """The value as UTF-8. Raises UnicodeDecodeError."""
        return self.value.decode()

    def json(self) -> Any:
        """The value as JSON. Raises msgspec.DecodeError."""
        return msgspec.json.decode(self.value)


def start_text(start: StartFrom) -> str:
    """The start as the bus reads it: `latest`, `earliest`, `EPOCH:OFFSET` or an ISO time in UTC.

    Raises:
        UsageError: `position.invalid`.
    """
    if isinstance(start, Position):
        return str(start)
    if isinstance(start, str):
        if start in ("latest", "earliest"):
            return start
        if _POSITION.fullmatch(start):
            return str(Position.parse(start))
        reason = f"{start[:40]!r} is not earliest, latest, EPOCH:OFFSET or an ISO time"
        try:
            start = datetime.fromisoformat(start)
        except ValueError as error:
            raise UsageError("position.invalid", reason) from error
    if start.tzinfo is None:
        text = f"{start.isoformat()} has no time zone; add one, for example +00:00"
        raise UsageError("position.invalid", text)
    return start.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
