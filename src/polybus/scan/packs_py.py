"""The content of a msgstream pack from a batch: the pure-Python twin of `_packs.pyx`.

A message's payload is its value, if that is JSON; else a JSON string, if it is text; else an object
with its base64. All messages of a pack are one JSON text, so a value that some parser refuses would
make the others unreadable. JSON is therefore only what every common parser accepts:

- RFC 8259 exactly, in UTF-8; no NaN, no Infinity, nothing after the value
- no lone surrogates in escapes
- no number that is infinite as a double, or over 300 characters long
- nested no deeper than `depth_max`

White space is removed. The time is linear in the value's length, without recursion.
"""

from __future__ import annotations

import re
from array import array
from base64 import b64encode
from math import isinf

import msgspec

from polybus.scan.batch import Buffer

NUMBER_BYTES_MAX = 300
_FIRST_BYTES = frozenset(b'{["-0123456789tfn \t\r\n')
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_NUMBER = re.compile(rb"[-0-9][-+.0-9eE]*+")
_BRACKETS = re.compile(rb"[\[\]{}]")


def encode_pack(head: bytes, buffer: Buffer, spans: array[int], depth_max: int) -> bytes:
    """Each span of `buffer` as a message, in one list: `[`, `head` payload `]`, …, `]`."""
    view = memoryview(buffer)
    messages = []
    for index in range(0, len(spans), 2):
        value = bytes(view[spans[index] : spans[index + 1]])
        messages.append(head + _payload(value, depth_max) + b"]")
    return b"[" + b",".join(messages) + b"]"


def compact_json(value: bytes, depth_max: int) -> bytes | None:
    """The value without white space if it is JSON, else None."""
    if depth_max < 0:
        raise ValueError("depth_max cannot be negative")
    # The first byte rules out most text.
    if not value or value[0] not in _FIRST_BYTES:
        return None
    outside_strings = _STRING.sub(b'""', value)
    if _depth(outside_strings) > depth_max:
        return None
    try:
        value.decode()
        compact = msgspec.json.format(value, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return compact if all(map(_is_moderate, _NUMBER.findall(outside_strings))) else None


def _payload(value: bytes, depth_max: int) -> bytes:
    compact = compact_json(value, depth_max)
    if compact is not None:
        return compact
    try:
        return msgspec.json.encode(value.decode())
    except UnicodeDecodeError:
        return b'{"base64":"' + b64encode(value) + b'"}'


def _depth(text: bytes) -> int:
    depth = deepest = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _is_moderate(number: bytes) -> bool:
    return len(number) <= NUMBER_BYTES_MAX and not isinf(float(number))
