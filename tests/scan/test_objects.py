"""Where a JSON object ends: the compiled scanner and its twin keep one contract."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import compiled

from polybus.scan import goms_py
from polybus.scan.goms_py import BAD, DEEP, END, MORE, RESTART

_objects = compiled("goms")
both = pytest.mark.parametrize("objects", [_objects, goms_py], ids=["compiled", "pure"])


def whole(objects: ModuleType, text: bytes, depth_max: int = 8) -> tuple[int, int]:
    verdict: tuple[int, int] = objects.ObjectScanner(depth_max).scan(text, 0, len(text))
    return verdict


def by_byte(objects: ModuleType, text: bytes, depth_max: int = 8) -> tuple[int, int]:
    """The same with every byte on its own."""
    scanner = objects.ObjectScanner(depth_max)
    for at in range(len(text)):
        stop, verdict = scanner.scan(text[at : at + 1], 0, 1)
        if verdict != MORE:
            return at + stop, verdict
    return len(text), MORE


GOOD = [
    b"{}",
    b'{ "a" : 1 }',
    b'{"a":{"b":[1,-2.5e+3,true,false,null,"x",[],{}]},"c":""}',
    b'{"a":"\\"}{\\\\","b":"]["}',
    '{"é":"😀"}'.encode(),
    b'{\r\n\t"a": [\n1,\n2\n]\n}',
    b'{"a":[[[[[[[]]]]]]]}',
]


@both
@pytest.mark.parametrize("text", GOOD)
def test_an_object_ends_where_its_brace_closes(objects: ModuleType, text: bytes) -> None:
    for rest in (b"", b"\n", b"{}", b"garbage"):
        assert whole(objects, text + rest) == (len(text), END)
        assert by_byte(objects, text + rest) == (len(text), END)


@both
@pytest.mark.parametrize("text", GOOD)
def test_every_part_of_an_object_needs_more(objects: ModuleType, text: bytes) -> None:
    for cut in range(len(text)):
        assert whole(objects, text[:cut]) == (cut, MORE)


BROKEN = [
    (b"[]", 0),
    (b'"x"', 0),
    (b" {}", 0),
    (b"\xff", 0),
    (b"{1:2}", 1),
    (b"{a:2}", 1),
    (b'{"a"}', 4),
    (b'{"a",', 4),
    (b'{"a":}', 5),
    (b'{"a":,', 5),
    (b'{"a":1]', 6),
    (b'{"a":[1}', 7),
    (b'{"a":1,}', 7),
    (b'{"a":[1,]}', 8),
    (b'{"a":1 2}', 7),
    (b'{"a":"x" "y"}', 9),
    (b'{"a":"x\ny"}', 7),
    (b'{"a":"x\\\ny"}', 8),
    (b'{"a":"x"\n {', 10),
    (b'{"a":::', 5),
    (b"{]", 1),
    (b"{,", 1),
    (b"{{", 1),
    (b'{"a":\xff', 5),
]


@both
@pytest.mark.parametrize(("text", "at"), BROKEN)
def test_a_broken_object_is_told_at_its_first_bad_byte(
    objects: ModuleType, text: bytes, at: int
) -> None:
    assert whole(objects, text) == (at, BAD)
    assert by_byte(objects, text) == (at, BAD)


@both
def test_a_line_that_begins_anew_is_where_to_restart(objects: ModuleType) -> None:
    cut_off = b'{"a":"x"\n'
    assert whole(objects, cut_off + b'{"b":1}') == (len(cut_off), RESTART)
    assert by_byte(objects, cut_off + b'{"b":1}') == (len(cut_off), RESTART)


@both
@pytest.mark.parametrize(
    ("rest", "skipped"),
    [
        (b'[{"]\\"}":1}]]]]]]]]]}{}', 21),
        (b"[[[[[[\n{}", 7),
        (b'["\n]', 3),
        (b'["\\\n]', 4),
    ],
)
def test_what_is_too_deep_is_skipped_to_its_end_or_the_lines(
    objects: ModuleType, rest: bytes, skipped: int
) -> None:
    deep = b'{"a":[[[[[[[['
    for scan in (whole, by_byte):
        assert scan(objects, deep + rest) == (len(deep), DEEP)
    scanner = objects.ObjectScanner(8)
    scanner.scan(deep, 0, len(deep))
    for at in range(skipped - 1):
        assert scanner.scan(rest, at, at + 1) == (at + 1, MORE)
    assert scanner.scan(rest, skipped - 1, len(rest)) == (skipped, END)


@both
def test_a_scanner_can_be_used_again(objects: ModuleType) -> None:
    scanner = objects.ObjectScanner(2)
    for text in (b'{"a":"', b'{"a":[[', b'{"a":[', b"{]"):
        scanner.scan(text, 0, len(text))
        scanner.reset()
        assert scanner.scan(b"{}", 0, 2) == (2, END)


@both
def test_an_object_is_at_least_one_level(objects: ModuleType) -> None:
    with pytest.raises(ValueError, match="depth_max"):
        objects.ObjectScanner(0)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=3), st.sampled_from([None, 2]))
def test_any_object_an_encoder_writes_is_found(
    value: dict[str, object], indent: int | None
) -> None:
    text = json.dumps(value, indent=indent).encode()
    for objects in (_objects, goms_py):
        assert whole(objects, text + b"{", depth_max=64) == (len(text), END)


@given(st.text(alphabet='{}[]",:\\ \n1a', max_size=30).map(str.encode))
def test_both_scanners_agree_on_anything(text: bytes) -> None:
    text = b"{" + text
    verdict = whole(_objects, text, depth_max=3)
    assert whole(goms_py, text, depth_max=3) == verdict
    assert by_byte(_objects, text, depth_max=3) == verdict
    assert by_byte(goms_py, text, depth_max=3) == verdict
