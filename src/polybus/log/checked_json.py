"""Small JSON files that decide what counts, each with a checksum of itself.

The last field is `xxh3`: XXH3 (64 bits) of the whole file with these 16 digits taken as zeros.
Earlier versions wrote topic.json and polybus.json without one. Such a file is accepted if it has
only fields that they wrote: so no flipped bit makes a checked file look like an unchecked one.
"""

import re
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from polybus.errors import StorageError

N = TypeVar("N", bound=msgspec.Struct)

_BLANK = b"0" * 16
_START = b',"xxh3":"'
_END = b'"}\n'
_TAIL = re.compile(rb',"xxh3":"([0-9a-f]{16})"}\n\Z')


def encode(note: msgspec.Struct) -> bytes:
    """The content of the file for a note, which has one field or more."""
    before = msgspec.json.encode(note)[:-1] + _START
    return before + xxhash.xxh3_64_hexdigest(before + _BLANK + _END).encode() + _END


def is_checked(content: bytes) -> bool:
    return _TAIL.search(content) is not None


def decode(content: bytes, kind: type[N], path: Path, *, accept_unchecked: bool = False) -> N:
    """The note in a file. Raises StorageError `log.damaged`."""
    tail = _TAIL.search(content)
    try:
        if tail is not None:
            blanked = content[: tail.start(1)] + _BLANK + content[tail.end(1) :]
            if xxhash.xxh3_64_hexdigest(blanked).encode() != tail[1]:
                raise StorageError("log.damaged", f"{path}: its checksum is wrong")
        elif not accept_unchecked:
            raise StorageError("log.damaged", f"{path}: truncated, or its end is damaged")
        elif set(msgspec.json.decode(content, type=dict)) - set(kind.__struct_encode_fields__):
            raise StorageError("log.damaged", f"{path}: its checksum is damaged")
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError("log.damaged", f"{path}: {error}") from error
