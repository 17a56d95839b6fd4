"""The error codes of goMS: six digits, the first three say what the error is about.

On a PeerError the code is `goms.` and the digits; on the wire only the digits.
"""

from __future__ import annotations

from enum import StrEnum

from polybus.errors import PeerError


class Code(StrEnum):
    """000 general, 001 register, 002 send, 003 logout. The protocol page says which are ours."""

    NOT_AN_OBJECT = "000001"
    """Not a JSON object, or a field of the wrong type."""
    UNKNOWN_MESSAGETYPE = "000002"
    TOO_LARGE = "000003"
    LOGIN = "000401"
    """A login is needed, or failed."""
    NOT_ALLOWED = "000403"
    SLOW_DOWN = "000429"
    UNKNOWN_TOPICS = "001001"
    """Register to topics that do not exist; the text is their list."""
    ALREADY_REGISTERED = "001002"
    """Register to topics again; the text is their list."""
    CANNOT_BEGIN = "001003"
    """Register from where the log has nothing, or nothing intact."""
    NOT_SENT = "002001"
    NO_DATA = "002002"
    NOT_REGISTERED = "003001"
    """Logout of topics that were not registered; the text is their list."""


def peer_error(code: Code, text: str) -> PeerError:
    """An error about one object; the stream goes on behind it."""
    return PeerError("goms." + code, text, final=False)
