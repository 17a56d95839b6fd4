"""Declared columns are read as Spark reads them; what it would refuse is named."""

from __future__ import annotations

import pytest

from polybus.schema_ddl import COLUMNS_MAX, Column, ColumnType, columns_of

INT, STRING = ColumnType("int"), ColumnType("string")


def test_columns_have_names_and_types() -> None:
    text = "id INTEGER NOT NULL COMMENT 'x, y', `a b`: decimal(12, 2), l ARRAY<MAP<STRING, INT>>"
    assert columns_of(f"{text}, s STRUCT<x: INT, y: STRUCT<>>") == (
        Column("id", INT),
        Column("a b", ColumnType("decimal", ("12", "2"))),
        Column("l", ColumnType("array", inside=(ColumnType("map", inside=(STRING, INT)),))),
        Column(
            "s", ColumnType("struct", fields=(Column("x", INT), Column("y", ColumnType("struct"))))
        ),
    )


def test_a_timestamp_without_time_zone_has_the_type_that_spark_gives_it() -> None:
    assert columns_of("a TIMESTAMP WITHOUT TIME ZONE")[0].type == ColumnType("timestamp_ntz")
    assert columns_of("a TIMESTAMP WITH LOCAL TIME ZONE")[0].type == ColumnType("timestamp")


def test_the_fields_of_a_struct_are_the_columns() -> None:
    assert columns_of("STRUCT<a: INT>") == columns_of("a INT")


@pytest.mark.parametrize(
    "schema",
    [
        "a interval day to second, b interval",
        "a void, b time(3), c timestamp_ltz, d timestamp without time zone",
        "a string collate UNICODE, b varchar(3), c character(3)",
        'a int -- x\n, b /* y */ byte comment "x"',
        "a TIMESTAMP(6), b TIMESTAMP_NTZ(6), c TIMESTAMP_LTZ(6)",
        "a STRING COLLATE system.builtin.UNICODE, b INT COMMENT r'x\\', c INT COMMENT 'x' 'y'",
        "a INT /* /* */ */, `\xe9` INT, 1a INT, b TIMESTAMP WITH LOCAL TIME ZONE",
    ],
)
def test_what_spark_accepts_is_accepted(schema: str) -> None:
    assert columns_of(schema)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("id BIGNT", r"id: there is no type BIGNT; did you mean bigint .*types: array, bigint,"),
        ("a STRUCT<b: ARRAY<binry>>", "a.b: there is no type binry; did you mean binary"),
        ("a INT, b json", "b: there is no type json .*variant"),
        ("id BIGINT name STRING", "id: , is missing: 'name' follows"),
        ("id ARRAY<", "id: its type is missing"),
        ("id ARRAY<INT", "id: > is missing: the schema ends"),
        ("id MAP<INT>", "id: , is missing: '>' follows"),
        ("id", "id: its type is missing"),
        ("id INT,", "a column is missing"),
        ("id INT; x INT", "id: , is missing: ';' follows"),
        ("id INT NOT", "id: NULL is missing"),
        ("id INT COMMENT x", "id: the text of COMMENT is missing"),
        ("id INT(3)", "id: INT must have no numbers"),
        ("id VARCHAR", "id: VARCHAR must have 1 numbers"),
        ("id DECIMAL(10,2", r"id: \) is missing"),
        ("a DECIMAL(50,2)", r"a: DECIMAL: the number 50 must be 0 to 38"),
        ("a DECIMAL(3,5)", "a: DECIMAL: more digits follow the point than there are"),
        ("a TIMESTAMP(3)", "a: TIMESTAMP: the number 3 must be 6"),
        ("a VARCHAR(x)", "a: VARCHAR: 'x' is not a number"),
        ("\xe9 INT", "write the name \xe9 in backquotes"),
        ("1e5 INT", "write the name 1e5 in backquotes"),
        ("a TIMESTAMP WITH TIME ZONE", "a: after TIMESTAMP, write WITHOUT TIME ZONE or WITH LOCAL"),
        ("a INTERVAL DAY TO", "a: no smaller unit follows DAY TO"),
        ("a STRING COLLATE", "a: the name after COLLATE is missing"),
        ("a INT /* x", "a: , is missing: '/\\*' follows"),
        ("a " + "ARRAY<" * 10_000, "its types are nested too deep"),
        ("STRUCT<a: INT> x", "'x' follows the last column"),
        ("", "a column is missing"),
        ("`a'b` INT", "contains a quote"),
        (", ".join(f"a{one} INT" for one in range(COLUMNS_MAX + 1)), "more than 200 columns"),
    ],
)
def test_what_is_no_schema_is_named(schema: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        columns_of(schema)
