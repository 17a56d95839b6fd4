"""Paths into JSON in SQL, for DuckDB; tests/spark/test_docs_queries.py compares it with Spark."""

from __future__ import annotations

from typing import Any

import duckdb
import pytest

from polybus.lake.sql.casts import CAST_MACROS
from polybus.lake.sql.json_paths.dialects import MACROS, shown_names
from polybus.lake.sql.json_paths.rewriting import for_duckdb, for_spark


def asked(sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        connection.execute(CAST_MACROS + MACROS)
        return [tuple(row) for row in connection.execute(for_duckdb(sql)).fetchall()]


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
        ("payload->>$$name$$", "x"),
        ("payload->$k$order$k$->>$$$.id$$", "3"),
        ("payload->>E'name'", "x"),
        ("$$a:b$$ || payload:name", "a:bx"),
        ("json_extract_string(max(payload), '$.name')", "x"),
        ("json_extract([4, 5], 1)", "5"),
        ("json_extract('[1]'::JSON, '')", "[1]"),
        ("payload->>'$.order.id'", "3"),
        ("payload->'order'->>'id'", "3"),
        ("payload:order->>'id'", "3"),
        ("payload->>'/order/id'", "3"),
        ("payload::VARCHAR->>'name' = 'x'", True),
        ("payload:order:id", "3"),
        ("payload->'name' = 'x'", True),
        ("payload:name = 'x' AND payload:order.id > 2.5", True),
        ("payload:order.id NOT BETWEEN 1 AND payload:`$type` - 5", True),
        ("payload:name IS NOT DISTINCT FROM 'x'", True),
        ("'x' IN (payload:name, payload:missing)", True),
        ("CASE WHEN payload:missing THEN 1 ELSE payload:order.id END", 3.0),
        ("CASE n WHEN payload:`$type` THEN 'no' ELSE payload:name END", "x"),
        ("[payload:order.id, 2]", [3.0, 2.0]),
        ("[payload:name, payload:order.id]", ['"x"', "3"]),
        ("{'a': payload:order.id, b:payload:name}", {"a": "3", "b": '"x"'}),
        ("coalesce(payload:missing, payload:name, 'none')", "x"),
        ("upper(payload:name)", "X"),
        ("typeof(payload:name)", "JSON"),
        ("payload:name = (SELECT payload:name)", True),
        ("(payload:order.id) * 2", 6.0),
        ("max(payload:order.id)", "3"),
        ("('{\"a\": 4}'::BLOB):a", "4"),
        ("('no json'):a", None),
        # What DuckDB means by a colon stays.
        ("alias: 5", 5),
        ("n:count(*)", 1),
        ("[1, 2, 3][n:n+1]", [1, 2]),
        ("{'a':n}", {"a": 1}),
        ("'a:b'", "a:b"),
        ("list_transform([1], lambda x:x + 1)", [2]),
    ],
)
def test_a_path_into_json_is_the_same_in_duckdb(expression: str, result: object) -> None:
    from_text = f"(SELECT {VALUE} AS payload, 1 AS n) t"
    sql = f"SELECT {expression} FROM {from_text}"
    assert asked(sql) == [(result,)]


def test_a_column_of_a_path_has_its_path_as_its_name() -> None:
    called = [
        """json_part(payload, '$."order"."id"')""",
        """CAST(json_part_text(s.payload, '$."items"[0]."n"') AS DECIMAL(5,2))""",
        """json_part("json"("value"), '$."id"')""",
        "count(*)",
    ]
    shown = ["payload:order.id", "s.payload:items[0].n", "json(value):id", "count(*)"]
    assert shown_names(called) == shown
    twice = ["""json_part(p, '$."id"')""", """CAST(json_part_text(p, '$."id"') AS INT)"""]
    assert shown_names([*twice, "p:id_2", "n", "n"]) == ["p:id", "p:id_1", "p:id_2", "n", "n"]


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("SELECT 'it\\'s a:b', \"c:d\" -- e:f", None),
        ("SELECT p:a::int, p:b, lower(p:c) FROM t WHERE p:d IS NULL", None),
        ("SELECT [1, {'a': n, b:2}] FROM t", "SELECT array(1, named_struct('a', n, 'b',2)) FROM t"),
        ("SELECT a[0], m['k'], p:x[0] FROM t", None),
        ("SELECT p->'a'->>0 FROM t", """SELECT variant_get(p, '$["a"][0]', 'string') FROM t"""),
        ("SELECT p->'$' FROM t", "SELECT p FROM t"),
        ("SELECT p->>'it''s' FROM t", "SELECT p:['it's']::string FROM t"),
    ],
)
def test_spark_gets_what_it_lacks_and_nothing_else_changes(sql: str, text: str | None) -> None:
    assert for_spark(sql) == (sql if text is None else text)
