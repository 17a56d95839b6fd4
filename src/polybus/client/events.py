"""What a transport reports of a connection, the same for every protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polybus.client.message import Position
from polybus.errors import BusyError, PolybusError, StorageError, UsageError


@dataclass(slots=True)
class Delivered:
    """Messages of one topic, in order and next to each other.

    `position` is the first one's, None when the bus has not said. `headers` is None when no message
    has any.
    """

    topic: str
    values: Sequence[bytes]
    headers: Sequence[Mapping[str, bytes] | None] | None = None
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The bus confirmed a subscription; its next message stands at `position`, if it said so."""

    topic: str
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A receipt: the publish that asked for it is safe, its last message at `position`."""

    receipt_id: str
    position: Position


@dataclass(frozen=True, slots=True)
class Refused:
    """The bus refused something: the publish with that receipt id or, without one, whatever it was.

    `topics` are those it concerns, when the protocol says. `registering` says that it is about a
    registration, so no message is meant. After a `final` one the connection is of no use any more.
    """

    error: PolybusError
    receipt_id: str | None = None
    topics: tuple[str, ...] = ()
    registering: bool = False
    final: bool = False


TOO_LARGE = ".message-too-large"
"""How codes end after which Boson's bus reads nothing more of the connection."""

_KINDS: dict[str, type[PolybusError]] = {
    "topic": UsageError,
    "headers": UsageError,
    "position": UsageError,
    "subscription": UsageError,
    "log": StorageError,
    "outbox": BusyError,
}


def refusal(code: str, text: str) -> PolybusError:
    """The bus's refusal as the error its code is of, as if it had happened here."""
    return _KINDS.get(code.partition(".")[0], PolybusError)(code, text)


Event = Delivered | Subscribed | Stored | Refused
