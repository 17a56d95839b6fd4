"""The settings of a client, and the address of its bus.

An address is `scheme[+tls]://[user:password@]host[:port][?gzip=1&tls=1]`. Without a scheme it is
HTTP on the ports 80 and 443, else Boson. A user without a password is a token. Without either, the
token is that of POLYBUS_TOKEN, of the file that POLYBUS_TOKEN_FILE names or, in the file of
`polybus login`, the one for this host and port.
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
from polybus.structs import decode

log = logging.getLogger("polybus.client")
ErrorListener = Callable[[PolybusError], None]
TOKEN_VARIABLE = "POLYBUS_TOKEN"
TOKEN_FILE_VARIABLE = "POLYBUS_TOKEN_FILE"
DEFAULT_URL = f"boson://127.0.0.1:{PORT}"
# Schemes with TLS that do not end in +tls.
_SECURE = {"https": "http", "wss": "ws"}
_SWITCHES = {"1": True, "true": True, "0": False, "false": False}

SEVERAL_NODES = ("boson", "boson+properties", "goms")
"""The schemes whose URLs may name several nodes."""


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
    """The address and protocol of a bus; `scheme` is without `+tls`.

    `others` are further nodes of the same cluster, to try when this one does not answer.
    """

    scheme: str
    host: str
    port: int
    tls: bool = False
    gzip: bool = False
    credentials: Credentials | None = None
    others: tuple[tuple[str, int], ...] = ()

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Host and port of every node."""
        return ((self.host, self.port), *self.others)

    @property
    def authority(self) -> str:
        """Host and port as URLs and HTTP write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        secure = {"http": "https", "ws": "wss"}.get(self.scheme, f"{self.scheme}+tls")
        return f"{secure if self.tls else self.scheme}://{self.authority}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Settings of a client; `connect` explains the others.

    Attributes:
        close_timeout_s: how long the bus may take to read our last bytes on close.
        tls: the context for TLS connections; None means the system's certificates.
        message_bytes_max: the largest message that is accepted.
        ready_bytes_max: how many unread bytes a subscription holds.
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
    first, others = _split_nodes(with_scheme(url))
    try:
        parts = urlsplit(first)
        port = parts.port
        further = [urlsplit(f"//{one}") for one in others]
        places = tuple((one.hostname or "", one.port or PORT) for one in further)
    except ValueError:
        # Not the error itself: it quotes what may be a part of a password.
        text = "host or port is invalid; write special characters of a password as %2F and so on"
        raise _wrong(url, text) from None
    if not parts.scheme or not parts.hostname:
        raise _wrong(url, f"a URL must look like {DEFAULT_URL}")
    if others and parts.scheme.removesuffix("+tls") not in SEVERAL_NODES:
        raise _wrong(url, f"only {', '.join(SEVERAL_NODES)} may name several nodes")
    if not all(host for host, _ in places):
        raise _wrong(url, "write several nodes as boson://host:port,host:port")
    if parts.path not in ("", "/") or parts.fragment:
        raise _wrong(url, "after the port only ?options may follow")
    credentials = None
    if parts.password:
        credentials = Credentials(unquote(parts.username or ""), unquote(parts.password))
        if not credentials.user:
            raise _wrong(url, "the user is missing before the password")
    elif parts.username:
        credentials = Credentials("", unquote(parts.username))
    if port is None and parts.scheme.removesuffix("+tls") == "queue":
        # A queue connector shares its port with no other protocol, so it has no default port.
        raise _wrong(url, "the port is missing, which queue:// needs")
    switches = _switches(url, parts.query)
    scheme = _SECURE.get(parts.scheme) or parts.scheme.removesuffix("+tls")
    tls = scheme != parts.scheme or switches.get("tls", False)
    port = PORT if port is None else port
    gzip = switches.get("gzip", False)
    address = Address(scheme, parts.hostname, port, tls=tls, gzip=gzip, credentials=credentials)
    address = replace(address, others=places)
    if credentials or scheme == "queue":
        # A queue connector without token-required would take a token for a message.
        return address
    return replace(address, credentials=token_of(address.authority))


def _split_nodes(url: str) -> tuple[str, list[str]]:
    """The URL with its first node alone, and the other nodes."""
    head, mark, rest = url.partition("://")
    size = next((at for at, char in enumerate(rest) if char in "/?#"), len(rest))
    user, at_sign, hosts = rest[:size].rpartition("@")
    first, *others = hosts.split(",")
    return f"{head}{mark}{user}{at_sign}{first}{rest[size:]}", others


def with_scheme(url: str, scheme: str = "") -> str:
    """The URL; `host:port` alone is completed with the scheme, else by its port."""
    if "://" in url or not url:
        return url
    by_port = {"80": "http", "443": "https"}
    port = url.partition("?")[0].rstrip("/").rpartition(":")[2]
    return f"{scheme or by_port.get(port, 'boson')}://{url}"


def token_of(authority: str) -> Credentials | None:
    """The token for a bus: of the environment, or of the file of `polybus login`.

    Raises UsageError `client.token-file`.
    """
    token = environment_token() or stored_tokens().get(authority)
    return Credentials("", token.strip()) if token else None


def environment_token() -> str | None:
    """The token of POLYBUS_TOKEN, or of the file that POLYBUS_TOKEN_FILE names.

    Raises UsageError `client.token-file`.
    """
    path = os.environ.get(TOKEN_FILE_VARIABLE)
    return os.environ.get(TOKEN_VARIABLE) or (read_token(path) if path else None)


def read_token(path: str) -> str:
    """The token in a file, without white space around it. Raises UsageError `client.token-file`."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        text = f"the token file {path} cannot be read: {type(error).__name__}"
        raise UsageError("client.token-file", text) from error
    if not token or len(token.split()) > 1:
        raise UsageError("client.token-file", f"the token file {path} must have one token")
    return token


def tokens_path() -> Path:
    """Where `polybus login` stores tokens, by host and port."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "polybus" / "tokens.json"


def stored_tokens() -> dict[str, str]:
    try:
        return decode(tokens_path().read_bytes(), dict[str, str])
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
