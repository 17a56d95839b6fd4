"""Where a subscription starts, as callers say it and as the bus reads it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from polybus.client.message import Position
from polybus.errors import UsageError

Start = str | datetime | Position
WORDS = ("latest", "earliest")
_POSITION = re.compile(r"[0-9]+:[0-9]+")


def start_text(start: Start) -> str:
    """The start in the bus's words: `latest`, `earliest`, `EPOCH:OFFSET` or an ISO time in UTC.

    Raises:
        UsageError: `position.invalid`.
    """
    if isinstance(start, Position):
        return str(start)
    if isinstance(start, str):
        if start in WORDS:
            return start
        if _POSITION.fullmatch(start):
            return str(Position.parse(start))
        start = _parse_time(start)
    if start.tzinfo is None:
        text = f"{start.isoformat()} has no time zone; say which, for example with +00:00"
        raise UsageError("position.invalid", text)
    return start.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _parse_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        said = f"{text[:40]!r} is not earliest, latest, EPOCH:OFFSET or an ISO time"
        raise UsageError("position.invalid", said) from error
