"""Positions: where a message is, and where a subscription starts, the same in every protocol.

    earliest | latest | EPOCH:OFFSET | ISO-TIME

Also the lines of a Boson subscribe request, one topic each: `TOPIC [from=START] [tell=position]`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from polybus.batch import Buffer
from polybus.config import Limits
from polybus.errors import PeerError, UsageError

_FROM = " from="
_TELL = " tell=position"
_POSITION = re.compile(r"([0-9]{1,19}):([0-9]{1,19})")
_NUMBER_MAX = (1 << 63) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ECHO_CHARS_MAX = 40


@dataclass(frozen=True, slots=True)
class Earliest:
    """From the oldest message of the topic."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Only messages that are published from now on."""


class Position(NamedTuple):
    """A position in a topic: `offset` counts from 0 in each `epoch` (incarnation) of the topic."""

    epoch: int
    offset: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Read `EPOCH:OFFSET`. Raises UsageError `position.invalid`."""
        epoch, colon, offset = text.partition(":")
        if not (colon and _is_number(epoch) and _is_number(offset)):
            raise UsageError("position.invalid", f"{text[:40]!r} is not EPOCH:OFFSET")
        return cls(int(epoch), int(offset))


@dataclass(frozen=True, slots=True)
class Since:
    """From the first message at or after a time, in microseconds since 1970, UTC."""

    timestamp_us: int


Start = Earliest | Latest | Position | Since


@dataclass(frozen=True, slots=True)
class SubscribeLine:
    """One line of a subscribe request.

    `start` is the peer's text, for `parse_start`; `tell` requests positions.
    """

    topic: str
    start: str = "latest"
    tell: bool = False

    def __str__(self) -> str:
        # Always with `from=`, because the topic's name may contain it.
        return f"{self.topic}{_FROM}{self.start}{_TELL if self.tell else ''}"


def parse_start(text: str) -> Start:
    """Read a start. A time without a zone is UTC.

    Raises:
        PeerError: not final, `position.invalid`.
    """
    if text == "earliest":
        return Earliest()
    if text == "latest":
        return Latest()
    found = _POSITION.fullmatch(text)
    if found:
        epoch, offset = int(found[1]), int(found[2])
        if epoch <= _NUMBER_MAX and offset <= _NUMBER_MAX:
            return Position(epoch, offset)
        raise _invalid(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise _invalid(text) from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return Since((time - _EPOCH) // timedelta(microseconds=1))


def parse_lines(content: Buffer, limits: Limits) -> list[SubscribeLine]:
    """Read the lines of a request; empty lines are ignored.

    A topic's name may contain spaces: it ends at the last ` from=` of the line.

    Raises:
        PeerError: not final, `request.not-text` or `request.too-many-topics`.
    """
    try:
        text = str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise PeerError("request.not-text", "the request is not UTF-8", final=False) from error
    topics_max = limits.topics_per_request_max
    # Stop splitting at the limit: a request may be millions of newlines.
    lines = text.strip().split("\n", topics_max)
    if len(lines) > topics_max:
        text = f"more than {topics_max} topics in one request (topics-per-request-max)"
        raise PeerError("request.too-many-topics", text, final=False)
    return [_parse_line(line) for line in (line.strip() for line in lines) if line]


def subscribe_lines(starts: Mapping[str, str], *, tell: bool = False) -> bytes:
    """The lines of a request that subscribes to each topic from its start."""
    lines = (SubscribeLine(topic, start, tell) for topic, start in starts.items())
    return "\n".join(map(str, lines)).encode()


def _parse_line(line: str) -> SubscribeLine:
    line, tell_last = _without(line, _TELL)
    topic, mark, start = line.rpartition(_FROM)
    if not mark:
        return SubscribeLine(line, tell=tell_last)
    topic, tell_first = _without(topic, _TELL)
    return SubscribeLine(topic, start.strip(), tell_last or tell_first)


def _without(line: str, option: str) -> tuple[str, bool]:
    if line.endswith(option):
        return line[: -len(option)].rstrip(), True
    return line, False


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _invalid(text: str) -> PeerError:
    shown = ascii(text[:_ECHO_CHARS_MAX])
    return PeerError(
        "position.invalid",
        f"{shown} is not earliest, latest, EPOCH:OFFSET or an ISO time",
        final=False,
    )
