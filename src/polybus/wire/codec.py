"""What every stream codec is: the same calls for every protocol, no I/O.

    codec.receive(data)   bytes of the peer, in any chunking → the events they complete
    codec.take_carry()    what is left of an unfinished message; the caller promises to put it in
                          front of the next data (an edge does, to spare a copy of the whole read)
    codec.close()         the peer ended its stream → the events still owed

A PeerError whose `final` is false comes as a `Bad` event in its place among the others, and the
stream goes on. A final one comes as the last event; whatever is received after it is ignored.

Messages that need a look of their own take a few microseconds each, and a read may hold a hundred
thousand of them. So that one peer's read never stops all others for long, a server's codec pauses
after STEPS_MAX of them: `backlog` is true then, and `receive(b"")` goes on.
`data` must not change after `receive`: batches refer to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from polybus.batch import Batch, Buffer
from polybus.errors import PeerError

STEPS_MAX = 1000


@dataclass(slots=True)
class Publish:
    """Batches to publish, in order.

    `whole`, when there, is one piece of wire bytes that carries exactly these batches in their
    protocol's own encoding: what subscribers of all their topics can be sent as it is.
    """

    batches: list[Batch]
    whole: Buffer | None = None


@dataclass(slots=True)
class PublishPart(Publish):
    """One part of a message, published at once; the last one asks for the receipt of them all."""

    is_first: bool = False


@dataclass(slots=True)
class Bad:
    """The peer broke its protocol here."""

    error: PeerError


E = TypeVar("E")


class Codec(Protocol[E]):
    """One connection's side of a protocol."""

    @property
    def backlog(self) -> bool:
        """Whether `receive` paused; see the module docstring."""
        ...

    def receive(self, data: Buffer) -> list[E]: ...

    def take_carry(self) -> bytes: ...

    def close(self) -> list[E]: ...

    @property
    def unfinished_bytes(self) -> int:
        """How much memory an unfinished message takes."""
        ...
