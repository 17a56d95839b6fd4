"""References: the row of a message whose payload is a blob, and how readers recognise it.

The value of such a row is the reference itself, as JSON that people, DuckDB and msgstream clients
can use as it is:

    {"reference":{"id":"…","size":3,"sha256":"…","type":"text/plain","url":"/v1/blobs/…"}}

The header `polybus-reference` with the blob's id proves that the bus wrote it: clients cannot
send headers whose names begin with `polybus-`, so no client can refer to another's blob.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

HEADER = "polybus-reference"
RESERVED_PREFIX = "polybus-"
OCTETS = "application/octet-stream"
TEXT = "text/plain; charset=utf-8"
JSON = "application/json"
TYPE_BYTES_MAX = 255
"""Length of a content type; a longer one counts as unknown."""
_ID = re.compile("[0-9a-f]{64}")
_TYPE = re.compile(r"[\x21-\x7e][\x20-\x7e]*")


class Reference(msgspec.Struct, frozen=True):
    """A payload that is stored as a blob: its id, size in bytes, SHA-256 and content type."""

    id: str
    size: int
    sha256: str
    type: str = OCTETS
    url: str = ""

    @property
    def is_text(self) -> bool:
        """Whether the payload was published as text."""
        return self.type.startswith("text/") and "utf-8" in self.type.lower()


class _Value(msgspec.Struct):
    reference: Reference


_decoder = msgspec.json.Decoder(_Value)


def is_blob_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def make(blob_id: str, size: int, content_type: str = OCTETS) -> Reference:
    """The reference to a blob, whose id is its SHA-256."""
    fits = len(content_type) <= TYPE_BYTES_MAX and _TYPE.fullmatch(content_type)
    kind = content_type if fits else OCTETS
    return Reference(blob_id, size, blob_id, kind, f"/v1/blobs/{blob_id}")


def encode(reference: Reference) -> bytes:
    """The value of the message's row."""
    return msgspec.json.encode(_Value(reference))


def parse(value: bytes) -> Reference | None:
    """The reference in the value of a row; None if it has none."""
    try:
        found = _decoder.decode(value).reference
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if is_blob_id(found.id) else None


def marked(headers: Mapping[str, bytes] | None) -> bool:
    """Whether a message with these headers is a reference."""
    return headers is not None and HEADER in headers


def any_marked(headers: Sequence[Mapping[str, bytes] | None] | None) -> bool:
    """Whether a batch with these headers has a reference; None at once without headers."""
    return headers is not None and any(marked(one) for one in headers)


def reserved_in(names: Iterable[str]) -> str | None:
    """The first name of a header that only the bus may write."""
    return next((name for name in names if name.startswith(RESERVED_PREFIX)), None)


def without_mark(headers: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """The headers that the publisher sent."""
    return {name: value for name, value in (headers or {}).items() if name != HEADER}
