"""goMS lines: the pure-Python twin of `_lines.pyx`.

A plain line is `{"messagetype":"send","topics":["t"],"data":"…"}`, as most clients write it:
with no white space, or with one space after each colon and comma.
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
