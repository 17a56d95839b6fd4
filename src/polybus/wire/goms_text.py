"""The data of a goMS send that is too large for memory: a JSON string, decoded as it arrives.

Only a string can be passed on in pieces, and only if it begins within the first ENVELOPE_BYTES_MAX
bytes of its object. Any other large data is assembled, up to a limit of its own.
"""

import re

import msgspec

from polybus.batch import Buffer

DATA = b'"data"'
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BODY = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_WHITE = re.compile(rb"[ \t\r\n]*+")
_PLAIN = re.compile(rb"[^,}\]\[{\":]++")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_ESCAPE_BYTES_MAX = 6
_text = msgspec.json.Decoder(str)


def large_data_at(head: bytes) -> int | None:
    """Where the text of `data` begins, if it is a string that does not end within these bytes.

    `head` is the beginning of an object. It is read token by token, so the caller limits it.
    """
    at = _skip(head, 0)
    if head[at : at + 1] != b"{":
        return None
    at = _skip(head, at + 1)
    while True:
        key = _STRING.match(head, at)
        if key is None:
            return None
        at = _skip(head, key.end())
        if head[at : at + 1] != b":":
            return None
        at = _skip(head, at + 1)
        end = _value_end(head, at)
        if end is None:
            is_data = key[0] == DATA and head[at : at + 1] == b'"'
            return at + 1 if is_data else None
        at = _skip(head, end)
        if head[at : at + 1] != b",":
            return None
        at = _skip(head, at + 1)


def _skip(head: bytes, at: int) -> int:
    found = _WHITE.match(head, at)
    return found.end() if found else at


def _value_end(head: bytes, at: int) -> int | None:
    """The end of the value at this place; None if it is not within `head`."""
    first = head[at : at + 1]
    if first == b'"':
        found = _STRING.match(head, at)
        return found.end() if found else None
    if first not in (b"[", b"{"):
        plain = _PLAIN.match(head, at)
        return plain.end() if plain and plain.end() < len(head) else None
    depth = 0
    for token in _TOKEN.finditer(head, at):
        if token[0] in (b"[", b"{"):
            depth += 1
        elif token[0] in (b"]", b"}"):
            depth -= 1
            if not depth:
                return token.end()
    return None


class LargeText:
    """A string whose end has not arrived.

    Attributes:
        head: the object up to the string, its quote included.
        ended: whether the closing quote has arrived.
    """

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.ended = False
        self.size = 0
        self._rest = b""

    def decode(self, data: Buffer, start: int = 0) -> tuple[bytes, int]:
        """The bytes of the string's text that arrived, and where in `data` it continues.

        Raises ValueError if it is not a valid string.
        """
        rest = self._rest
        chunk = rest + bytes(memoryview(data)[start:])
        found = _BODY.match(chunk)
        assert found is not None
        end = found.end()
        self.ended = chunk[end : end + 1] == b'"'
        cut = end if self.ended else _safe_cut(chunk, end)
        self._rest = b"" if self.ended else chunk[cut:]
        body = chunk[:cut]
        try:
            text = _text.decode(b'"' + body + b'"').encode()
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(str(error)) from error
        self.size += len(text)
        return text, start + end + 1 - len(rest) if self.ended else len(data)


def _safe_cut(chunk: bytes, end: int) -> int:
    """The last position up to `end` that is neither in an escape nor in a character."""
    at = chunk.rfind(b"\\", max(0, end - _ESCAPE_BYTES_MAX + 1), end)
    if at >= 0 and _is_escape(chunk, at):
        # Perhaps incomplete, or the first half of a pair.
        end = at
    if _HIGH_SURROGATE.search(chunk, max(0, end - _ESCAPE_BYTES_MAX), end):
        before = end - _ESCAPE_BYTES_MAX
        if _is_escape(chunk, before):
            end = before
    for back in range(1, min(4, end) + 1):
        byte = chunk[end - back]
        if byte >= 0xC0:
            # The first byte of a character that may have more bytes than these.
            return end - back
        if byte < 0x80:
            break
    return end


def _is_escape(chunk: bytes, at: int) -> bool:
    """Whether the backslash here is not itself escaped."""
    first = at
    while first > 0 and chunk[first - 1] == ord("\\"):
        first -= 1
    return (at - first) % 2 == 0
