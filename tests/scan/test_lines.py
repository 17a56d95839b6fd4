"""goMS lines: the compiled scanner and its twin keep one contract."""

from __future__ import annotations

import gc
import json
from array import array
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import compiled

from polybus.scan import goms_py

_lines = compiled("goms")
both = pytest.mark.parametrize("lines", [_lines, goms_py], ids=["compiled", "pure"])

HEAD = b'{"messagetype":"message","topics":["t"]'


def line(topic: str, data: str, *, spaced: bool = False, ascii_only: bool = False) -> bytes:
    sent = {"messagetype": "send", "topics": [topic], "data": data}
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps(sent, separators=separators, ensure_ascii=ascii_only).encode() + b"\n"


def scanned(
    lines: ModuleType, buffer: bytes, *, message_bytes_max: int = 1000, topic_bytes_max: int = 255
) -> tuple[int, dict[str, list[str]]]:
    """Where the scan stopped, and the text of each topic's messages."""
    stop, batches = lines.scan_lines(
        buffer, 0, len(buffer), b"send", message_bytes_max, topic_bytes_max
    )
    return stop, {batch.topic: [value.decode() for value in batch.values()] for batch in batches}


def encoded(lines: ModuleType, value: bytes) -> bytes:
    coded: bytes = lines.encode_lines(HEAD, value, array("i", [0, len(value)]))
    return coded


@both
def test_lines_are_gathered_by_topic_in_order(lines: ModuleType) -> None:
    buffer = line("a", "1") + line("b", "2") + line("a", "3") + line("b", "4") + line("a", "")
    assert scanned(lines, buffer) == (len(buffer), {"a": ["1", "3", ""], "b": ["2", "4"]})


@both
def test_many_topics_are_told_apart(lines: ModuleType) -> None:
    topics = [f"topic-{number}" for number in range(1000)]
    buffer = b"".join(line(topic, topic) for topic in topics * 2)
    stop, found = scanned(lines, buffer)
    assert stop == len(buffer)
    assert found == {topic: [topic, topic] for topic in topics}


@both
@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b" \t\r\n\n "])
def test_spaces_and_line_ends_of_common_encoders_are_plain(
    lines: ModuleType, spaced: bool, end: bytes
) -> None:
    one = line("a", "x", spaced=spaced).rstrip() + end
    assert scanned(lines, end + one * 3) == (len(end + one * 3), {"a": ["x"] * 3})


@both
@pytest.mark.parametrize("ascii_only", [False, True])
def test_escapes_become_the_text_they_stand_for(lines: ModuleType, ascii_only: bool) -> None:
    texts = ["plain", 'a "b" \\ / \b\f\n\r\t\0', "é€😀", "", "x" * 100 + "\n" + "y" * 100]
    buffer = b"".join(line("a", text, ascii_only=ascii_only) for text in texts)
    assert scanned(lines, buffer) == (len(buffer), {"a": texts})


@both
def test_values_without_escapes_are_not_copied(lines: ModuleType) -> None:
    buffer = line("a", "é") + line("b", "\n")
    _, batches = lines.scan_lines(buffer, 0, len(buffer), b"send", 100, 100)
    assert [batch.buffer is buffer for batch in batches] == [True, False]


