# cython: annotation_typing=False
"""The packs and confirmations of a WebSocket, bypassing the `websockets` library.

Outgoing packs are framed here, so that a thousand sessions that get the same pack under the same
number share one buffer. Incoming confirmations are short text frames, and are read here too.

Compiled as it is (sending.pxd), or run as it is.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
if not cython.compiled:
    from polybus.edges.tcp.transport import ReadInterceptor
from polybus.wire.msgstream import ID_DIGITS_MAX, encode_packs

if TYPE_CHECKING:
    from polybus.batch import Buffer
    from polybus.edges.tcp.outbox import Outbox
    from polybus.services.memory import MemoryGate
    from polybus.services.sessions.delivery import PackDelivery, Packs
    from polybus.services.sessions.session import Session

TEXT = 0x81
MASKED = 0x80
SHORT_BYTES_MAX = 125
HEAD_BYTES = 6
# As a C integer.
DIGITS_MAX = ID_DIGITS_MAX
COMMA = 0x2C
ZERO = 0x30


@cython.cclass
class PackEncodings:
    """Encoded packs of this loop turn.

    A thousand sessions that get the same packs under the same numbers share one result of `encode`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, encode: Callable[[Packs], Any]) -> None:
        self._loop = loop
        self._encode = encode
        # The packs are kept, so that their ids stay valid.
        self._encoded: dict[tuple[int, ...], tuple[Any, Packs]] = {}

    def get(self, packs: Packs) -> Any:
        first, json = packs[0]
        if len(packs) == 1:
            key: tuple[int, ...] = (first, id(json))
        elif packs[-1][0] - first == len(packs) - 1:
            key = (first, *[id(json) for _, json in packs])
        else:
            # With a gap in the numbers, the first does not determine the others.
            return self._encode(packs)
        found = self._encoded.get(key)
        if found is None:
            if not self._encoded:
                self._loop.call_soon(self._encoded.clear)
            found = self._encoded[key] = (self._encode(packs), packs)
        return found[0]


@cython.cclass
class PackSender(ReadInterceptor):
    """The hot path of a session's WebSocket: it sends packs and reads confirmations."""

    __slots__ = (
        "_again",
        "_between_frames",
        "_collecting",
        "_frames",
        "_inboxes",
        "_memory",
        "_outbox",
        "_paused",
        "_sent_to",
        "_session",
    )

    def __init__(self, inboxes: PackDelivery, memory: MemoryGate, frames: PackEncodings) -> None:
        self._inboxes = inboxes
        self._memory = memory
        self._frames = frames
        self._session: Session | None = None
        # None until the answer to the handshake is out.
        self._outbox: Outbox | None = None
        self._sent_to = 0
        self._paused = False
        self._collecting: asyncio.Task[None] | None = None
        self._again = False
        # Between two frames of the peer, and outside of a fragmented message.
        self._between_frames = False

    def wake(self) -> None:
        """Send the packs that this connection has not received yet."""
        session = self._session
        if session is None or self._outbox is None or self._paused:
            return
        if self._collecting is not None:
            self._again = True
            return
        while not self._paused:
            packs = None
            if not self._memory.is_crowded():
                packs = self._inboxes.collect_now(session, self._sent_to)
            if packs is None:
                self._collect_later(session)
                return
            if not packs:
                return
            self._send_packs(packs)
            if self._sent_to + 1 == session.next_id:
                return

    def _send_packs(self, packs: Packs) -> None:
        assert self._outbox is not None
        self._sent_to = max(self._sent_to, packs[-1][0])
        self._outbox.put(self._frames.get(packs))

    def _collect_later(self, session: Session) -> None:
        """Call `_collected` when something has been read or saved, or when there is room."""
        raise NotImplementedError

    def _collected(self, session: Session, packs: Packs) -> None:
        self._collecting = None
        if session is self._session:
            if packs:
                self._send_packs(packs)
            if packs or self._again:
                self._again = False
                self.wake()

    def take(self, data: Buffer, start: int, stop: int) -> bool:
        """Take a read that contains only confirmations; False for any other."""
        session = self._session
        if session is None or not self._between_frames or not isinstance(data, bytes):
            return False
        ids = confirmed_ids(data, start, stop)
        if ids is None:
            return False
        self._confirm(session, ids)
        return True

    def _confirm(self, session: Session, ids: list[int]) -> None:
        self._inboxes.confirm(session, ids)
        if session.wants_catch_up() is not None:
            self.wake()


def packs_frame(packs: Packs) -> bytes:
    return text_frame(encode_packs(packs))


def text_frame(text: bytes) -> bytes:
    """An unfragmented, unmasked text frame."""
    size = len(text)
    if size <= SHORT_BYTES_MAX:
        return b"\x81%c%b" % (size, text)
    if size < 1 << 16:
        return b"\x81\x7e" + struct.pack("!H", size) + text
    return b"\x81\x7f" + struct.pack("!Q", size) + text


def confirmed_ids(data: bytes, start: int, stop: int) -> list[int] | None:
    """The ids in short text frames; None if the data contains anything else."""
    ids: list[int] = []
    while start < stop:
        if stop - start <= HEAD_BYTES or data[start] != TEXT:
            return None
        size = data[start + 1] ^ MASKED
        mask_at, start = start + 2, start + HEAD_BYTES
        if not 0 < size <= SHORT_BYTES_MAX or start + size > stop:
            return None
        number = digits = 0
        for index in range(size):
            byte = data[start + index] ^ data[mask_at + (index & 3)]
            if byte == COMMA:
                if number:
                    ids.append(number)
                number = digits = 0
            elif ZERO <= byte <= ZERO + 9 and digits < DIGITS_MAX:
                number = 10 * number + byte - ZERO
                digits += 1
            else:
                return None
        if number:
            ids.append(number)
        start += size
    return ids
