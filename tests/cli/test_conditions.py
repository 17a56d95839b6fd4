"""Conditions of `polybus tail --where`, and the forms in which it prints."""

from __future__ import annotations

import pytest

from polybus.cli.tail.conditions import condition
from polybus.cli.tail.formats import coloured, line_of
from polybus.client import Message
from polybus.errors import UsageError

ORDER = Message(
    topic="orders",
    value=b'{"price": 12.5, "order": {"id": 7, "lines": [{"sku": "bolt"}]}, "paid": true}',
    headers={"kind": b"test"},
)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("price > 10", True),
        ("price>=12.5", True),
        ("price < 9", False),
        ("price = 12.5", True),
        ("order.id = 7", True),
        ("$.order.lines[0].sku = bolt", True),
        ('order.lines[0].sku = "bolt"', True),
        ("order.lines[3].sku = bolt", False),
        ("paid = true", True),
        ("paid != true", False),
        ("missing != 1", True),
        ("missing > 1", False),
        ("header.kind = test", True),
        ("topic ~ ^ord", True),
        ("text ~ sku.*bolt", True),
        ("price ~ 9", False),
    ],
)
def test_a_condition_fits_a_message_or_does_not(text: str, fits: bool) -> None:
    assert condition(text)(ORDER) is fits


@pytest.mark.parametrize("text", ["", "price", "price 10", "text ~ ("])
def test_an_invalid_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="where.invalid"):
        condition(text)


def test_a_message_that_is_no_json_has_no_fields() -> None:
    assert not condition("price > 1")(Message(topic="t", value=b"\xff"))


def test_json_is_coloured_and_text_is_not() -> None:
    assert "\x1b[34m" in coloured('{"a": 1}', b'{"a": 1}')
    assert coloured("hello 1", b"hello 1") == "hello 1"


def test_no_form_lets_a_message_steer_the_terminal() -> None:
    evil = Message(topic="t", value=b'{"a": "\x1b[2J"}', headers={"\x1b": b"\x1b"})
    for form in ("text", "hex", "pretty", "json"):
        line = line_of(form, with_topic=True, with_headers=True)(evil)
        text = line.decode() if isinstance(line, bytes) else line
        assert "\x1b[2J" not in text
