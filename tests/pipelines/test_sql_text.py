"""SQL files as text: statements with their lines, and marked streams."""

from __future__ import annotations

import pytest

from polybus.spark.pipelines.declared.loader import statements
from polybus.spark.pipelines.declared.readers import relation_of, with_stream_names


def test_statements_end_at_semicolons_outside_of_strings_and_comments() -> None:
    text = "-- a; b\nSELECT ';', \"x;y\", `c;d` -- e;\n;\n\n/* f;\n */ SELECT 2 / 3 - 1;\n;\n"
    assert list(statements(text)) == [
        ("SELECT ';', \"x;y\", `c;d` -- e;", 2),
        ("SELECT 2 / 3 - 1", 6),
    ]


def test_a_file_of_comments_has_no_statements() -> None:
    assert list(statements("-- nothing\n/* at all */\n")) == []


@pytest.mark.parametrize(
    "given, renamed",
    [
        ("FROM STREAM(orders)", "FROM STREAM(`orders@stream`)"),
        ("FROM stream ( `a.b` ) x", "FROM STREAM(`a.b@stream`) x"),
        ("FROM STREAM orders o", "FROM STREAM(`orders@stream`) o"),
        ("SELECT 'STREAM(a)' -- STREAM(b)", "SELECT 'STREAM(a)' -- STREAM(b)"),
        ("SELECT upstream(a), streams FROM t", "SELECT upstream(a), streams FROM t"),
    ],
)
def test_names_that_are_read_as_streams_are_marked(given: str, renamed: str) -> None:
    assert with_stream_names(given) == renamed


def test_a_quoted_relation_is_read_back() -> None:
    assert relation_of("`a`.`b`") == "a.b"
    assert relation_of("`a.b@stream`") == "a.b@stream"
