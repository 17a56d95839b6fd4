"""SQL files as text: statements with their lines, and marked streams."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from polybus.spark.pipelines.declared import sql_files
from polybus.spark.pipelines.declared.readers import relation_of, with_stream_names
from polybus.spark.pipelines.declared.registry import DeclarationRegistry, PipelineError
from polybus.spark.pipelines.declared.sql_files import SqlFile, statements


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


def test_a_parser_that_takes_too_long_is_an_error_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sql_files, "PARSER_TIMEOUT_S", 0.001)
    connect = object()
    file = SqlFile(connect, Path("flows.sql"), cast(DeclarationRegistry, None))
    with pytest.raises(PipelineError, match="did not end within") as caught:
        file.read("CREATE MATERIALIZED VIEW a AS SELECT 1")
    assert caught.value.code == "pipeline.file"
