"""Framing: cuts a byte stream into JSON objects, in any chunking and layout.

`scan.scan_lines` turns plain lines into batches. Where that scan stops, one object is handled: its
end is found byte by byte, each byte once, and then it is decoded. Every invalid object gives one
error, in order with the other events:

    malformed     reading resumes after the next newline; if the error is at a `{` that begins a
                  line, at that line, so that a truncated line costs only itself
    too deep      nothing is kept; reading resumes where the levels close or the line ends
    too large     nothing more is kept; reading resumes where the object ends
    anything else only the object is lost
"""

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
from polybus.wire.goms.events import Code, peer_error

ENVELOPE_BYTES_MAX = 64 << 10
"""How much larger than its value an object may be: room for topics and headers."""
CARRY_BYTES_MAX = 4 << 10
"""Larger unfinished objects are kept here: copying them with every read would be quadratic."""

_NEWLINE = re.compile(rb"\n")

E = TypeVar("E")


def object_bytes_max(limits: Limits) -> int:
    """The maximum size of an object: the largest value in base64, plus room for other fields.

    The size of the value itself is checked when it is decoded.
    """
    return (limits.message_bytes_max + 2) // 3 * 4 + ENVELOPE_BYTES_MAX


class ObjectStream(Generic[E]):
    """The receiving side of a stream of objects; a subclass decodes them."""

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
        """Drop an unfinished object: the stream has ended. Later data is a new stream."""
        self._inside = self._dropping = self._skipping_line = self.backlog = False
        self._backlog = b""
        self._held = bytearray()
        self._carried_bytes = 0
        return []

    def _end(self) -> None:
        """Ignore all further data."""
        self._ended = True

    def _resume(self, data: Buffer, events: list[E | Bad]) -> int:
        """Continue the object that the last data ended in."""
        carried_bytes, self._carried_bytes = self._carried_bytes, 0
        end, verdict = self._scanner.scan(data, carried_bytes, len(data))
        if carried_bytes and verdict != MORE:
            # The object is complete, perhaps followed by many plain lines: scan them all at once.
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
        """Publish the plain lines from `start` on; return where they end."""
        limits = self._limits
        at, batches = scan.scan_lines(
            data, start, stop, self._plain, limits.message_bytes_max, limits.topic_bytes_max
        )
        if batches:
            events.append(self._gathered(batches))
        return at

    def _settle(
        self, data: Buffer, begin: int, end: int, verdict: int, events: list[E | Bad]
    ) -> int:
        """Apply the verdict on `data[begin:end]`; return where to continue."""
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
        """Drop the object. Only its first error is reported."""
        if not self._dropping:
            events.append(Bad(error))
        self._dropping = True
        self._held = bytearray()

    def _take(self, data: Buffer, begin: int, end: int, events: list[E | Bad]) -> None:
        """Decode a complete object."""
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
            # Drop the traceback: a flood of errors must not keep the stack frames alive.
            error.__cause__ = error.__context__ = error.__traceback__ = None
            events.append(Bad(error))

    def _skip_line(self, data: Buffer, at: int) -> int:
        newline = _NEWLINE.search(data, at)
        if newline is None:
            return len(data)
        self._skipping_line = False
        return newline.end()