OTHERS = {
    "another type": b'{"messagetype":"register","topics":["a"],"data":"x"}',
    "two topics": b'{"messagetype":"send","topics":["a","b"],"data":"x"}',
    "no topic": b'{"messagetype":"send","topics":[],"data":"x"}',
    "an empty topic": b'{"messagetype":"send","topics":[""],"data":"x"}',
    "a topic to fold": b'{"messagetype":"send","topics":["aB"],"data":"x"}',
    "a topic with an escape": b'{"messagetype":"send","topics":["\\u0061"],"data":"x"}',
    "a topic beyond ASCII": '{"messagetype":"send","topics":["é"],"data":"x"}'.encode(),
    "a system topic": b'{"messagetype":"send","topics":["$x"],"data":"x"}',
    "a long topic": b'{"messagetype":"send","topics":["%b"],"data":"x"}' % (b"a" * 256),
    "a number": b'{"messagetype":"send","topics":["a"],"data":1}',
    "long data": b'{"messagetype":"send","topics":["a"],"data":"%b"}' % (b"a" * 1001),
    "another key": b'{"messagetype":"send","topics":["a"],"data":"x","ack":true}',
    "another order": b'{"topics":["a"],"messagetype":"send","data":"x"}',
    "more space": b'{"messagetype":"send","topics":["a"],"data":  "x"}',
    "no end": b'{"messagetype":"send","topics":["a"],"data":"x',
    "no brace": b'{"messagetype":"send","topics":["a"],"data":"x"',
    "a raw newline": b'{"messagetype":"send","topics":["a"],"data":"x\ny"}',
    "a bad escape": b'{"messagetype":"send","topics":["a"],"data":"\\x"}',
    "a cut escape": b'{"messagetype":"send","topics":["a"],"data":"\\u00e"}',
    "a lone surrogate": b'{"messagetype":"send","topics":["a"],"data":"\\ud800"}',
    "a lone low surrogate": b'{"messagetype":"send","topics":["a"],"data":"\\udc00"}',
    "half a pair": b'{"messagetype":"send","topics":["a"],"data":"\\ud800\\u0041"}',
    "a stray byte": b'{"messagetype":"send","topics":["a"],"data":"\xff"}',
    "an overlong character": b'{"messagetype":"send","topics":["a"],"data":"\xc0\x80"}',
    "an encoded surrogate": b'{"messagetype":"send","topics":["a"],"data":"\xed\xa0\x80"}',
    "a code too high": b'{"messagetype":"send","topics":["a"],"data":"\xf4\x90\x80\x80"}',
    "a cut character": b'{"messagetype":"send","topics":["a"],"data":"\xe2\x82"}',
    "garbage": b"garbage",
}


@both
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_the_scan_stops_at_the_first_thing_that_is_not_plain(
    lines: ModuleType, other: bytes
) -> None:
    before = line("a", "1") + line("b", "2")
    stop, found = scanned(lines, before + b" " + other + b"\n" + line("a", "3"))
    assert stop == len(before) + 1
    assert found == {"a": ["1"], "b": ["2"]}


@both
def test_limits_include_their_own_value(lines: ModuleType) -> None:
    buffer = line("a" * 255, "x" * 1000)
    assert scanned(lines, buffer)[0] == len(buffer)


@both
def test_a_scan_outside_its_buffer_is_refused_or_empty(lines: ModuleType) -> None:
    assert lines.scan_lines(line("a", "1"), 0, 10, b"send", 100, 100) == (0, [])
    assert lines.scan_lines(b"", 0, 0, b"send", 100, 100) == (0, [])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.text()), max_size=20), st.booleans())
def test_both_scanners_read_back_any_text(
    messages: list[tuple[str, str]], ascii_only: bool
) -> None:
    buffer = b"".join(line(topic, text, ascii_only=ascii_only) for topic, text in messages)
    expected: dict[str, list[str]] = {}
    for topic, text in messages:
        expected.setdefault(topic, []).append(text)
    for lines in (_lines, goms_py):
        assert scanned(lines, buffer, message_bytes_max=10**6) == (len(buffer), expected)


@given(st.binary(max_size=60))
def test_both_scanners_agree_on_any_bytes_as_data(data: bytes) -> None:
    buffer = b'{"messagetype":"send","topics":["a"],"data":"' + data + b'"}\n'
    assert scanned(_lines, buffer) == scanned(goms_py, buffer)


