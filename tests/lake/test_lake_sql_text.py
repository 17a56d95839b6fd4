"""SQL of one engine as text for the other."""

from __future__ import annotations

from datetime import UTC, datetime

import duckdb
import pytest

from polybus.errors import UsageError
from polybus.lake.sql_text import version_in, with_paths_called, with_versions_named


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("FROM silver VERSION AS OF 3", "FROM `silver@v3` AS `silver`"),
        ("FROM silver version as of 3 WHERE x", "FROM `silver@v3` AS `silver` WHERE x"),
        ("FROM silver VERSION AS OF 3 s JOIN t", "FROM `silver@v3` s JOIN t"),
        ("FROM a.b VERSION AS OF 3 AS s", "FROM `a.b@v3` AS s"),
        ("FROM \"a b\" TIMESTAMP AS OF '2026-01-31'", "FROM `a b@t2026-01-31` AS `a b`"),
        (
            "FROM t TIMESTAMP AS OF TIMESTAMP '2026-01-31 12:00'",
            "FROM `t@t2026-01-31 12:00` AS `t`",
        ),
        ("SELECT 'x VERSION AS OF 3' -- x VERSION AS OF 3", None),
        ("SELECT version AS of3 FROM t", None),
    ],
)
def test_a_version_of_a_table_has_a_name(sql: str, named: str | None) -> None:
    assert with_versions_named(sql, "`") == (sql if named is None else named)


def test_a_name_tells_the_version() -> None:
    assert version_in("silver") == ("silver", None)
    assert version_in("a.b@v12") == ("a.b", 12)
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert version_in("a@t2026-01-31T12:00:00Z") == ("a", noon)
    assert version_in("a@t2026-01-31 12:00") == ("a", noon)
    with pytest.raises(UsageError, match=r"sql\.invalid: TIMESTAMP AS OF 'yesterday'"):
        version_in("a@tyesterday")


VALUE = """'{"name": "x", "order": {"id": 3, "a b": [5, {"c": "it''s"}]}, "$type": 7}'::JSON"""


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("payload:name", '"x"'),
        ("payload:name::string", "x"),
        ("payload:order.id::int + 1", 4),
        ("t.payload:order.id = 3", True),
        ("payload:order.`a b`[1].c::string", "it's"),
        ("payload:order['a b'][0]", "5"),
        ("payload:['order']['id']::bigint", 3),
        ('"payload":order."id"', "3"),
        ("json('{\"n\": 2}'):n::int", 2),
        ("payload:`$type`::int", 7),
        ("payload:missing", None),
        ("payload:name::string || ':name'", "x:name"),
        ("payload->>'name'", "x"),
        ("payload->>'$type'", "7"),
        ("payload->>'$.order.id'", "3"),
        ("payload->'order'->>'id'", "3"),
        # What DuckDB means by a colon stays.
        ("alias: 5", 5),
        ("n:count(*)", 1),
        ("[1, 2, 3][n:n+1]", [1, 2]),
        ("{'a':n}", {"a": 1}),
        ("'a:b'", "a:b"),
    ],
)
def test_a_path_into_json_is_the_same_in_duckdb(expression: str, result: object) -> None:
    from_text = f"(SELECT {VALUE} AS payload, 1 AS n) t"
    sql = f"SELECT {expression} FROM {from_text}"
    assert duckdb.sql(with_paths_called(sql)).fetchall() == [(result,)]
