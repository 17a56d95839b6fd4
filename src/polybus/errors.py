"""The error tree.

    PolybusError(code, text)
    ├── PeerError      a peer violated its protocol   → answered with an error of that protocol
    ├── UsageError     the request is not possible    → fix the call; never retried
    ├── StorageError   the disk failed or is damaged  → no more receipts; health goes red
    ├── BusyError      too much load (retry_after_s)  → the edge pauses reading; clients back off
    └── ConfigError    the configuration is wrong     → one line on stderr, exit code 2

Codes are public and stable (docs/reference/errors.md lists them); texts may improve.
"""

import copy
from typing import Self


class PolybusError(Exception):
    """An error with a stable `code` and a text for people."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"

    def copy(self) -> Self:
        """A copy to raise.

        Raising one error object several times would keep the frames of every raise in memory.
        """
        return copy.copy(self)

    def without_traceback(self) -> Self:
        """The error without its frames, to be kept.

        A kept error refers to the frames it passed, and one of them often refers to the object that
        keeps it.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class PeerError(PolybusError):
    """A peer violated its protocol.

    After a `final` error the stream cannot be decoded any further and the connection is closed.
    After any other error reading continues after the offending message.
    """

    def __init__(self, code: str, text: str, *, final: bool = True) -> None:
        super().__init__(code, text)
        self.final = final


class UsageError(PolybusError):
    """The request is not possible: an unknown topic, a closed client."""


class StorageError(PolybusError):
    """Storage failed: a damaged segment, a full or failing disk."""


class BusyError(PolybusError):
    """Too much load or a held lock; try again after `retry_after_s`."""

    def __init__(self, code: str, text: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(code, text)
        self.retry_after_s = retry_after_s


class ConfigError(PolybusError):
    """The configuration is wrong; the text names the key."""
