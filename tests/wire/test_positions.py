"""Positions and the lines of subscribe requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.config import Limits
from polybus.errors import PeerError
from polybus.wire.positions import (
    Earliest,
    Latest,
    Position,
    Since,
    Start,
    SubscribeLine,
    parse_lines,
    parse_start,
)

LIMITS = Limits(topics_per_request_max=3)
NEW_YEAR_US = 1_767_225_600_000_000


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", Earliest()),
        ("latest", Latest()),
        ("0:0", Position(0, 0)),
        ("3:12345", Position(3, 12345)),
        ("1:9223372036854775807", Position(1, (1 << 63) - 1)),
        ("2026-01-01", Since(NEW_YEAR_US)),
        ("2026-01-01T00:00:00", Since(NEW_YEAR_US)),
        ("2026-01-01T00:00:00Z", Since(NEW_YEAR_US)),
        ("2026-01-01T01:00:00+01:00", Since(NEW_YEAR_US)),
        ("2026-01-01T00:00:00.000001Z", Since(NEW_YEAR_US + 1)),
        ("2026-01-01 00:00:00.5", Since(NEW_YEAR_US + 500_000)),
        ("1969-12-31T23:59:59Z", Since(-1_000_000)),
        ("0001-01-01T00:00:00+14:00", Since(-62_135_647_200_000_000)),
    ],
)
def test_every_way_to_say_where_to_begin_is_understood(text: str, start: Start) -> None:
    assert parse_start(text) == start


@pytest.mark.parametrize(
    "text",
    ["", "Earliest", "now", "5", "-1:0", "0:-1", "1:9223372036854775808", "1:2:3", "1:", ":1"]
    + ["2026-13-01", "2026-01-01T25:00", "1:²", "x" * 10_000],
)
def test_any_other_text_is_refused_and_the_connection_stays(text: str) -> None:
    with pytest.raises(PeerError) as caught:
        parse_start(text)
    assert (caught.value.code, caught.value.final) == ("position.invalid", False)
    assert len(caught.value.text) < 120


@given(st.text(max_size=40))
def test_no_text_gives_anything_but_a_start_or_a_peer_error(text: str) -> None:
    try:
        assert isinstance(parse_start(text), Start)
    except PeerError as error:
        assert error.code == "position.invalid"


@pytest.mark.parametrize(
    ("line", "topic", "start", "tell"),
    [
        ("news", "news", "latest", False),
        ("news from=earliest", "news", "earliest", False),
        ("news from=1:5 tell=position", "news", "1:5", True),
        ("news tell=position from=1:5", "news", "1:5", True),
        ("news tell=position", "news", "latest", True),
        ("hot news from=latest", "hot news", "latest", False),
        ("a from=b from=earliest", "a from=b", "earliest", False),
        ("news from=2026-01-01 10:00:00", "news", "2026-01-01 10:00:00", False),
        ("*", "*", "latest", False),
        ("news from=", "news", "", False),
    ],
)
def test_a_line_is_a_topic_with_options(line: str, topic: str, start: str, tell: bool) -> None:
    assert parse_lines(line.encode(), LIMITS) == [SubscribeLine(topic, start, tell)]


def test_lines_may_end_in_any_newline_and_empty_ones_count_for_nothing() -> None:
    assert parse_lines(b"\na\r\n\r\nb\n", LIMITS) == [SubscribeLine("a"), SubscribeLine("b")]
    assert parse_lines(b" \n", LIMITS) == []
    assert parse_lines(memoryview(b"a"), LIMITS) == [SubscribeLine("a")]


def test_one_line_over_the_limit_is_refused() -> None:
    assert len(parse_lines(b"a\nb\nc\n", LIMITS)) == 3
    with pytest.raises(PeerError) as caught:
        parse_lines(b"a\nb\nc\nd", LIMITS)
    assert (caught.value.code, caught.value.final) == ("request.too-many-topics", False)


def test_lines_that_are_not_text_are_refused() -> None:
    with pytest.raises(PeerError) as caught:
        parse_lines(b"\xff", LIMITS)
    assert (caught.value.code, caught.value.final) == ("request.not-text", False)


@given(st.text(st.characters(categories=["L", "N", "Zs"]), min_size=1), st.booleans())
def test_a_written_line_reads_back(topic: str, tell: bool) -> None:
    line = SubscribeLine(topic.strip() or "x", str(Position(1, 2)), tell)
    assert parse_lines(str(line).encode(), LIMITS) == [line]
