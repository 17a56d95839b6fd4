"""The stream protocols a client can speak, by URL scheme; client/http has the others.

A transport is the client's side of one protocol on one connection: it makes the bytes to send and
turns received bytes into events. It does no I/O; client/link.py moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from polybus.batch import Buffer, Headers
from polybus.client.events import Event
from polybus.client.urls import Address
from polybus.errors import UsageError


class Transport(Protocol):
    """One connection in one protocol."""

    registers: bool
    """Whether a publisher must subscribe to a topic before it may publish there (goMS)."""
    confirms: bool
    """Whether the bus answers a subscription; on queues it begins with the connection."""

    def publish(
        self,
        topic: str,
        values: Sequence[bytes],
        headers: Headers | None,
        receipt_id: str | None,
    ) -> Buffer:
        """The bytes that publish the values, the receipt being the last one's.

        Raises:
            UsageError: `headers.invalid`, the protocol cannot carry these headers;
                `client.unsupported`, it has no receipts.
        """
        ...

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        """The bytes that subscribe to each topic from its start, and ask for confirmation.

        Without `positions` the messages need not tell theirs: nobody will look at them.

        Raises:
            UsageError: `client.unsupported`, the protocol cannot subscribe so.
        """
        ...

    def goodbye(self) -> bytes:
        """What is said before leaving; often nothing."""
        ...

    def receive(self, data: Buffer) -> list[Event]:
        """The events that these bytes complete, in any chunking.

        A stream that cannot be understood ends with a final `Refused`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Scheme:
    """A protocol as URLs name it."""

    make: Callable[[int], Transport]
    """Makes a transport, given the largest message it has to accept."""
    gzip: bool = False
    """Whether the stream may be gzip."""
    tls: bool = True
    """Whether the stream may be TLS."""


def _boson_frames(message_bytes_max: int) -> Transport:
    from polybus.client.transports.boson_frames import BosonFramesTransport

    return BosonFramesTransport(message_bytes_max)


def _boson_properties(message_bytes_max: int) -> Transport:
    from polybus.client.transports.boson_properties import BosonPropertiesTransport

    return BosonPropertiesTransport(message_bytes_max)


def _goms(message_bytes_max: int) -> Transport:
    from polybus.client.transports.goms import GomsTransport

    return GomsTransport(message_bytes_max)


def _queue(message_bytes_max: int) -> Transport:
    from polybus.client.transports.queue import QueueTransport

    return QueueTransport(message_bytes_max)


# Modules are imported when their scheme is used. A new protocol is a line here.
SCHEMES: dict[str, Scheme] = {
    "boson": Scheme(_boson_frames, gzip=True),
    "boson+properties": Scheme(_boson_properties, gzip=True),
    "goms": Scheme(_goms),
    "queue": Scheme(_queue, tls=False),
}


# Requests and WebSockets, no streams of their own.
HTTP_SCHEMES = ("http", "ws")


def find(name: str) -> Scheme:
    """The stream protocol of that name. Raises UsageError `client.scheme`, naming those known."""
    scheme = SCHEMES.get(name)
    if scheme is None:
        known = ", ".join(f"{known}://" for known in sorted([*SCHEMES, *HTTP_SCHEMES]))
        raise UsageError("client.scheme", f"{name[:40]}:// is not known; there are {known}")
    return scheme


def check(address: Address) -> None:
    """Raises UsageError: `client.scheme`, nobody speaks it; `client.url`, it has no such layer."""
    scheme = None if address.scheme in HTTP_SCHEMES else find(address.scheme)
    if address.gzip and (scheme is None or not scheme.gzip):
        raise UsageError("client.url", f"{address.scheme}:// has no gzip")
    if address.tls and scheme is not None and not scheme.tls:
        raise UsageError("client.url", f"{address.scheme}:// has no TLS")
