"""Decoding into typed values, from any thread.

msgspec prepares a Struct when it is decoded for the first time, and takes no lock. If a second
thread decodes it meanwhile, it follows a null pointer and the process ends. So this module prepares
a type, in one thread at a time, before its first use. A `Decoder` at the top of a module is safe
too: modules are imported once.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")
_lock = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


@overload
def decode(content: bytes | bytearray | memoryview | str, kind: type[T]) -> T: ...
@overload
def decode(content: bytes | bytearray | memoryview | str, kind: Any) -> Any: ...
def decode(content: bytes | bytearray | memoryview | str, kind: Any) -> Any:
    """The value of a JSON text. Raises msgspec.DecodeError; its ValidationError: another type."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _prepared(kind)
    return decoder.decode(content)


@overload
def convert(raw: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def convert(raw: Any, kind: Any, *, strict: bool = True) -> Any: ...
def convert(raw: Any, kind: Any, *, strict: bool = True) -> Any:
    """A value made of dicts and lists as a type. Raises msgspec.ValidationError."""
    if kind not in _decoders:
        _prepared(kind)
    return msgspec.convert(raw, kind, strict=strict)


def _prepared(kind: Any) -> msgspec.json.Decoder[Any]:
    with _lock:
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    return decoder
