"""The error tree.

    PolybusError(code, text)
    ├── PeerError      they broke their protocol      → answered in that protocol's words
    ├── UsageError     our caller broke our contract  → fix the call; never retried
    ├── StorageError   the log cannot keep a promise  → no more receipts; health goes red
    ├── BusyError      slow down (retry_after_s)      → the edge pauses reading; clients back off
    └── ConfigError    refuse to start                → one line on stderr, exit 2

Codes are public and stable (docs/reference/errors.md lists them); sentences may improve.
"""

from __future__ import annotations

import copy
from typing import Self


class PolybusError(Exception):
    """Something Polybus can name: a stable `code` and a sentence for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"

    def again(self) -> Self:
        """The same error to raise once more.

        An error that is kept and raised again keeps the frames of every raise, and what they hold.
        """
        return copy.copy(self)


class PeerError(PolybusError):
    """A peer broke its protocol.

    `final` says whether its stream can still be understood: after a final error the connection is
    closed, after any other it stays and reading goes on behind the offending message.
    """

    def __init__(self, code: str, text: str, *, final: bool = True) -> None:
        super().__init__(code, text)
        self.final = final


class UsageError(PolybusError):
    """A caller asked for something that cannot be: an unknown topic, a closed client."""


class StorageError(PolybusError):
    """The log cannot keep its promise: a damaged segment, a full or failing disk."""


class BusyError(PolybusError):
    """Nothing is wrong but the load; try again after `retry_after_s`."""

    def __init__(self, code: str, text: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(code, text)
        self.retry_after_s = retry_after_s


class ConfigError(PolybusError):
    """The configuration is wrong; the text names the key."""
