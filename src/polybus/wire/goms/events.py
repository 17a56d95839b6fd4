"""The events of both sides of goMS, and its error codes. Topics are in lower case.

Client to server: Register, Send, Logout, Close. Server to client: Message, Error, RegAck, SendAck.
Plain messages come as batches instead: `codec.Publish` to the server, `Deliver` to the client.

An error code has six digits, and the first three say what the error is about. A PeerError has
`goms.` before the digits; the wire has only the digits.
"""

from dataclasses import dataclass
from enum import StrEnum

from polybus.batch import Batch, Headers
from polybus.errors import PeerError
from polybus.wire.positions import Position


class Code(StrEnum):
    """000 general, 001 register, 002 send, 003 logout. The protocol page marks our own codes."""

    NOT_AN_OBJECT = "000001"
    """Not a JSON object, or a field of the wrong type."""
    UNKNOWN_MESSAGETYPE = "000002"
    TOO_LARGE = "000003"
    LOGIN = "000401"
    """A login is required, or it failed."""
    NOT_ALLOWED = "000403"
    SLOW_DOWN = "000429"
    UNKNOWN_TOPICS = "001001"
    """Register to topics that do not exist; the text lists them."""
    ALREADY_REGISTERED = "001002"
    """Register to topics again; the text lists them."""
    CANNOT_BEGIN = "001003"
    """Register from a position where the log has no message, or no intact one."""
    NOT_SENT = "002001"
    NO_DATA = "002002"
    NOT_REGISTERED = "003001"
    """Logout of topics that were not registered; the text lists them."""


def peer_error(code: Code, text: str) -> PeerError:
    """An error about one object; the stream continues after it."""
    return PeerError("goms." + code, text, final=False)


@dataclass(frozen=True, slots=True)
class Register:
    """Subscribe to these topics. A topic that was sent twice is here twice, which is an error.

    Attributes:
        start: where to start, as text for `positions.parse_start`; None means latest.
        ack: answer with a reg-ack.
        offsets: send each message with its offset.
    """

    topics: tuple[str, ...]
    start: str | None = None
    ack: bool = False
    offsets: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """One message for each of the topics, without duplicates, in the order they were sent."""

    topics: tuple[str, ...]
    value: bytes
    headers: Headers | None = None
    ack: bool = False


@dataclass(frozen=True, slots=True)
class Logout:
    """Unsubscribe from these topics, without duplicates; None means all topics."""

    topics: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """The client leaves; the codec ignores whatever follows."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message and the client's topics it was sent to. `offsets` has one per topic, or none."""

    topics: tuple[str, ...]
    value: bytes
    headers: Headers | None = None
    offsets: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class Deliver:
    """Plain messages, one batch per topic."""

    batches: list[Batch]


@dataclass(frozen=True, slots=True)
class Error:
    """The server refused something. `code` is six digits."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RegAck:
    """The topics that were registered, and where each starts if offsets were requested."""

    topics: tuple[str, ...]
    offsets: tuple[Position, ...] = ()


@dataclass(frozen=True, slots=True)
class SendAck:
    """A send is durable: its topics, and the offset in each."""

    topics: tuple[str, ...]
    offsets: tuple[Position, ...] = ()
