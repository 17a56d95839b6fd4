"""The address of a bus: `scheme[+tls]://host[:port][?gzip=1&tls=1]`."""

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from polybus.config import PORT
from polybus.errors import UsageError

DEFAULT_URL = f"boson://127.0.0.1:{PORT}"
# A queue connector shares its port with no other protocol, so it has no default port.
_NO_DEFAULT_PORT = ("queue",)
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
    if port is None and parts.scheme in _NO_DEFAULT_PORT:
        raise _wrong(url, f"{parts.scheme}:// needs the port of the connector")
    switches = _switches(url, parts.query)
    scheme, plus, last = parts.scheme.rpartition("+")
    tls_scheme = bool(plus) and last == "tls"
    if not tls_scheme:
        scheme = _SECURE.get(parts.scheme, parts.scheme)
        tls_scheme = scheme != parts.scheme
    return Address(
        scheme=scheme,
        host=parts.hostname,
        port=PORT if port is None else port,
        tls=tls_scheme or switches.get("tls", False),
        gzip=switches.get("gzip", False),
    )


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
