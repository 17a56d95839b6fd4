"""Packs as a client reads them: numbered lists of events, and what of them is a message.

The bus turns a message's value into JSON (docs/protocols/msgstream.md), and not every value comes
back as it was: JSON comes without its white space, a JSON string as the text in it.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import dataclass
from typing import Any

import msgspec

from polybus.errors import PeerError

_packs = msgspec.json.Decoder(dict[str, list[list[msgspec.Raw]]])
_string = msgspec.json.Decoder(str)


class _Base64(msgspec.Struct, forbid_unknown_fields=True):
    base64: str


_base64 = msgspec.json.Decoder(_Base64)


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of a session.

    Attributes:
        name: its type, perhaps dotted; for a topic's message, the topic.
        raw: the data as JSON text; empty when it has none.
        pack_id: the pack it came in; 0 is a notice of the bus.
    """

    name: str
    raw: bytes = b""
    pack_id: int = 0

    @property
    def data(self) -> Any:
        """The data; None when it has none. Raises msgspec.DecodeError if Python cannot hold it."""
        return msgspec.json.decode(self.raw) if self.raw else None

    @property
    def value(self) -> bytes:
        """The data as the value of a message: base64 decoded, a string as UTF-8, JSON as text."""
        return value_of(self.raw)


@dataclass(frozen=True, slots=True)
class Pack:
    """Events that came together; `pack_id` 0 is a notice and is never confirmed."""

    pack_id: int
    events: list[Event]


def parse_packs(text: bytes) -> list[Pack]:
    """The packs of one answer or frame, by their numbers.

    Raises:
        PeerError: `msgstream.pack-invalid`.
    """
    try:
        packs = [
            Pack(
                int(number),
                [
                    Event(
                        _string.decode(one[0]), bytes(one[1]) if len(one) > 1 else b"", int(number)
                    )
                    for one in events
                ],
            )
            for number, events in _packs.decode(text).items()
        ]
    except (msgspec.DecodeError, ValueError, IndexError, RecursionError) as error:
        raise PeerError("msgstream.pack-invalid", f"not packs: {str(error)[:80]}") from error
    return sorted(packs, key=lambda pack: pack.pack_id)


def value_of(raw: bytes) -> bytes:
    """The bytes that a payload stands for."""
    try:
        if raw[:1] == b'"':
            return _string.decode(raw).encode()
        if raw.startswith(b'{"base64":'):
            return b64decode(_base64.decode(raw).base64, validate=True)
    except (msgspec.DecodeError, ValueError):
        pass  # JSON that only looks alike
    return raw
