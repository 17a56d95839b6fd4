"""The stream protocols of the client by URL scheme; client/http has the others.

A transport creates the bytes to send and turns received bytes into events. It does no I/O:
client/link.py moves the bytes.
"""

from polybus.client.transports.base import Transport
from polybus.client.transports.boson import BosonFramesTransport, BosonPropertiesTransport
from polybus.client.transports.goms import GomsTransport
from polybus.client.transports.queue import QueueTransport
from polybus.client.urls import Address
from polybus.errors import UsageError

SCHEMES: dict[str, type[Transport]] = {
    "boson": BosonFramesTransport,
    "boson+properties": BosonPropertiesTransport,
    "goms": GomsTransport,
    "queue": QueueTransport,
}
# Requests and WebSockets instead of a stream.
HTTP_SCHEMES = ("http", "ws")


def find(name: str) -> type[Transport]:
    """The transport of a scheme. Raises UsageError `client.scheme`, which names the known ones."""
    transport = SCHEMES.get(name)
    if transport is None:
        known = ", ".join(f"{known}://" for known in sorted([*SCHEMES, *HTTP_SCHEMES]))
        raise UsageError("client.scheme", f"{name[:40]}:// is not known; use one of {known}")
    return transport


def check(address: Address) -> None:
    """Raise UsageError: `client.scheme`, unknown; `client.url`, the scheme has no gzip or TLS."""
    transport = None if address.scheme in HTTP_SCHEMES else find(address.scheme)
    if address.gzip and (transport is None or not transport.gzip):
        raise UsageError("client.url", f"{address.scheme}:// has no gzip")
    if address.tls and transport is not None and not transport.tls:
        raise UsageError("client.url", f"{address.scheme}:// has no TLS")
