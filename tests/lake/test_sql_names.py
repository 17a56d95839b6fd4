"""What a statement names, before anything of it is bound."""

from __future__ import annotations

import json

import duckdb
import pytest

from polybus.lake.sql.names import Named, named_in, with_offset_quoted, without_explain


def named(sql: str) -> Named:
    found = duckdb.connect().execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    return named_in(json.loads(found[0][0]))


@pytest.mark.parametrize(
    ("sql", "quoted"),
    [
        ("SELECT offset FROM t", 'SELECT "offset" FROM t'),
        ("SELECT max(offset), Offset+1 FROM t", 'SELECT max("offset"), "Offset"+1 FROM t'),
        (
            "SELECT 1 ORDER BY offset LIMIT 3 OFFSET 5",
            'SELECT 1 ORDER BY "offset" LIMIT 3 OFFSET 5',
        ),
        ("SELECT 1 LIMIT 3 offset (1 + 1)", "SELECT 1 LIMIT 3 offset (1 + 1)"),
        ("SELECT offset::text FROM t", 'SELECT "offset"::text FROM t'),
        ("SELECT $$it's an offset$$, $a$ offset $$ $a$ FROM t", None),
        ("SELECT t.offset FROM t", "SELECT t.offset FROM t"),
        ("""SELECT 'offset', "offset", `offset` -- offset""", None),
        ("SELECT 'it''s offset' /* offset */, offsets FROM t", None),
        ("WHERE offset\n  BETWEEN 1 AND 2", 'WHERE "offset"\n  BETWEEN 1 AND 2'),
    ],
)
def test_offset_is_a_column_where_no_number_follows(sql: str, quoted: str | None) -> None:
    assert with_offset_quoted(sql) == (sql if quoted is None else quoted)


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT * FROM orders", [("orders",)]),
        ('SELECT * FROM "orders.eu-1" JOIN `b c` USING (key)', [("b c",), ("orders.eu-1",)]),
        ("SELECT * FROM orders.eu", [("orders", "eu")]),
        ("WITH o AS (SELECT * FROM orders) SELECT * FROM o", [("orders",)]),
        ("SELECT (SELECT max(key) FROM b) FROM a WHERE x IN (SELECT y FROM c)", ["a", "b", "c"]),
        ("DESCRIBE orders", [("orders",)]),
        ("SELECT 1", []),
    ],
)
def test_every_table_is_found_and_no_name_that_the_statement_makes(
    sql: str, tables: list[str | tuple[str, ...]]
) -> None:
    expected = [(one,) if isinstance(one, str) else one for one in tables]
    assert sorted(named(sql).tables) == sorted(expected)


@pytest.mark.parametrize(
    ("sql", "everything"),
    [
        ("SELECT count(*) FROM orders WHERE offset > 3", False),
        ("SELECT * FROM orders", True),
        ("SELECT o.* FROM orders o", True),
        ("SELECT o FROM orders o", True),
        ("SELECT count(*) FROM a NATURAL JOIN b", True),
    ],
)
def test_columns_that_are_not_named_are_needed_only_by_stars_and_rows(
    sql: str, everything: bool
) -> None:
    assert named(with_offset_quoted(sql)).everything is everything


def test_columns_are_among_the_words() -> None:
    found = named("SELECT a.key FROM a JOIN b USING (sender) WHERE VALUE = 'x' ORDER BY protocol")
    assert {"key", "sender", "value", "protocol"} <= found.words
    assert "headers" not in found.words


def test_an_explain_is_about_its_statement() -> None:
    assert without_explain(" explain ANALYZE SELECT 1") == "SELECT 1"
    assert without_explain("SELECT 1 -- explain x") == "SELECT 1 -- explain x"
