"""Access for administrators: a Unix socket in the data folder, and a token.

Both give access to the HTTP API, with rights that clients on the network do not have. Users who may
open the socket's file are administrators. Other calls carry the token, DATA/admin.token, as
`Authorization: Bearer …`; the bus creates it when it starts without one. `run.json` in the data
folder names the socket, the process and its addresses while the bus runs.
"""

import hmac
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from polybus.config import Connector
from polybus.log.disk import replace_file
from polybus.log.layout import admin_token_path, socket_path
from polybus.log.topics import storage_error

logger = logging.getLogger("polybus.server")
TOKEN_BYTES = 32
TOKEN_CHARACTERS_MIN = 16
SCHEME = "bearer "
NO_TOKEN = "admin.token-file"


class AdminToken:
    """The token of one bus; compared in constant time."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def is_in(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries the token."""
        if authorization is None or not authorization[: len(SCHEME)].lower() == SCHEME:
            return False
        return hmac.compare_digest(authorization[len(SCHEME) :].strip().encode(), self._token)


def load_or_make(data: Path) -> AdminToken:
    """Read the token of a data folder, or create it, readable by its owner only.

    A file without a valid token is replaced. Raises StorageError if it cannot be read or written.
    """
    path = admin_token_path(data)
    token = ""
    try:
        if path.exists():
            token = path.read_text(errors="replace").strip()
            if not _is_token(token):
                logger.error("%s: %s has no valid token; a new one is written", NO_TOKEN, path)
        if not _is_token(token):
            token = secrets.token_urlsafe(TOKEN_BYTES)
            replace_file(path, f"{token}\n".encode(), mode=0o600)
    except OSError as error:
        raise storage_error(error, f"cannot use {path}") from error
    return AdminToken(token)


def _is_token(text: str) -> bool:
    """Whether it is long enough, and valid in a header."""
    return len(text) >= TOKEN_CHARACTERS_MIN and text.isascii() and text.isprintable()


class RunFile:
    """`run.json` and the socket of a running bus."""

    def __init__(self, data: Path) -> None:
        self._path = data / "run.json"
        self.socket = socket_path(data.resolve() / "admin.sock")

    def write(self, connectors: Sequence[Connector], addresses: Sequence[str]) -> None:
        run = {
            "pid": os.getpid(),
            "addresses": addresses,
            "http": _http_urls(connectors, addresses),
            "admin": str(self.socket),
        }
        replace_file(self._path, msgspec.json.encode(run))

    def remove(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


def _http_urls(connectors: Sequence[Connector], addresses: Sequence[str]) -> list[str]:
    """The addresses at which HTTP is spoken, as URLs; those without TLS first.

    Programs on this machine use the first. Few certificates are for 127.0.0.1.
    """
    urls = []
    for connector, address in zip(connectors, addresses, strict=True):
        if "http" in connector.protocols and address.startswith("tcp://"):
            requires_tls = connector.tls is not None and connector.tls.required
            urls.append(address.replace("tcp://", "https://" if requires_tls else "http://"))
    return sorted(urls, key=lambda url: url.startswith("https://"))
