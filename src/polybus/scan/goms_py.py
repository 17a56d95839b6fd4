"""goMS: the pure-Python twin of `_goms.pyx`.

A plain line is `{"messagetype":"send","topics":["t"],"data":"…"}`, as most clients write it:
with no white space, or with one space after each colon and comma.

ObjectScanner finds the end of any other object. It reads each byte once, in any chunking, without
recursion: its memory is a state and one byte per open level. It checks the grammar of objects,
arrays and strings; the decoder, which gets the whole object, checks numbers, literals such as
`true` and escapes. The verdicts of `scan`:

    MORE     the object continues after these bytes
    END      it ended; the position is after it
    BAD      it is malformed; the position is the first invalid byte
    RESTART  the same, and that byte is a `{` at the beginning of a line: the next object
    DEEP     it is over `depth_max` levels deep. The rest is skipped, and the next END is where the
             levels close or the line ends, whichever is first, so that an object that never closes
             does not consume the following lines.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from base64 import b64encode
from functools import cache

from polybus.scan.batch import Batch, Buffer

SPACE = re.compile(rb"[ \t\r\n]*+")
# Printable ASCII without quote, backslash and capitals; `$` not at the start.
_TOPIC = rb"([ !#%-@\[\]-~][ !#-@\[\]-~]*+)"
_STRING = rb'([^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+)'
_UTF8_CHUNK_BYTES = 1 << 16


def scan_lines(
    buffer: Buffer,
    start: int,
    stop: int,
    messagetype: bytes,
    message_bytes_max: int,
    topic_bytes_max: int,
) -> tuple[int, list[Batch]]:
    """Scan `buffer[start:stop]` for plain lines; return where it stopped, and batches by topic.

    A plain line is a complete object of this `messagetype` with one topic and string data, written
    as the module docstring shows, within the limits; a newline need not follow. Its topic is
    lower-case ASCII, so that each topic is one batch, and does not begin with `$`. The scan skips
    white space and stops at anything else, which the codec handles. The order within a topic is
    kept. A batch's buffer is `buffer` itself, or a copy of all its values if one has an escape.
    """
    view = memoryview(buffer)
    lines = _patterns(messagetype)
    places: dict[bytes, array[int]] = {}
    texts: dict[bytes, dict[int, bytes]] = {}
    while True:
        start = _skip_space(view, start, stop)
        line = lines[0].match(view, start, stop) or lines[1].match(view, start, stop)
        if line is None:
            break
        topic, (begin, end) = bytes(line[1]), line.span(2)
        if len(topic) > topic_bytes_max or end - begin > message_bytes_max:
            break
        text = _text_of(line[2])
        if text is None:
            break
        spans = places.setdefault(topic, array("i"))
        if len(text) != end - begin:
            texts.setdefault(topic, {})[len(spans)] = text
        spans.extend((begin, end))
        start = line.end()
    batches = [
        _copied(topic.decode(), view, spans, texts[topic])
        if topic in texts
        else Batch(topic.decode(), buffer, spans)
        for topic, spans in places.items()
    ]
    return start, batches


@cache
def _patterns(messagetype: bytes) -> list[re.Pattern[bytes]]:
    return [
        re.compile(
            rb'\{"messagetype":%b"%b",%b"topics":%b\["%b"\],%b"data":%b"%b"\}'
            % (gap, re.escape(messagetype), gap, gap, _TOPIC, gap, gap, _STRING)
        )
        for gap in (b"", b" ")
    ]


def _skip_space(view: memoryview, start: int, stop: int) -> int:
    space = SPACE.match(view, start, stop)
    return space.end() if space is not None else start


def _text_of(inside: bytes) -> bytes | None:
    """The text of a JSON string, given without its quotes; None if it is not valid."""
    try:
        if b"\\" not in inside:
            inside.decode()
            return inside
        text: str = json.loads(f'"{inside.decode()}"')
        return text.encode()
    except UnicodeError:
        return None


def _copied(topic: str, view: memoryview, spans: array[int], texts: dict[int, bytes]) -> Batch:
    values = [
        texts.get(index) or bytes(view[spans[index] : spans[index + 1]])
        for index in range(0, len(spans), 2)
    ]
    return Batch.of(topic, values)


def is_utf8(buffer: Buffer, start: int, stop: int) -> bool:
    """Whether `buffer[start:stop]` is UTF-8."""
    view = memoryview(buffer)[start:stop]
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        # In pieces, because decoded text takes up to four times the memory.
        for begin in range(0, len(view), _UTF8_CHUNK_BYTES):
            decoder.decode(view[begin : begin + _UTF8_CHUNK_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def encode_lines(
    head: bytes, buffer: Buffer, spans: array[int], epoch: int = -1, first_offset: int = 0
) -> bytes:
    """Each span of `buffer` as a line: `head`, the offset if `epoch` is not -1, the data.

    `head` is the object up to the end of its topics. A value that is not UTF-8 is encoded as
    base64, with `encoding`.
    """
    if epoch >= 0 and first_offset < 0:
        raise ValueError("an offset cannot be negative")
    view = memoryview(buffer)
    parts: list[bytes] = []
    for index in range(0, len(spans), 2):
        value = bytes(view[spans[index] : spans[index + 1]])
        parts.append(head)
        if epoch >= 0:
            parts.append(b',"offsets":["%d:%d"]' % (epoch, first_offset + index // 2))
        try:
            data = json.dumps(value.decode(), ensure_ascii=False).encode()
            parts.append(b',"data":%b}\n' % data)
        except UnicodeDecodeError:
            parts.append(b',"encoding":"base64","data":"%b"}\n' % b64encode(value))
    return b"".join(parts)


MORE, END, BAD, RESTART, DEEP = range(5)

_OPEN = {ord("{"): "key or end", ord("["): "value or end"}
_CLOSE = {ord("}"): ("{", "key or end"), ord("]"): ("[", "value or end")}
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*+')
_TOKEN = re.compile(rb"[0-9A-Za-z+.-]*+")
_DULL = re.compile(rb'[^"\n{}\[\]]*+')
_SPACE = frozenset(b" \t\r\n")
_TOKEN_BYTES = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+.-")
_RUNS = {"string": _PLAIN, "token": _TOKEN, "skip": _DULL}


class ObjectScanner:
    """Finds the end of one JSON object in a stream that arrives in pieces."""

    def __init__(self, depth_max: int) -> None:
        if depth_max < 1:
            raise ValueError("depth_max must be 1 or more")
        self._depth_max = depth_max
        self.reset()

    def reset(self) -> None:
        """Begin a new object."""
        self._opened: list[str] = []
        self._skipped_depth = 0
        self._state = "begin"
        self._in_key = False
        self._after_newline = False

    def scan(self, buffer: Buffer, start: int, stop: int) -> tuple[int, int]:
        """Continue with `buffer[start:stop]`; return (where it stopped, verdict)."""
        view = memoryview(buffer)
        at = start
        verdict = MORE
        while at < stop:
            run = _RUNS.get(self._state)
            if run is not None:
                found = run.match(view, at, stop)
                at = found.end() if found is not None else at
                if at == stop:
                    break
                if self._state == "token":
                    self._state = "after"
            verdict = self._step(view[at])
            if verdict == BAD:
                newline = view[at - 1] == 10 if at > start else self._after_newline
                if view[at] == ord("{") and self._state != "begin" and newline:
                    verdict = RESTART
                break
            at += 1
            if verdict != MORE:
                break
        if at > start:
            self._after_newline = view[at - 1] == 10
        return at, verdict

    def _step(self, byte: int) -> int:
        state = self._state
        if state.startswith("skip"):
            return self._skip(byte)
        if state in ("string", "escape"):
            return self._step_string(byte)
        if byte in _SPACE and state != "begin":
            return MORE
        if byte in _OPEN:
            begins = state in ("value", "value or end") or (state == "begin" and byte == ord("{"))
            return self._open(byte) if begins else BAD
        if state == "begin":
            return BAD
        if byte in _CLOSE:
            return self._close(byte)
        if byte == ord(","):
            self._state = "key" if self._opened[-1] == "{" else "value"
            return MORE if state == "after" else BAD
        if byte == ord(":"):
            self._state = "value"
            return MORE if state == "colon" else BAD
        return self._begin_scalar(byte)

    def _step_string(self, byte: int) -> int:
        if byte < 0x20:
            return BAD
        if self._state == "escape":
            self._state = "string"
        elif byte == ord('"'):
            self._state = "colon" if self._in_key else "after"
        else:
            self._state = "escape" if byte == ord("\\") else "string"
        return MORE

    def _begin_scalar(self, byte: int) -> int:
        key = self._state in ("key", "key or end")
        if not key and self._state not in ("value", "value or end"):
            return BAD
        if byte == ord('"'):
            self._in_key = key
            self._state = "string"
            return MORE
        self._state = "token"
        return BAD if key or byte not in _TOKEN_BYTES else MORE

    def _open(self, byte: int) -> int:
        if len(self._opened) == self._depth_max:
            self._skipped_depth = self._depth_max + 1
            self._state = "skip"
            return DEEP
        self._opened.append(chr(byte))
        self._state = _OPEN[byte]
        return MORE

    def _close(self, byte: int) -> int:
        opened, empty = _CLOSE[byte]
        if self._state not in ("after", empty) or self._opened[-1] != opened:
            return BAD
        self._opened.pop()
        self._state = "after"
        return MORE if self._opened else END

    def _skip(self, byte: int) -> int:
        if byte == 10:
            return END
        if self._state == "skip escape":
            self._state = "skip string"
        elif self._state == "skip string":
            self._state = {ord('"'): "skip", ord("\\"): "skip escape"}.get(byte, "skip string")
        elif byte == ord('"'):
            self._state = "skip string"
        elif byte in _OPEN:
            self._skipped_depth += 1
        elif byte in _CLOSE:
            self._skipped_depth -= 1
            return MORE if self._skipped_depth else END
        return MORE
