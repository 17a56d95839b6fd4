"""The version comes first and picks the decoder.

The seed asks readers to read the count and the first property, and to hand the rest to a decoder
for that version. `DECODERS` has one per major version; a revision never needs a new one.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from polybus.batch import Buffer
from polybus.errors import PeerError
from polybus.wire.boson_properties.framing import LENGTH_BYTES, Places

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
    """A message's properties after the version, by what they are.

    Flags and content stay where they are in the buffer. A property that comes twice counts as it
    came last.
    """

    flags: dict[bytes, Span] = field(default_factory=dict)
    topic: bytes = b""
    content: Span = (0, 0)
    headers: dict[str, bytes] = field(default_factory=dict)


def decode(buffer: Buffer, places: Places) -> Properties:
    """Read a complete message, whatever version of those we speak it is.

    Raises:
        PeerError: not final, `boson.version-missing`, `boson.version-invalid`,
            `boson.version-unknown` or `boson.key-not-text`.
    """
    if not places or bytes(buffer[places[0] : places[1]]) != VERSION:
        text = "the first property is not the version, hbfv"
        raise PeerError("boson.version-missing", text, final=False)
    start, end = places[1] + LENGTH_BYTES, places[2]
    major = _major(bytes(buffer[start : min(end, start + _VERSION_BYTES_MAX)]))
    return DECODERS[major](buffer, places)


def _major(value: bytes) -> int:
    """The major version, if we speak it."""
    # Four digits or dots could be a float too, but an absurd one (`1.00` is 2.5e-9): they are text.
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
        text = f"version {said} is not spoken here, only {spoken}"
        raise PeerError("boson.version-unknown", text, final=False)
    return major


def _decode_1(buffer: Buffer, places: Places) -> Properties:
    """Version 1: flags begin with `hbf`, `topic` and `content` are the message, all else headers.

    Flags belong before user properties, but nothing is gained by refusing others: they are taken
    wherever they stand.
    """
    found = Properties()
    try:
        for index in range(3, len(places), 3):
            key = bytes(buffer[places[index] : places[index + 1]])
            start, end = places[index + 1] + LENGTH_BYTES, places[index + 2]
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


DECODERS: dict[int, Callable[[Buffer, Places], Properties]] = {1: _decode_1}
