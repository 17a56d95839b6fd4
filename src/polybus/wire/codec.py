"""The contract of every stream codec: the same calls for every protocol, without I/O.

    codec.receive(data)   bytes of the peer, in any chunking → the events they complete
    codec.take_carry()    the bytes of an unfinished message; the caller must put them before the
                          next data (an edge does so to avoid a copy of the whole read)
    codec.close()         the peer ended its stream → the last events

A PeerError that is not final becomes a `Bad` event, in order with the others, and the stream
continues. A final one is the last event; all further data is ignored.

A message that the scan does not handle takes a few microseconds, and a read may contain a hundred
thousand of them. To let other peers proceed, a server's codec pauses after STEPS_MAX of them:
`backlog` is true then, and `receive(b"")` continues.
`data` must not change after `receive`: batches refer to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from polybus.batch import Batch, Buffer, Headers
from polybus.errors import PeerError

STEPS_MAX = 1000
LOGIN_BYTES_MAX = 4096


@dataclass(slots=True)
class Publish:
    """Batches to publish, in order.

    `whole`, if set, is exactly these batches in their protocol's encoding. Subscribers of all their
    topics can be sent these bytes unchanged.
    """

    batches: list[Batch]
    whole: Buffer | None = None


@dataclass(slots=True)
class PublishPart(Publish):
    """One part of a message, published at once; the last part requests the receipt for all."""

    is_first: bool = False


@dataclass(frozen=True, slots=True)
class LargeBegin:
    """A payload over `inline-bytes-max` begins: its pieces follow, and then LargeEnd.

    Until then the only other events are Bad and LargeDropped, which end it too. `topic` is
    empty if it is not known yet.
    """

    topic: str = ""


@dataclass(frozen=True, slots=True)
class LargePiece:
    """The next bytes of a large payload."""

    data: Buffer


@dataclass(frozen=True, slots=True)
class LargeEnd:
    """A large payload is complete: one message for each of the topics.

    Attributes:
        receipt_id: of the requested receipt; empty if there is none.
        ack: whether to answer when it is durable, without an id.
        encoding: what the bytes still have to be decoded from, `base64` or nothing.
        is_text: whether the bytes are UTF-8.
        part_number: of a part that is published at once, among the parts of its sequence; else 0.
        spans: where each message begins and ends in the bytes, if they are several.
        part_headers: of each of those.
    """

    topics: tuple[str, ...]
    receipt_id: bytes = b""
    headers: Headers | None = None
    ack: bool = False
    encoding: str = ""
    is_text: bool = False
    part_number: int = 0
    spans: Sequence[int] | None = None
    part_headers: Sequence[Headers | None] | None = None


@dataclass(frozen=True, slots=True)
class LargeDropped:
    """The message of the large payload was refused; a Bad event says why."""


Large = LargeBegin | LargePiece | LargeEnd | LargeDropped


@dataclass(frozen=True, slots=True)
class Deliver:
    """Messages for a client, one batch per topic."""

    batches: list[Batch]


@dataclass(slots=True)
class Bad:
    """The peer violated its protocol here."""

    error: PeerError

    def __post_init__(self) -> None:
        self.error.without_traceback()


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """A peer logs in: by user and password, or by a token if `user` is empty.

    It has no repr, so that no secret gets into a log.
    """

    user: str
    secret: str


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """The server's answer: the client is logged in to this account."""

    account: str


def parse_login(content: bytes) -> Login:
    """Parse a login in Boson: user and password on two lines, or a token on one.

    Raises PeerError `auth.invalid`, not final.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = ""
    user, newline, secret = text.rstrip("\r\n").partition("\n")
    if not newline:
        user, secret = "", user
    if not secret or len(content) > LOGIN_BYTES_MAX:
        wanted = "a line with the user and one with the password, or one line with a token"
        raise PeerError("auth.invalid", f"a login must be {wanted}, in UTF-8", final=False)
    return Login(user.strip(), secret.strip("\r"))


E = TypeVar("E")


class Codec(Protocol[E]):
    """One connection's side of a protocol."""

    is_held: bool
    """Set by the edge while messages wait: later ones must not be published before them."""

    @property
    def backlog(self) -> bool:
        """Whether `receive` paused; see the module docstring."""
        ...

    def receive(self, data: Buffer) -> list[E]: ...

    def take_carry(self) -> bytes: ...

    def close(self) -> list[E]: ...

    @property
    def unfinished_bytes(self) -> int:
        """The memory of an unfinished message."""
        ...


class PlainCodec(Codec[E], Protocol[E]):
    """A codec whose plain messages may be published together with those of other connections."""

    def scan_plain(self, data: Buffer, start: int, stop: int) -> tuple[int, list[Batch]]:
        """Return where the plain messages from `start` end, and their batches.

        `receive` takes the rest.
        """
        ...

    def whole_of(
        self, batches: Sequence[Batch], data: Buffer, start: int, stop: int
    ) -> Buffer | None:
        """Batches that are exactly `data[start:stop]`, as subscribers may get them."""
        ...