@given(st.binary(max_size=60))
def test_both_twins_agree_on_what_is_utf8(data: bytes) -> None:
    compiled = _lines.is_utf8(data, 0, len(data))
    assert compiled == goms_py.is_utf8(data, 0, len(data))
    try:
        data.decode()
    except UnicodeDecodeError:
        assert not compiled
    else:
        assert compiled


@both
def test_a_value_is_escaped_as_json_text(lines: ModuleType) -> None:
    value = 'a"b\\c\b\f\n\r\t\0\x1f\x7f/é😀'
    text = '"a\\"b\\\\c\\b\\f\\n\\r\\t\\u0000\\u001f\x7f/é😀"'
    assert encoded(lines, value.encode()) == HEAD + b',"data":' + text.encode() + b"}\n"


@both
@pytest.mark.parametrize(("value", "text"), [(b"\xff", b"/w=="), (b"\xffab", b"/2Fi")])
def test_a_value_that_is_no_text_is_base64_and_says_so(
    lines: ModuleType, value: bytes, text: bytes
) -> None:
    assert encoded(lines, value) == HEAD + b',"encoding":"base64","data":"' + text + b'"}\n'


@both
def test_offsets_count_up_from_the_first(lines: ModuleType) -> None:
    coded = lines.encode_lines(HEAD, b"ab", array("i", [0, 1, 1, 2, 2, 2]), 3, 9)
    assert coded == b"".join(
        HEAD + b',"offsets":["3:%d"],"data":"%b"}\n' % (offset, data)
        for offset, data in [(9, b"a"), (10, b"b"), (11, b"")]
    )


@both
def test_the_largest_offsets_fit(lines: ModuleType) -> None:
    largest = (1 << 63) - 1
    coded = lines.encode_lines(HEAD, b"\xff", array("i", [0, 1]), largest, largest)
    assert json.loads(coded)["offsets"] == [f"{largest}:{largest}"]


@both
def test_a_message_that_is_not_in_the_log_has_no_offset(lines: ModuleType) -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        lines.encode_lines(HEAD, b"", array("i", [0, 0]), 0, -1)


@given(st.lists(st.binary(max_size=40) | st.text(max_size=40).map(str.encode), max_size=10))
def test_both_encoders_write_the_same_json(values: list[bytes]) -> None:
    spans = array("i")
    for value in values:
        start = spans[-1] if spans else 0
        spans.extend((start, start + len(value)))
    compiled = _lines.encode_lines(HEAD, b"".join(values), spans, 1, 5)
    assert compiled == goms_py.encode_lines(HEAD, b"".join(values), spans, 1, 5)
    assert compiled.count(b"\n") == len(values)
    for coded in compiled.splitlines():
        json.loads(coded)


def test_spans_outside_the_buffer_are_refused() -> None:
    with pytest.raises(IndexError):
        _lines.encode_lines(HEAD, b"abc", array("i", [0, 4]))
    with pytest.raises(IndexError):
        _lines.encode_lines(HEAD, b"abc", array("i", [2, 1]))


class ScansWhenCollected:
    """Garbage whose finalizer scans, as one that closes a socket lets another thread do."""

    def __init__(self, scan_more: Callable[[], object]) -> None:
        self.itself = self
        self._scan_more = scan_more

    def __del__(self) -> None:
        self._scan_more()


def test_a_finalizer_that_scans_disturbs_no_scan() -> None:
    def topics(data: bytes) -> list[tuple[str, list[bytes]]]:
        _, batches = _lines.scan_lines(data, 0, len(data), b"send", 1 << 20, 255)
        return [(batch.topic, list(batch.values())) for batch in batches]

    data = b"".join(line(f"topic{number}", str(number)) for number in range(400))
    more = b"".join(line(f"other{number}", str(number)) for number in range(3000))
    expected = topics(data)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(20):
            gc.disable()
            ScansWhenCollected(lambda: topics(more))
            filler: list[list[int]] = [[] for _ in range(200)]
            gc.enable()
            assert topics(data) == expected
            del filler
    finally:
        gc.set_threshold(*thresholds)
