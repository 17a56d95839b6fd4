"""The settings of a client, and the address of its bus.

An address is `scheme[+tls]://host[:port][?gzip=1&tls=1]`.
"""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from polybus.config import PORT
from polybus.errors import PolybusError, UsageError

log = logging.getLogger("polybus.client")
ErrorListener = Callable[[PolybusError], None]
DEFAULT_URL = f"boson://127.0.0.1:{PORT}"
# Schemes with TLS that do not end in +tls.
_SECURE = {"https": "http", "wss": "ws"}
_SWITCHES = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True)
class Address:
    """The address and protocol of a bus; `scheme` is without `+tls`."""

    scheme: str
    host: str
    port: int
    tls: bool = False
    gzip: bool = False

    @property
    def authority(self) -> str:
        """Host and port as URLs and HTTP write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}{'+tls' if self.tls else ''}://{self.authority}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Settings of a client; `connect` explains those that are not here.

    Attributes:
        close_timeout_s: how long the bus may take to read our last bytes on close.
        tls: the context for TLS connections; None means the system's certificates.
        message_bytes_max: the largest message that is accepted.
        ready_bytes_max: how many bytes a subscription holds that were not read yet.
    """

    address: Address
    reconnect: bool = True
    connect_timeout_s: float = 10.0
    receipt_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    name: str = "polybus-client"
    tls: ssl.SSLContext | None = None
    on_error: ErrorListener | None = None
    message_bytes_max: int = 256 << 20
    ready_bytes_max: int = 8 << 20

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """The context for TLS connections to the bus; None for plain ones."""
        return (self.tls or ssl.create_default_context()) if self.address.tls else None

    def report(self, error: PolybusError) -> None:
        """Pass an error that no waiting call can raise to `on_error`, or log it."""
        if self.on_error is not None:
            self.on_error(error)
        else:
            log.warning("%s: %s", self.name, error)


def parse(url: str) -> Address:
    """Parse a URL; the caller checks that its scheme is known.

    Raises:
        UsageError: `client.url`, which names the invalid part.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _wrong(url, str(error)) from error
    if not parts.scheme or not parts.hostname:
        raise _wrong(url, f"a URL must look like {DEFAULT_URL}")
    if parts.path not in ("", "/") or parts.fragment:
        raise _wrong(url, "only ?options may follow the port")
    if parts.username or parts.password:
        raise _wrong(url, "a user and password are not supported")
    if port is None and parts.scheme.removesuffix("+tls") == "queue":
        # A queue connector shares its port with no other protocol, so it has no default port.
        raise _wrong(url, "queue:// needs the port of the connector")
    switches = _switches(url, parts.query)
    scheme = _SECURE.get(parts.scheme) or parts.scheme.removesuffix("+tls")
    tls = scheme != parts.scheme or switches.get("tls", False)
    port = PORT if port is None else port
    return Address(scheme, parts.hostname, port, tls=tls, gzip=switches.get("gzip", False))


def _switches(url: str, query: str) -> dict[str, bool]:
    switches = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in ("tls", "gzip"):
            raise _wrong(url, f"the option {name!r} is not known; use gzip or tls")
        if value not in _SWITCHES:
            raise _wrong(url, f"{name} must be 1 or 0")
        switches[name] = _SWITCHES[value]
    return switches


def _wrong(url: str, text: str) -> UsageError:
    # The part before @ may be a password.
    shown = url.rpartition("@")[2][:80]
    return UsageError("client.url", f"{shown}: {text}")
