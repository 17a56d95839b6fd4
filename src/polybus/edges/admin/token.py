"""The administrator's token: it permits HTTP calls that clients may not make.

The bus creates DATA/admin.token when it starts without one. HTTP calls carry the token as
`Authorization: Bearer …`.
"""

import hmac
import secrets
from pathlib import Path

from polybus.errors import StorageError
from polybus.log.disk import replace_file
from polybus.log.layout import admin_token_path
from polybus.log.topics import storage_error

TOKEN_BYTES = 32
TOKEN_CHARACTERS_MIN = 16
SCHEME = "bearer "


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

    Raises:
        StorageError: the file cannot be read or written, or holds no token.
    """
    path = admin_token_path(data)
    try:
        token = _read(path)
        if token is None:
            token = secrets.token_urlsafe(TOKEN_BYTES)
            replace_file(path, f"{token}\n".encode(), mode=0o600)
    except OSError as error:
        raise storage_error(error, f"cannot use {path}") from error
    if len(token) < TOKEN_CHARACTERS_MIN:
        text = f"{path} holds no token: remove the file, and the next start creates one"
        raise StorageError("admin.token-file", text)
    return AdminToken(token)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
