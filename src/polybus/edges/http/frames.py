"""WebSocket frames on the fast path: outgoing packs, and short incoming confirmations.

The `websockets` library handles everything else: the handshake, control frames, fragments, errors.
A frame may bypass the library only between two frames. The library does not report that, so
`ends_between_frames` tracks it.
"""

import struct

from polybus.wire.msgstream import encode_packs

Packs = list[tuple[int, bytes]]

_TEXT = 0x81
_FIN = 0x80
_MASKED = 0x80
_SHORT_BYTES_MAX = 125
_SHORT_HEAD_BYTES = 6


def text_frame(text: bytes) -> bytes:
    """An unfragmented, unmasked text frame."""
    size = len(text)
    if size <= _SHORT_BYTES_MAX:
        return b"\x81%c%b" % (size, text)
    if size < 1 << 16:
        return b"\x81\x7e" + struct.pack("!H", size) + text
    return b"\x81\x7f" + struct.pack("!Q", size) + text


def short_text(data: bytes) -> bytes | None:
    """The text, if the data is exactly one short text frame."""
    size = len(data) - _SHORT_HEAD_BYTES
    if not 0 < size <= _SHORT_BYTES_MAX or data[0] != _TEXT or data[1] != _MASKED | size:
        return None
    mask = (data[2:6] * (size // 4 + 1))[:size]
    plain = int.from_bytes(data[6:], "little") ^ int.from_bytes(mask, "little")
    return plain.to_bytes(size, "little")


def ends_between_frames(data: bytes) -> bool:
    """Whether data that begins at a frame ends at one, outside of a fragmented message."""
    at = 0
    while at + 2 <= len(data):
        if not data[at] & _FIN:
            return False
        size = data[at + 1] & 0x7F
        at += 2
        if size > _SHORT_BYTES_MAX:
            length_bytes = 2 if size == 126 else 8
            size = int.from_bytes(data[at : at + length_bytes], "big")
            at += length_bytes
        # The mask; a frame without one ends the connection.
        at += 4 + size
    return at == len(data)


class Frames:
    """The frames of this loop turn, by their packs.

    A thousand sessions that get the same packs under the same numbers share one buffer.
    """

    def __init__(self) -> None:
        # The packs are kept, so that their ids stay valid.
        self._frames: dict[tuple[int, ...], tuple[bytes, Packs]] = {}

    def get(self, packs: Packs) -> bytes:
        first, json = packs[0]
        if len(packs) == 1:
            key: tuple[int, ...] = (first, id(json))
        elif packs[-1][0] - first == len(packs) - 1:
            key = (first, *(id(json) for _, json in packs))
        else:
            # With a gap in the numbers, the first does not determine the others.
            return text_frame(encode_packs(packs))
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = (text_frame(encode_packs(packs)), packs)
        return found[0]

    def clear(self) -> None:
        self._frames.clear()
