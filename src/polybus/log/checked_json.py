"""Metadata files: small JSON files, each with a checksum of itself.

The last field is `xxh3`: XXH3 (64 bits) of the whole file with these 16 digits taken as zeros.
Earlier versions wrote topic.json, polybus.json and the files of pipelines without one. Such a file
is accepted if it has only fields that those versions wrote, so that no flipped bit makes a checked
file look like an unchecked one.
"""

import re
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from polybus import structs
from polybus.errors import StorageError

N = TypeVar("N", bound=msgspec.Struct)

_BLANK = b"0" * 16
_START = b',"xxh3":"'
_END = b'"}\n'
_TAIL = re.compile(rb',"xxh3":"([0-9a-f]{16})"}\n\Z')


def encode(note: msgspec.Struct) -> bytes:
    """The content of the file for metadata, which has one or more fields."""
    before = msgspec.json.encode(note, order="deterministic")[:-1] + _START
    return before + xxhash.xxh3_64_hexdigest(before + _BLANK + _END).encode() + _END


def is_checked(content: bytes) -> bool:
    return _TAIL.search(content) is not None


def read(path: Path, kind: type[N], *, accept_unchecked: bool = False) -> N | None:
    """The metadata in a file; None if the file is missing. Raises StorageError `log.damaged`."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError("log.damaged", f"{path}: cannot be read: {error.strerror}") from error
    return decode(content, kind, path, accept_unchecked=accept_unchecked)


def problem(content: bytes) -> str | None:
    """What is wrong with a file whose fields are not known here, or None.

    A file without a checksum is one of an earlier version, unless its last field was the checksum.
    """
    if (tail := _TAIL.search(content)) is not None:
        return None if _is_right(content, tail) else "its checksum is wrong"
    try:
        fields = structs.decode(content, dict)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return str(error)
    last = next(reversed(fields.items()), ("", None))
    is_checksum = len(last[0]) == len("xxh3") and isinstance(last[1], str) and len(last[1]) == 16
    return "its checksum is damaged" if is_checksum else None


def _is_right(content: bytes, tail: re.Match[bytes]) -> bool:
    blanked = content[: tail.start(1)] + _BLANK + content[tail.end(1) :]
    return xxhash.xxh3_64_hexdigest(blanked).encode() == tail[1]


def decode(content: bytes, kind: type[N], path: Path, *, accept_unchecked: bool = False) -> N:
    """The metadata in a file's content. Raises StorageError `log.damaged`."""
    tail = _TAIL.search(content)
    try:
        if tail is not None:
            if not _is_right(content, tail):
                raise StorageError("log.damaged", f"{path}: its checksum is wrong")
        elif not accept_unchecked:
            raise StorageError("log.damaged", f"{path}: truncated, or its end is damaged")
        elif set(structs.decode(content, dict)) - set(kind.__struct_encode_fields__):
            raise StorageError("log.damaged", f"{path}: its checksum is damaged")
        return structs.decode(content, kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError("log.damaged", f"{path}: {error}") from error
