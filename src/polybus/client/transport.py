"""The contract of a transport (client/protocols.py has them all), and the events that it reports.

A transport creates the bytes to send and turns received bytes into events. It does no I/O:
client/connection.py moves the bytes.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polybus.batch import Buffer, Headers
from polybus.client.message import Position
from polybus.errors import BusyError, PolybusError, StorageError, UsageError
from polybus.wire.codec import LoggedIn

TOO_LARGE = ".message-too-large"
"""The end of the codes after which a Boson bus stops reading the connection."""


@dataclass(slots=True, eq=False)
class PendingPublish:
    """Values to publish at once; `receipt` is None if no receipt is requested."""

    topic: str
    values: Sequence[bytes]
    headers: Headers | None = None
    receipt: asyncio.Future[Position] | None = None
    receipt_id: str | None = None


@dataclass(slots=True)
class Delivery:
    """Consecutive messages of one topic, in order.

    `position` is that of the first message, None if the bus did not send it. `headers` is None if
    no message has any.
    """

    topic: str
    values: list[bytes]
    headers: list[Mapping[str, bytes] | None] | None = None
    position: Position | None = None

    @property
    def next_position(self) -> Position | None:
        """The position of the message after these, if known."""
        if self.position is None:
            return None
        return Position(self.position.epoch, self.position.offset + len(self.values))


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The bus confirmed a subscription; `position` is that of its next message, if known."""

    topic: str
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A receipt: the publish that requested it is durable, its last message at `position`."""

    receipt_id: str
    position: Position


@dataclass(frozen=True, slots=True)
class Refusal:
    """The bus refused the publish with that receipt id or, without one, an unknown request.

    `topics` are those it concerns, if the protocol names them. `registering` means that it is about
    a registration, not a message. After a `final` one the connection is unusable.
    """

    error: PolybusError
    receipt_id: str | None = None
    topics: tuple[str, ...] = ()
    registering: bool = False
    final: bool = False


TransportEvent = Delivery | Subscribed | Stored | LoggedIn | Refusal

_ERROR_CLASSES: dict[str, type[PolybusError]] = {
    "topic": UsageError,
    "headers": UsageError,
    "position": UsageError,
    "subscription": UsageError,
    "auth": UsageError,
    "log": StorageError,
    "outbox": BusyError,
}


def refusal(code: str, text: str) -> PolybusError:
    """The bus's refusal as the error class that its code belongs to."""
    return _ERROR_CLASSES.get(code.partition(".")[0], PolybusError)(code, text)


class Transport:
    """The client's side of one protocol on one connection, without I/O."""

    registers = False
    """Whether a publisher must subscribe to a topic before it may publish there (goMS)."""
    confirms = True
    """Whether the bus confirms a subscription; on queues it begins with the connection."""
    gzip = False
    """Whether the stream may be gzip."""
    answers_login = True
    """Whether the bus answers a login."""

    def __init__(self, message_bytes_max: int) -> None:
        """`message_bytes_max` is the largest message to accept."""
        raise NotImplementedError

    def login(self, user: str, secret: str) -> Buffer:
        """The bytes that log in by user and password, or by a token if `user` is empty.

        Raises:
            UsageError: `client.unsupported`, the protocol has no such login.
        """
        raise NotImplementedError

    def publish(self, publish: PendingPublish) -> Buffer:
        """The bytes that publish the values; the last one requests the receipt.

        Raises:
            UsageError: `headers.invalid`, the protocol cannot carry these headers;
                `client.unsupported`, it has no receipts.
        """
        raise NotImplementedError

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        """The bytes that subscribe to each topic from its start, and request confirmation.

        `positions` requests the position of each message.

        Raises:
            UsageError: `client.unsupported`, the protocol has no such subscription.
        """
        raise NotImplementedError

    def goodbye(self) -> bytes:
        """The last bytes before the client leaves."""
        return b""

    def receive(self, data: Buffer) -> list[TransportEvent]:
        """The events that these bytes complete, in any chunking.

        An unreadable stream ends with a final `Refusal`.
        """
        raise NotImplementedError


def add_message(
    events: list[TransportEvent],
    topic: str,
    value: bytes,
    headers: Mapping[str, bytes] | None,
    position: Position | None,
) -> None:
    """Append a message, to the last delivery if it directly follows it."""
    last = events[-1] if events else None
    if (
        isinstance(last, Delivery)
        and last.headers is not None
        and (last.topic, last.next_position) == (topic, position)
    ):
        last.values.append(value)
        last.headers.append(headers)
    else:
        events.append(Delivery(topic, [value], [headers], position))
