"""WebSocket frames where speed counts: packs on their way out, short confirmations coming in.

Everything else (the handshake, control frames, fragments, mistakes) is the `websockets` library's
business. A frame is taken past the library only between two frames of its own, which it cannot tell
us; `ends_between_frames` keeps track of that.
"""

from __future__ import annotations

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
    """What a client says, if the data is one short text frame and nothing else."""
    size = len(data) - _SHORT_HEAD_BYTES
    if not 0 < size <= _SHORT_BYTES_MAX or data[0] != _TEXT or data[1] != _MASKED | size:
        return None
    mask = (data[2:6] * (size // 4 + 1))[:size]
    plain = int.from_bytes(data[6:], "little") ^ int.from_bytes(mask, "little")
    return plain.to_bytes(size, "little")


def ends_between_frames(data: bytes) -> bool:
    """Whether data that begins with a frame ends with one, with no message half said."""
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
        # The mask; a frame without one is the connection's last anyway.
        at += 4 + size
    return at == len(data)


class Frames:
    """Frames of this turn of the loop, by what is in them.

    A thousand sessions that are sent the same packs under the same numbers share one buffer.
    """

    def __init__(self) -> None:
        # With the packs, so that their identities stay theirs.
        self._frames: dict[tuple[int, ...], tuple[bytes, Packs]] = {}

    def get(self, packs: Packs) -> bytes:
        first, json = packs[0]
        if len(packs) == 1:
            key: tuple[int, ...] = (first, id(json))
        elif packs[-1][0] - first == len(packs) - 1:
            key = (first, *(id(json) for _, json in packs))
        else:
            # With a gap in the numbers, the first does not tell the others.
            return text_frame(encode_packs(packs))
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = (text_frame(encode_packs(packs)), packs)
        return found[0]

    def clear(self) -> None:
        self._frames.clear()
