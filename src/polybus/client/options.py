"""The settings of a client, and the address of its bus.

An address is `scheme[+tls]://[user:password@]host[:port][?gzip=1&tls=1]`. A user without a password
is a token. Without either, the token is that of POLYBUS_TOKEN or, in the file of `polybus login`,
the one for this host and port.
"""

import logging
import os
import ssl
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from polybus.config import PORT
from polybus.errors import PolybusError, UsageError

log = logging.getLogger("polybus.client")
ErrorListener = Callable[[PolybusError], None]
TOKEN_VARIABLE = "POLYBUS_TOKEN"
DEFAULT_URL = f"boson://127.0.0.1:{PORT}"
# Schemes with TLS that do not end in +tls.
_SECURE = {"https": "http", "wss": "ws"}
_SWITCHES = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A user and password, or a token if `user` is empty; never shown."""

    user: str
    secret: str

    @property
    def authorization(self) -> str:
        """The value of HTTP's header."""
        if not self.user:
            return f"Bearer {self.secret}"
        return f"Basic {b64encode(f'{self.user}:{self.secret}'.encode()).decode()}"


@dataclass(frozen=True, slots=True)
class Address:
    """The address and protocol of a bus; `scheme` is without `+tls`."""

    scheme: str
    host: str
    port: int
    tls: bool = False
    gzip: bool = False
    credentials: Credentials | None = None

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
    except ValueError:
        # Not the error itself: it quotes what may be a part of a password.
        text = "host or port is invalid; write special characters of a password as %2F and so on"
        raise _wrong(url, text) from None
    if not parts.scheme or not parts.hostname:
        raise _wrong(url, f"a URL must look like {DEFAULT_URL}")
    if parts.path not in ("", "/") or parts.fragment:
        raise _wrong(url, "only ?options may follow the port")
    credentials = None
    if parts.password:
        credentials = Credentials(unquote(parts.username or ""), unquote(parts.password))
        if not credentials.user:
            raise _wrong(url, "the user is missing before the password")
    elif parts.username:
        credentials = Credentials("", unquote(parts.username))
    if port is None and parts.scheme.removesuffix("+tls") == "queue":
        # A queue connector shares its port with no other protocol, so it has no default port.
        raise _wrong(url, "queue:// needs the port of the connector")
    switches = _switches(url, parts.query)
    scheme = _SECURE.get(parts.scheme) or parts.scheme.removesuffix("+tls")
    tls = scheme != parts.scheme or switches.get("tls", False)
    port = PORT if port is None else port
    gzip = switches.get("gzip", False)
    address = Address(scheme, parts.hostname, port, tls=tls, gzip=gzip, credentials=credentials)
    if credentials or scheme == "queue":
        # A queue that requires no token would take one for a message.
        return address
    return replace(address, credentials=token_of(address.authority))


def token_of(authority: str) -> Credentials | None:
    """The token for a bus: of the environment, or of the file of `polybus login`."""
    token = os.environ.get(TOKEN_VARIABLE) or stored_tokens().get(authority)
    return Credentials("", token.strip()) if token else None


def tokens_path() -> Path:
    """Where `polybus login` stores tokens, by host and port."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "polybus" / "tokens.json"


def stored_tokens() -> dict[str, str]:
    try:
        return msgspec.json.decode(tokens_path().read_bytes(), type=dict[str, str])
    except (OSError, RuntimeError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _switches(url: str, query: str) -> dict[str, bool]:
    switches = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in ("tls", "gzip"):
            # Not its name: a password with a ? in it would be in the error.
            raise _wrong(url, "an option is not known; use gzip or tls")
        if value not in _SWITCHES:
            raise _wrong(url, f"{name} must be 1 or 0")
        switches[name] = _SWITCHES[value]
    return switches


def _wrong(url: str, text: str) -> UsageError:
    # The part before @ may be a password.
    shown = url.rpartition("@")[2][:80]
    return UsageError("client.url", f"{shown}: {text}")
