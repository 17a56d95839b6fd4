"""Batches as packs: whatever a value is, the pack is JSON that every client can read."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import compiled

from polybus.batch import Batch
from polybus.scan import packs_py

_packs = compiled("packs")
both = pytest.mark.parametrize("packs", [_packs, packs_py], ids=["compiled", "pure"])
DEPTH_MAX = 8


def pack(packs: ModuleType, *values: bytes) -> bytes:
    batch = Batch.of("t", values)
    content: bytes = packs.encode_pack(b'["t",', batch.buffer, batch.spans, DEPTH_MAX)
    return content


def payload(packs: ModuleType, value: bytes) -> bytes:
    return pack(packs, value)[len(b'[["t",') : -len(b"]]")]


JSON = [
    *(b"{}", b"[]", b'""', b"0", b"-0", b"-1.5e+3", b"1E5", b"true", b"false", b"null"),
    b'{"a":{"b":[1,-2.5e-3,true,false,null,"x",[],{}]},"c":""}',
    b'{"":"","a":[[],[[]]]}',
    b'"\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83d\\ude00"',
    '"é😀\u2028\x7f"'.encode(),
    *(b"1.7976931348623157e+308", b"-1.7976931348623157e308", b"1e-999", b"0.1e309"),
    *(b"9" * 300, b"[" * DEPTH_MAX + b"]" * DEPTH_MAX),
    b'{"a":"12345678901234567890\\"]}"}',
]


@both
@pytest.mark.parametrize("value", JSON)
def test_json_goes_in_as_it_is(packs: ModuleType, value: bytes) -> None:
    assert payload(packs, value) == value
    assert packs.compact_json(value, DEPTH_MAX) == value


@both
@pytest.mark.parametrize(
    ("value", "compact"),
    [
        (
            b' {"a" : [ 1 , "b c\\" " ,\t2.5 ] ,\r\n"d": null } \n',
            b'{"a":[1,"b c\\" ",2.5],"d":null}',
        ),
        (b" 1", b"1"),
        (b'" x "\n', b'" x "'),
        (b"[ ]", b"[]"),
        (b"{ }", b"{}"),
    ],
)
def test_white_space_between_tokens_is_left_out(
    packs: ModuleType, value: bytes, compact: bytes
) -> None:
    assert payload(packs, value) == compact
    assert packs.compact_json(value, DEPTH_MAX) == compact


NEARLY_JSON = [
    *(b"", b" ", b"hello", b"NaN", b"Infinity", b"-Infinity", b"nul", b"truefalse", b"True"),
    *(b"01", b"-", b"-a", b"+1", b"1.", b".5", b"1e", b"1e+", b"1.5.5", b"0x1", b"1 1", b"1,"),
    *(b"[", b"]", b"[1,]", b"[,1]", b"[1 2]", b"[1", b"[1}", b"[[]", b"{]", b"[]]", b"[1]x"),
    *(b"{", b"}", b'{"a"}', b'{"a":}', b'{"a":1,}', b'{"a" 1}', b"{1:2}", b'{"a":1', b'{,"a":1}'),
    *(b'{"a":1 "b":2}', b'{"a"::1}', b'{"a":1}}', b'{"a":1,"b"}', b"{[]:1}"),
    *(b'"', b'"a', b'"a\\"', b'"\\x"', b'"\\u12"', b'"\\u12g4"', b'"\x00"', b'"a\nb"', b'"\\'),
    *(b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\u0041"', b"1\x00", b"\xef\xbb\xbf1", b"/**/1"),
    *(b"1e309", b"-1e309", b"1e999999999999", b"1.8e308", b"9" * 309, b"1" * 301),
    b"0." + b"1" * 300,
    b"[" * (DEPTH_MAX + 1) + b"]" * (DEPTH_MAX + 1),
    b"[" * 200_000,
    b'{"a":' * 200_000,
]


@both
@pytest.mark.parametrize("value", NEARLY_JSON, ids=lambda value: repr(value[:20]))
def test_text_that_is_not_quite_json_is_a_string(packs: ModuleType, value: bytes) -> None:
    assert json.loads(payload(packs, value)) == value.decode()
    assert packs.compact_json(value, DEPTH_MAX) is None


@both
@pytest.mark.parametrize(
    "value",
    [b"\xff", b'"\xff"', b'{"a":"\xc3"}', b'"\xed\xa0\x80"', b"\xc0\x80", b"[1]\x80", b"\xf5aaa"],
)
def test_what_is_not_utf_8_is_base64(packs: ModuleType, value: bytes) -> None:
    assert json.loads(payload(packs, value)) == {"base64": b64encode(value).decode()}
    assert packs.compact_json(value, DEPTH_MAX) is None


@both
def test_messages_of_all_kinds_make_one_list(packs: ModuleType) -> None:
    content = pack(packs, b'{"a": 1}', b"x\n\x01", b"\xff\x00", b"", b"[2]")

    assert content == (
        b'[["t",{"a":1}],["t","x\\n\\u0001"],["t",{"base64":"/wA="}],["t",""],["t",[2]]]'
    )


@both
def test_a_batch_of_nothing_is_an_empty_list(packs: ModuleType) -> None:
    assert pack(packs) == b"[]"


@both
def test_any_buffer_and_any_spans_of_it_will_do(packs: ModuleType) -> None:
    spans = array("i", [3, 5, 0, 1])
    for buffer in (b"1..23", bytearray(b"1..23"), memoryview(b"1..23")):
        assert packs.encode_pack(b"[", buffer, spans, DEPTH_MAX) == b"[[23],[1]]"


def test_spans_outside_their_buffer_are_refused() -> None:
    for bad in ([0, 4], [-1, 2], [2, 1]):
        with pytest.raises(IndexError):
            _packs.encode_pack(b"[", b"abc", array("i", bad), DEPTH_MAX)


@both
def test_a_depth_is_never_negative(packs: ModuleType) -> None:
    with pytest.raises(ValueError, match="depth"):
        packs.compact_json(b"1", -1)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
# Pieces that are often right beside each other, and sometimes just wrong.
json_like = st.lists(
    st.sampled_from(
        ["{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "1", "0", "-", ".", "e", "+", "9" * 40]
        + ["true", "null", "NaN", '"a"', '"a":', '\\"', "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "é"]
    ),
    max_size=12,
).map("".join)


@given(json_values, st.sampled_from([None, 1]), st.booleans())
def test_what_an_encoder_writes_keeps_its_meaning(
    value: Any, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    for packs in (_packs, packs_py):
        compact = packs.compact_json(text, 64)
        assert compact is not None
        assert json.loads(compact) == value
        assert indent is not None or len(compact) <= len(text)


@given(st.lists(json_like.map(str.encode) | st.binary(max_size=20), max_size=4))
def test_no_values_break_their_pack(values: list[bytes]) -> None:
    content = pack(_packs, *values)

    assert pack(packs_py, *values) == content
    messages = json.loads(content.decode())
    assert msgspec.json.decode(content) == messages
    assert [topic for topic, _ in messages] == ["t"] * len(values)
    for value, (_, data) in zip(values, messages, strict=True):
        assert data == meaning(value)


def meaning(value: bytes) -> Any:
    """What a payload must say, by the standard library's parser."""

    def refuse(_: str) -> None:
        raise ValueError

    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}
    try:
        data = json.loads(text, parse_constant=refuse)
        # Lone surrogates and infinite numbers are what Python takes and others do not.
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return text if packs_py._depth(packs_py._STRING.sub(b"", value)) > DEPTH_MAX else data
