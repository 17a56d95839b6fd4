"""Decodes a message by its version, which is the first property.

The specification asks readers to read the count and the first property, and to pass the rest to a
decoder for that version. `DECODERS` has one per major version; a minor version needs no new one.
"""

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from polybus.batch import Buffer
from polybus.errors import PeerError
from polybus.wire.boson_properties.framing import LENGTH_BYTES, PropertyOffsets

VERSION = b"hbfv"
TOPIC = b"topic"
CONTENT = b"content"
FLAG_PREFIX = b"hbf"

_FLOAT = struct.Struct(">f")
_ASCII = re.compile(rb"([0-9]{1,9})(\.[0-9]{0,9})?")
_VERSION_BYTES_MAX = 40

Span = tuple[int, int]


@dataclass(slots=True)
class Properties:
    """A message's properties after the version, by kind.

    Flags and content are spans of the buffer. The last of several equal keys counts.
    """

    flags: dict[bytes, Span] = field(default_factory=dict)
    topic: bytes = b""
    content: Span = (0, 0)
    headers: dict[str, bytes] = field(default_factory=dict)


def decode(buffer: Buffer, offsets: PropertyOffsets) -> Properties:
    """Decode a complete message of any supported version.

    Raises:
        PeerError: not final, `boson.version-missing`, `boson.version-invalid`,
            `boson.version-unknown` or `boson.key-not-text`.
    """
    if not offsets or bytes(buffer[offsets[0] : offsets[1]]) != VERSION:
        text = "the first property is not the version, hbfv"
        raise PeerError("boson.version-missing", text, final=False)
    start, end = offsets[1] + LENGTH_BYTES, offsets[2]
    major = _major(bytes(buffer[start : min(end, start + _VERSION_BYTES_MAX)]))
    return DECODERS[major](buffer, offsets)


def _major(value: bytes) -> int:
    """The major version, if it is supported."""
    # Four digits or dots could be a float, but not a sensible one (`1.00` is 2.5e-9): text wins.
    text_like = not value.strip(b"0123456789.")
    found = _ASCII.fullmatch(value) if text_like else None
    if found:
        major, said = int(found[1]), value.decode()
    elif len(value) == _FLOAT.size and not text_like and math.isfinite(_FLOAT.unpack(value)[0]):
        number: float = _FLOAT.unpack(value)[0]
        major, said = math.floor(number), str(round(number, 1))
    else:
        text = f"the version is neither a float nor a number in ASCII: {value.hex() or 'empty'}"
        raise PeerError("boson.version-invalid", text, final=False)
    if major not in DECODERS:
        spoken = ", ".join(f"{known}.x" for known in DECODERS)
        text = f"version {said} is not supported, only {spoken}"
        raise PeerError("boson.version-unknown", text, final=False)
    return major


def _decode_1(buffer: Buffer, offsets: PropertyOffsets) -> Properties:
    """Version 1: `hbf…` are flags, `topic` and `content` are the message, all others headers.

    Flags should precede user properties, but are accepted anywhere.
    """
    found = Properties()
    try:
        for index in range(3, len(offsets), 3):
            key = bytes(buffer[offsets[index] : offsets[index + 1]])
            start, end = offsets[index + 1] + LENGTH_BYTES, offsets[index + 2]
            if key == CONTENT:
                found.content = (start, end)
            elif key == TOPIC:
                found.topic = bytes(buffer[start:end])
            else:
                name = key.decode()
                if key.startswith(FLAG_PREFIX):
                    found.flags[key] = (start, end)
                else:
                    found.headers[name] = bytes(buffer[start:end])
    except UnicodeDecodeError as error:
        text = "the key of a property is not UTF-8"
        raise PeerError("boson.key-not-text", text, final=False) from error
    return found


DECODERS: dict[int, Callable[[Buffer, PropertyOffsets], Properties]] = {1: _decode_1}
