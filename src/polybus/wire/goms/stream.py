"""Framing: JSON objects out of a byte stream, in any chunking and any layout.

Plain lines go through `scan.scan_lines` and come out as batches. What stops that scan is looked at
as one object: its end is found byte by byte, each byte once, and the object is decoded whole. The
rules when something is wrong, all of which give one error in its place among the events:

    broken        reading resumes behind the next newline; if it broke at a `{` that begins a line,
                  at that line, so that a cut-off line costs only itself
    too deep      nothing is kept; reading resumes where the levels close or the line ends
    too large     nothing more is kept; reading resumes where the object ends
    anything else only the object is lost
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

from polybus import scan
from polybus.batch import Batch, Buffer
from polybus.config import Limits
from polybus.errors import PeerError
from polybus.scan.objects_py import BAD, DEEP, END, MORE
from polybus.wire.codec import Bad
from polybus.wire.goms.codes import Code, peer_error

ENVELOPE_BYTES_MAX = 64 << 10
"""How much longer than its value an object may be: room for topics and headers."""
CARRY_BYTES_MAX = 4 << 10
"""Longer unfinished objects are kept here: copied with every read, they would cost a square."""

_NEWLINE = re.compile(rb"\n")

E = TypeVar("E")


def object_bytes_max(limits: Limits) -> int:
    """How long an object may be: the largest value in base64, which is a third longer, and room.

    That the value itself is within its limit is checked when it is decoded.
    """
    return (limits.message_bytes_max + 2) // 3 * 4 + ENVELOPE_BYTES_MAX


class ObjectStream(Generic[E]):
    """The receiving side of a stream of objects; a subclass says what they mean."""

    def __init__(
        self,
        limits: Limits,
        *,
        plain: bytes,
        gathered: Callable[[list[Batch]], E],
        decode: Callable[[Buffer], E],
        steps_max: int = sys.maxsize,
    ) -> None:
        self._steps_max = steps_max
        self._limits = limits
        self._plain = plain
        self._gathered = gathered
        self._decode = decode
        self._object_bytes_max = object_bytes_max(limits)
        self._scanner = scan.ObjectScanner(limits.json_depth_max)
        self._held = bytearray()
        self._carried_bytes = 0
        self._inside = False
        self._dropping = False
        self._skipping_line = False
        self._ended = False
        self._backlog = b""
        self.backlog = False

    @property
    def unfinished_bytes(self) -> int:
        return len(self._held) + len(self._backlog)

    def receive(self, data: Buffer) -> list[E | Bad]:
        events: list[E | Bad] = []
        if self.backlog:
            data, self._backlog = self._backlog + bytes(data), b""
            self.backlog = False
        at = self._resume(data, events) if self._inside else 0
        while at < len(data) and not self._ended:
            if len(events) >= self._steps_max:
                self._backlog = bytes(data[at:])
                self.backlog = True
                break
            if self._skipping_line:
                at = self._skip_line(data, at)
            else:
                at = self._read_on(data, at, events)
        return events

    def take_carry(self) -> bytes:
        held_bytes = len(self._held)
        if self.backlog or self._carried_bytes or not 0 < held_bytes <= CARRY_BYTES_MAX:
            return b""
        carry = bytes(self._held)
        self._held = bytearray()
        self._carried_bytes = held_bytes
        return carry

    def close(self) -> list[E | Bad]:
        """The stream is over. An unfinished object is dropped; a finished one was not kept.

        What is received after this is a new stream.
        """
        self._inside = self._dropping = self._skipping_line = self.backlog = False
        self._backlog = b""
        self._held = bytearray()
        self._carried_bytes = 0
        return []

    def _end(self) -> None:
        """Ignore whatever is still received."""
        self._ended = True

    def _resume(self, data: Buffer, events: list[E | Bad]) -> int:
        """Go on with the object the last data ended in."""
        carried_bytes, self._carried_bytes = self._carried_bytes, 0
        end, verdict = self._scanner.scan(data, carried_bytes, len(data))
        if carried_bytes and verdict != MORE:
            # It is here whole, perhaps with many plain lines behind it: scan them all at once.
            self._inside = False
            return 0
        return self._settle(data, 0, end, verdict, events)

    def _read_on(self, data: Buffer, at: int, events: list[E | Bad]) -> int:
        at = self._gather(data, at, len(data), events)
        if at == len(data):
            return at
        self._inside = True
        self._scanner.reset()
        end, verdict = self._scanner.scan(data, at, len(data))
        return self._settle(data, at, end, verdict, events)

    def _gather(self, data: Buffer, start: int, stop: int, events: list[E | Bad]) -> int:
        """Take the plain lines from `start` on; return where something else is."""
        limits = self._limits
        at, groups = scan.scan_lines(
            data, start, stop, self._plain, limits.message_bytes_max, limits.topic_bytes_max
        )
        if groups:
            batches = [Batch(group.topic.decode(), group.buffer, group.spans) for group in groups]
            events.append(self._gathered(batches))
        return at

    def _settle(
        self, data: Buffer, begin: int, end: int, verdict: int, events: list[E | Bad]
    ) -> int:
        """Act on the verdict about `data[begin:end]`; return where to read on."""
        if len(self._held) + end - begin > self._object_bytes_max:
            text = f"the object is over {self._object_bytes_max} bytes (message-bytes-max)"
            self._drop(peer_error(Code.TOO_LARGE, text), events)
        if verdict == DEEP:
            text = f"the object is over {self._limits.json_depth_max} levels deep (json-depth-max)"
            self._drop(peer_error(Code.NOT_AN_OBJECT, text), events)
            begin = end
            end, verdict = self._scanner.scan(data, begin, len(data))
        if verdict == MORE:
            if not self._dropping:
                self._held += memoryview(data)[begin:end]
            return end
        if verdict == END:
            if not self._dropping:
                self._take(data, begin, end, events)
        else:
            self._drop(peer_error(Code.NOT_AN_OBJECT, "not a well-formed JSON object"), events)
            self._skipping_line = verdict == BAD
        self._held = bytearray()
        self._inside = False
        self._dropping = False
        return end

    def _drop(self, error: PeerError, events: list[E | Bad]) -> None:
        """Keep nothing of the object. Only the first thing wrong with it is told."""
        if not self._dropping:
            events.append(Bad(error))
        self._dropping = True
        self._held = bytearray()

    def _take(self, data: Buffer, begin: int, end: int, events: list[E | Bad]) -> None:
        """Turn a whole object into its event."""
        if self._held:
            self._held += memoryview(data)[begin:end]
            data, begin, end = self._held, 0, len(self._held)
            if self._gather(data, begin, end, events) == end:
                return
        try:
            if not scan.is_utf8(data, begin, end):
                raise peer_error(Code.NOT_AN_OBJECT, "the object is not UTF-8")
            events.append(self._decode(memoryview(data)[begin:end]))
        except PeerError as error:
            # A flood of errors must not keep the frames each was raised through.
            error.__cause__ = error.__context__ = error.__traceback__ = None
            events.append(Bad(error))

    def _skip_line(self, data: Buffer, at: int) -> int:
        newline = _NEWLINE.search(data, at)
        if newline is None:
            return len(data)
        self._skipping_line = False
        return newline.end()
