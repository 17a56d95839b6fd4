"""Declared columns of a topic as DuckDB has them."""

from __future__ import annotations

import json

import duckdb
import pytest

from polybus.errors import UsageError
from polybus.lake.typed import MESSAGE_COLUMNS, typed_select


def types_of(schema: str) -> dict[str, str]:
    """The columns of the view, by DuckDB."""
    about = ", ".join(f'1 AS "{name}"' for name in MESSAGE_COLUMNS)
    source = f"(SELECT '{{}}'::JSON AS payload, {about})"
    sql = f"DESCRIBE SELECT {typed_select('t', schema)} FROM {source}"
    return {row[0]: row[1] for row in duckdb.sql(sql).fetchall()[:-1]}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ("id BIGINT NOT NULL, name STRING", {"id": "BIGINT", "name": "VARCHAR"}),
        (
            "`a b` decimal(12, 2) COMMENT 'x, y', c DEC",
            {"a b": "DECIMAL(12,2)", "c": "DECIMAL(10,0)"},
        ),
        ("t ARRAY<STRUCT<x: INT, y: STRING NOT NULL>>", {"t": "STRUCT(x INTEGER, y VARCHAR)[]"}),
        ("m MAP<STRING, ARRAY<DOUBLE>>, v VARIANT", {"m": "MAP(VARCHAR, DOUBLE[])", "v": "JSON"}),
        ("a: timestamp, b varchar(3)", {"a": "TIMESTAMP WITH TIME ZONE", "b": "VARCHAR"}),
    ],
)
def test_types_have_the_names_of_duckdb(schema: str, types: dict[str, str]) -> None:
    assert types_of(schema) == types


@pytest.mark.parametrize("schema", ["id NOSUCH", "id BIGINT name STRING", "id ARRAY<", ""])
def test_what_is_no_schema_is_named_with_its_topic(schema: str) -> None:
    with pytest.raises(UsageError, match=r"pipeline\.schema: topics: t: schema"):
        typed_select("t", schema)


def test_values_that_do_not_fit_are_null() -> None:
    value = {"n": "x", "l": [1, 2], "d": "2026-01-31", "s": {"a": 1}, "b": True}
    schema = "n INT, l ARRAY<INT>, d DATE, s STRUCT<a: INT>, b BOOLEAN, none STRING"
    about = ", ".join(f'1 AS "{name}"' for name in MESSAGE_COLUMNS)
    columns = typed_select("t", schema)
    sql = f"SELECT {columns} FROM (SELECT ?::JSON AS payload, {about})"
    found = duckdb.connect().execute(sql, [json.dumps(value)]).fetchone()
    assert found is not None
    assert [*found[:2], str(found[2]), *found[3:6]] == [
        *(None, [1, 2], "2026-01-31", {"a": 1}, True, None)
    ]
