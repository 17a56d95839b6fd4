"""What the two sides of goMS say. Topics are lower case.

Client to server: Register, Send, Logout, Close. Server to client: Message, Error, RegAck, SendAck.
Plain messages come as batches instead: `codec.Publish` to the server, `Deliver` to the client.
"""

from __future__ import annotations

from dataclasses import dataclass

from polybus.batch import Batch, Headers
from polybus.wire.positions import At


@dataclass(frozen=True, slots=True)
class Register:
    """Receive these topics. A topic that was sent twice is here twice: the second is an error.

    Attributes:
        start: where to begin, as sent; `positions.parse_start` takes it. None: latest.
        ack: answer with a reg-ack.
        offsets: tell each message's offset.
    """

    topics: tuple[str, ...]
    start: str | None = None
    ack: bool = False
    offsets: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """One message for each of the topics, each of which is here once, in sent order."""

    topics: tuple[str, ...]
    value: bytes
    headers: Headers | None = None
    ack: bool = False


@dataclass(frozen=True, slots=True)
class Logout:
    """No longer receive these topics, each of which is here once; None: any topic."""

    topics: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Close:
    """The client is done; the codec ignores whatever it still sends."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message, and the client's topics it was sent to. `offsets`: one per topic, or none."""

    topics: tuple[str, ...]
    value: bytes
    headers: Headers | None = None
    offsets: tuple[At, ...] = ()


@dataclass(frozen=True, slots=True)
class Deliver:
    """Plain messages, gathered by topic."""

    batches: list[Batch]


@dataclass(frozen=True, slots=True)
class Error:
    """The server refused something. `code` is six digits."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class RegAck:
    """The topics that were registered, and where each begins if offsets were asked for."""

    topics: tuple[str, ...]
    offsets: tuple[At, ...] = ()


@dataclass(frozen=True, slots=True)
class SendAck:
    """A send is stored: the topics, and the offset in each."""

    topics: tuple[str, ...]
    offsets: tuple[At, ...] = ()
