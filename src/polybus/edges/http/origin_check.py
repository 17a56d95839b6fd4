"""Which requests of browsers are refused: checks Host and Origin before anything else.

Any web page can make the browser of its visitor send requests to a bus on the visitor's machine.

DNS rebinding: the name evil.example resolves to the attacker's server first, and to 127.0.0.1 a
moment later. For the browser both are one origin, so a page of it could read and write everything
on a bus that listens on loopback only. But its requests still say `Host: evil.example`. So the bus
answers only to its own known names.

Forged requests: a page may send some requests anywhere, such as a form, or text/plain, and only
cannot read their answers; on a WebSocket it can even read. The browser says where the page comes
from, in Origin and Sec-Fetch-Site. So what changes something must come from a page of this bus,
from one of `http.cors-origins`, or from a program, which sends neither header.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import unquote

import httptools

from polybus.config import Config
from polybus.wire.msgstream import PATHS

LOOPBACK = ("localhost", "127.0.0.1", "::1")
SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")
SAID_BY_BROWSERS = (b"origin", b"sec-fetch-site")
OWN_SITES = (b"same-origin", b"none")
HOSTS_CACHED_MAX = 1024
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(:[0-9]*)?")
_ECHO_CHARS_MAX = 40


class RequestHead(NamedTuple):
    """The checked parts of a request; `host` is None if the header is missing (HTTP/1.0)."""

    method: bytes
    url: bytes
    headers: Sequence[tuple[bytes, bytes]]
    host: bytes | None
    scheme: str
    local_ip: str
    upgrades: bool


class OriginRefusal(NamedTuple):
    status: int
    code: str
    text: str


class OriginCheck:
    """The names and origins of one bus.

    Attributes:
        answer_headers: the headers for browsers in every answer.
    """

    def __init__(self, config: Config) -> None:
        bound = [connector.ip for connector in config.connectors]
        self._names = {_canonical(name) for name in (*LOOPBACK, *bound, *config.http.hosts)}
        self._origins = {origin.encode() for origin in config.http.cors_origins}
        # Accepted Host headers, verbatim: most clients repeat one.
        self._hosts: set[bytes | None] = {None}
        # Other pages may not even load an answer as a script or image. CORS is not concerned.
        policy = "cross-origin" if b"*" in self._origins else "same-origin"
        self.answer_headers = (
            ("x-content-type-options", "nosniff"),
            ("cross-origin-resource-policy", policy),
        )

    def refusal(self, head: RequestHead) -> OriginRefusal | None:
        """Why the request is refused; None if it is allowed."""
        if head.host not in self._hosts and not self._is_ours(head.host or b"", head.local_ip):
            return _wrong_host(head.host or b"")
        said = [pair for pair in head.headers if pair[0] in SAID_BY_BROWSERS]
        if said and self._is_foreign(head, said) and _may_change(head):
            return _wrong_origin(said)
        return None

    def _is_ours(self, host: bytes, local_ip: str) -> bool:
        found = _HOST.fullmatch(host.decode("latin-1").lower())
        if found is None:
            return False
        name = _canonical(found[1])
        # A bus that listens on all addresses knows which one the client has used.
        if name not in self._names and name != _canonical(local_ip.partition("%")[0]):
            return False
        if len(self._hosts) < HOSTS_CACHED_MAX:
            self._hosts.add(host)
        return True

    def _is_foreign(self, head: RequestHead, said: Sequence[tuple[bytes, bytes]]) -> bool:
        origins = [value for name, value in said if name == b"origin"]
        if b"*" in self._origins or (origins and self._origins.issuperset(origins)):
            return False
        own = b"%b://%b" % (head.scheme.encode(), (head.host or b"").lower())
        return not all(
            value.lower() == own if name == b"origin" else value in OWN_SITES
            for name, value in said
        )


def _canonical(name: str) -> str:
    name = name.strip("[]").lower()
    try:
        return ip_address(name).compressed
    except ValueError:
        return name


def _may_change(head: RequestHead) -> bool:
    if head.upgrades or head.method not in SAFE_METHODS:
        return True
    # A poll confirms packs, though it is a GET. Decode as uvicorn does before it routes.
    path = httptools.parse_url(head.url).path or b""
    return head.method == b"GET" and unquote(path.decode("latin-1")) in PATHS


def _wrong_host(host: bytes) -> OriginRefusal:
    shown = host[:_ECHO_CHARS_MAX].decode("ascii", "replace")
    text = f"this bus does not know {shown!r} as its name; add it to http.hosts in the bus's config"
    return OriginRefusal(421, "http.host-unknown", text)


def _wrong_origin(said: Sequence[tuple[bytes, bytes]]) -> OriginRefusal:
    origins = [value for name, value in said if name == b"origin"]
    shown = b"".join(origins[:1])[:_ECHO_CHARS_MAX].decode("ascii", "replace")
    page = f"a page of {shown!r}" if shown else "a page of another site"
    text = f"{page} may not do this; add its origin to http.cors-origins in the bus's config"
    return OriginRefusal(403, "http.origin-foreign", text)
