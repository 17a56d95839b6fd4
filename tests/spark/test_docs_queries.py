"""Every query in the documents runs on DuckDB and on Spark, with the same result."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from docs_kit import ROOT, run_by
from standard_kit import Pipe, Topics
from topics_kit import publish

from polybus.cli.sql import sql as sql_verb
from polybus.config import DeclaredTopic
from polybus.errors import UsageError
from polybus.lake import duck
from polybus.lake.compact import compact
from polybus.lake.described import HISTORY
from polybus.lake.table import open_table, table_names
from polybus.spark.views import collect

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ORDERS = DeclaredTopic(
    name="orders",
    schema="id BIGINT NOT NULL, name STRING, tags ARRAY<STRING>",
    expect={"small": "id < 9"},
)
# Only the command knows it, for all engines.
LISTED = "SHOW TABLES"
VALUES = [
    '{"id": 7, "name": "x y", "tags": ["a", "b"], "order": {"id": 1.50}, "price": 10, "ok": true}',
    '{"id": "8", "order": {"id": null}, "price": 9.5, "ok": false}',
    '{"id": 9, "name": null, "tags": [], "price": "n/a"}',
]


def queries() -> list[str]:
    """The statements after `polybus sql` in code of the documents."""
    found = []
    for page in PAGES:
        for line in re.findall(r"^(?:\$ |    )?(?:\S*/)?(polybus sql .*)$", page.read_text(), re.M):
            words = shlex.split(line)
            found += [words[2]] if words[2][0] not in "[-" else []
    # The tables of the recipes are those of their own test.
    found = [query for query in found if "FROM recipes." not in query]
    return sorted(set(found) - {LISTED, "Usage:"})


@pytest.fixture(scope="module")
def data(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    for topic in ("orders", "orders.eu", "news", "chat"):
        publish(folder, topic, [value.encode() for value in VALUES])
    pipe, topics = Pipe(spark, folder, ORDERS), Topics()
    for batch in range(2):
        messages = [topics.message("orders", value) for value in VALUES]
        messages += [topics.message("chat", text) for text in ("hello", "{broken", "é")]
        pipe.run(batch, messages)
    return folder


def by_duckdb(data: Path, sql: str) -> list[tuple[Any, ...]]:
    with duck.Engine(data) as engine:
        _, batches = engine.stream(sql)
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def by_spark(spark: Any, data: Path, sql: str) -> list[tuple[Any, ...]]:
    found = collect(spark, sql, data, rows_max=1000)
    return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


@pytest.mark.parametrize("page", ["sql", "standard-pipeline"])
def test_every_line_of_a_page_is_a_query(page: str) -> None:
    for block in run_by("spark/test_docs_queries.py", f"docs/howto/{page}.md"):
        for line in block.text.splitlines():
            assert shlex.split(line)[2] in [*queries(), LISTED]


def test_a_list_of_the_tables_has_topics_and_lake_tables(data: Path) -> None:
    ended = CliRunner().invoke(sql_verb, [LISTED, "--data", str(data)])
    found = {"orders", "orders.eu", "silver", "quarantine", "silver_orders", "silver.orders"}
    assert found <= set(ended.stdout.split())


@pytest.mark.parametrize("sql", queries())
def test_a_query_of_the_documents_is_the_same_on_both_engines(
    spark: Any, data: Path, sql: str
) -> None:
    by_duck, by_its_rival = by_duckdb(data, sql), by_spark(spark, data, sql)
    if re.match(r"DESCRIBE (?!HISTORY|DETAIL)", sql):
        # The types have other names.
        by_duck, by_its_rival = ([row[:1] for row in rows] for rows in (by_duck, by_its_rival))
    assert by_duck == by_its_rival
    assert by_duck


EXPRESSIONS = (
    *("payload", "payload:name", "payload:name::string", "payload:order.id", "payload:`name`"),
    *(
        "payload:tags[0]",
        "payload:tags[0]::string",
        "payload:['order']['id']",
        "payload:id::bigint",
    ),
    *("payload->>'name'", "payload->'order'->>'id'", "payload -> 'tags' ->> 0", "payload->'tags'"),
    *("payload->>'$.order.id'", "payload->>'id' = '7'", "(s.payload->>'name') || '->>x'"),
    *("payload:order", "payload:nothing", "payload:order.id::double", "s.payload:id::int + 1"),
)


def test_paths_into_json_are_the_same_on_both_engines(spark: Any, data: Path) -> None:
    for expression in EXPRESSIONS:
        sql = f"SELECT {expression} AS x FROM silver s WHERE topic = 'orders' ORDER BY offset"
        assert by_duckdb(data, sql) == by_spark(spark, data, sql), expression


# Statements as a new user writes them, without a cast; {p} is the column with the JSON.
STATEMENTS = (
    "SELECT offset FROM {t} WHERE {p}:name = 'x y' ORDER BY offset",
    "SELECT offset FROM {t} WHERE {p}:id = 7 ORDER BY offset",
    "SELECT offset FROM {t} WHERE {p}->'name' = 'x y' ORDER BY offset",
    "SELECT offset FROM {t} WHERE {p}->>'name' LIKE 'x%' AND {p}:price > 9.9 ORDER BY offset",
    "SELECT offset FROM {t} WHERE {p}:id IN (7, 8) AND {p}:price NOT BETWEEN 0 AND 9 ORDER BY 1",
    "SELECT offset FROM {t} WHERE {p}:ok ORDER BY offset",
    "SELECT offset FROM {t} WHERE NOT {p}:ok OR {p}:tags[0] = 'a' ORDER BY offset",
    "SELECT {p}:name, count(*) AS n FROM {t} GROUP BY {p}:name ORDER BY {p}:name",
    "SELECT {p}:price AS price, count(*) AS n FROM {t} GROUP BY price ORDER BY price DESC",
    "SELECT {p}:price, count(*) AS n FROM {t} GROUP BY 1 ORDER BY 1",
    "SELECT {p}:price AS x, count(*) AS n FROM {t} GROUP BY ALL ORDER BY x",
    "SELECT {p}:name AS x, count(*) AS n FROM {t} GROUP BY {p}:name HAVING {p}:name = 'x y'",
    "SELECT DISTINCT {p}:price FROM {t} ORDER BY {p}:price DESC",
    "SELECT {p}:price AS price FROM {t} ORDER BY {p}:price, offset",
    "SELECT {p}:price AS price FROM {t} ORDER BY price DESC, offset LIMIT 4",
    "SELECT count(DISTINCT {p}:id) AS n, sum({p}:price) AS s, max({p}:price) AS m FROM {t}",
    "SELECT avg({p}:price) FILTER (WHERE {p}:ok) AS a, min({p}:price) AS m FROM {t}",
    "SELECT a.offset AS a FROM {t} a JOIN {t} b ON a.{p}:id = b.{p}:id ORDER BY 1",
    "SELECT s.offset AS a FROM {t} s JOIN silver.orders o ON s.{p}:id = o.id ORDER BY 1",
    "SELECT offset FROM {t} WHERE {p}:id IN (SELECT value:id FROM chat) ORDER BY offset",
    "SELECT CASE WHEN {p}:id = 7 THEN {p}:name ELSE 'none' END AS x FROM {t} ORDER BY offset",
    "SELECT CASE {p}:id WHEN 7 THEN 'seven' ELSE 'other' END AS x FROM {t} ORDER BY offset",
    "SELECT CASE WHEN {p}:ok THEN {p}:price ELSE 0 END AS x FROM {t} ORDER BY offset",
    "SELECT [{p}:id, 2] AS x FROM {t} ORDER BY offset",
    "SELECT {{'a': {p}:id, 'b': [{p}:name, 'z']}} AS x FROM {t} ORDER BY offset",
    "SELECT coalesce({p}:name, 'none') AS x, {p}:price * 2 AS y FROM {t} ORDER BY offset",
    "SELECT lower({p}:name) AS x, {p}:name || '!' AS y FROM {t} ORDER BY offset",
    "SELECT {p}:name AS x FROM {t} UNION SELECT {p}:price AS x FROM {t} ORDER BY x",
    "SELECT rank() OVER (PARTITION BY {p}:ok ORDER BY {p}:price) AS r FROM {t} ORDER BY offset",
    "SELECT {p}:order.id, {p}:id FROM {t} WHERE {p}:order.id IS NOT NULL ORDER BY offset",
    "SELECT o:id AS x FROM (SELECT {p}:order AS o, offset FROM {t}) ORDER BY offset",
)


@pytest.mark.parametrize(
    ("statements", "column", "table"),
    [
        (STATEMENTS, "payload", "(SELECT * FROM silver WHERE topic = 'orders')"),
        (STATEMENTS[::4], "value", "orders"),
    ],
)
def test_paths_without_a_type_are_the_same_on_both_engines_in_every_clause(
    spark: Any, data: Path, statements: tuple[str, ...], column: str, table: str
) -> None:
    """JSON of a lake table, and bytes of a topic."""
    for statement in statements:
        sql = statement.format(p=column, t=table)
        found = by_duckdb(data, sql)
        assert found and any(value is not None for row in found for value in row), sql
        assert by_spark(spark, data, sql) == found, sql


BYTES = (
    *("CAST(value AS string)", "value::string", "CAST(value AS string):id", "key::string"),
    *("json_extract(value, '$.id')", "json_extract_string(value, '$.name')"),
    *("json_extract_string(value, 'id') = '7'", "sum(json_extract(value, '$.price')) OVER ()"),
    "CASE WHEN offset = 0 THEN value END::string",
)


def test_bytes_as_text_are_the_same_on_both_engines(spark: Any, data: Path) -> None:
    for expression in BYTES:
        sql = f"SELECT {expression} AS x FROM orders ORDER BY offset"
        found = by_duckdb(data, sql)
        assert any(value is not None for row in found for value in row), sql
        assert by_spark(spark, data, sql) == found, sql
    payload = (
        "SELECT json_extract_string(payload, '$.name') AS x FROM silver ORDER BY topic, offset"
    )
    assert by_spark(spark, data, payload) == by_duckdb(data, payload)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT offset FROM silver WHERE payload = 'x'",
        "SELECT n FROM (SELECT payload:name AS n FROM silver) WHERE n = 'x'",
    ],
)
def test_json_that_cannot_be_compared_is_refused_with_what_to_write(
    spark: Any, data: Path, sql: str
) -> None:
    with pytest.raises(UsageError, match="give it one, as in payload:name::string"):
        by_duckdb(data, sql)
    with pytest.raises(UsageError, match="give it one, as in payload:name::string"):
        by_spark(spark, data, sql)


def test_a_list_in_json_becomes_rows(spark: Any, data: Path) -> None:
    sql = "SELECT {} AS tag FROM silver WHERE topic = 'orders' ORDER BY tag"
    found = by_duckdb(data, sql.format("unnest(payload:tags::varchar[])"))
    assert found == [("a",), ("a",), ("b",), ("b",)]
    assert by_spark(spark, data, sql.format("explode(payload:tags::array<string>)")) == found


def test_a_declared_topic_has_the_same_view_on_both_engines(spark: Any, data: Path) -> None:
    sql = "SELECT id, name, tags, _message.offset AS o FROM silver.orders ORDER BY o"
    found = by_duckdb(data, sql)
    assert found[:3] == [(7, "x y", ["a", "b"], 0), (8, None, None, 1), (9, None, [], 2)]
    assert by_spark(spark, data, sql) == found


def test_names_with_dots_are_the_same_on_both_engines(spark: Any, data: Path) -> None:
    """A topic and a table have one name, as in the docs of pipelines."""
    publish(data, "shop.orders", [b"x"] * 2)
    for name, n in {"shop.orders": 7, "shop.orders.quarantine": 8}.items():
        open_table(data, name).append(pa.table({"n": [n]}), writer="w", batch_id=0)
    for sql, expected in {
        "SELECT count(*) AS n FROM shop.orders": 2,
        "SELECT n FROM tables.shop.orders": 7,
        "SELECT n FROM tables.Shop.Orders AS t": 7,
        "SELECT n FROM `tables.shop.orders`": 7,
        "SELECT n FROM shop.orders.quarantine": 8,
        "SELECT a.n + b.n FROM tables.shop.orders.quarantine AS a JOIN tables.shop.orders AS b "
        "ON a.n > b.n": 15,
        "SELECT count(*) AS n FROM tables.silver WHERE topic = 'no.such.name'": 0,
    }.items():
        assert by_duckdb(data, sql) == [(expected,)], sql
        assert by_spark(spark, data, sql) == [(expected,)], sql


def test_older_versions_are_the_same_on_both_engines(spark: Any, data: Path) -> None:
    versions = open_table(data, "silver").folder
    times = [(versions / f"{number:020d}.json").stat().st_mtime for number in range(2)]
    between = datetime.fromtimestamp(sum(times) / 2, UTC).isoformat()
    ask = "SELECT count(*) AS n, max(silver.offset) AS o FROM silver"
    for sql, expected in {
        f"{ask} VERSION AS OF 0 WHERE topic = 'orders'": (3, 2),
        f"{ask} FOR VERSION AS OF 0 WHERE topic = 'orders'": (3, 2),
        f"{ask.replace('FROM ', 'FROM tables.')} VERSION AS OF 0 WHERE topic = 'orders'": (3, 2),
        f"{ask} VERSION AS OF 1 WHERE topic = 'orders'": (6, 5),
        f"{ask} TIMESTAMP AS OF '{between}' WHERE topic = 'orders'": (3, 2),
        "SELECT count(*) AS n, count(o.offset) AS o "
        "FROM silver s LEFT JOIN silver VERSION AS OF 0 o "
        "ON s.topic = o.topic AND s.offset = o.offset": (10, 5),
    }.items():
        assert by_duckdb(data, sql) == [expected], sql
        assert by_spark(spark, data, sql) == [expected], sql
    for sql, error in {
        "SELECT 1 FROM silver VERSION AS OF 99": "lake.version",
        "SELECT 1 FROM silver TIMESTAMP AS OF 'noon'": "sql.invalid",
        "SELECT 1 FROM silver TIMESTAMP AS OF '2020-01-31'": "lake.version",
        "SELECT 1 FROM orders VERSION AS OF 0": "sql.table-unknown: there is no lake table",
        "SELECT 1 FROM silver.orders VERSION AS OF 0": "did you mean silver_orders",
    }.items():
        with pytest.raises(UsageError, match=re.escape(error)):
            by_duckdb(data, sql)
        with pytest.raises(UsageError, match=re.escape(error)):
            by_spark(spark, data, sql)


def test_the_history_of_every_table_is_the_same_on_both_engines(spark: Any, data: Path) -> None:
    """Also of gold and typed tables, by their names. Each version is read at its time."""
    compact(open_table(data, "silver"))
    names = table_names(data)
    assert {"silver", "traffic", "silver_orders", "expectations"} <= set(names)
    for name in names:
        for kind in ("HISTORY", "DETAIL"):
            sql = f"DESCRIBE {kind} {name}"
            found = by_duckdb(data, sql)
            assert by_spark(spark, data, sql) == found, sql
            assert collect(spark, sql, data, rows_max=9).column_names == columns_of(data, sql)
        assert columns_of(data, f"DESC HISTORY {name}") == HISTORY.names
        newest = open_table(data, name).version
        assert [row[0] for row in by_duckdb(data, f"DESC HISTORY {name}")] == [
            *range(newest, -1, -1)
        ]
    merged, *_, first = history(data, "silver")
    assert (merged["operation"], merged["writer"], merged["batch"]) == ("OPTIMIZE", None, None)
    assert merged["files_removed"] > merged["files_added"] > 0
    assert (first["operation"], first["batch"], first["rows_added"]) == ("WRITE", 0, 5)
    assert first["writer"] in open_table(data, "silver").writers()
    counted = "SELECT count(*) FROM silver"
    for row in history(data, "silver"):
        by_number = by_duckdb(data, f"{counted} VERSION AS OF {row['version']}")
        assert by_duckdb(data, f"{counted} TIMESTAMP AS OF '{row['timestamp']}'") == by_number
    for sql, expected in {
        "SELECT sum(rows_added) AS n FROM (DESCRIBE HISTORY silver) WHERE operation = 'WRITE'": 10,
        "SELECT max(version) - min(version) AS n FROM (DESCRIBE HISTORY tables.silver LIMIT 2)": 1,
    }.items():
        assert by_duckdb(data, sql) == by_spark(spark, data, sql) == [(expected,)], sql
    for sql in ("DESCRIBE HISTORY orders", "DESCRIBE DETAIL silver.orders"):
        for run in (by_duckdb, lambda *given: by_spark(spark, *given)):
            with pytest.raises(UsageError, match="a topic or view has no versions"):
                run(data, sql)


def columns_of(data: Path, sql: str) -> list[str]:
    with duck.Engine(data) as engine:
        return list(engine.stream(sql)[0].names)


def history(data: Path, table: str) -> list[dict[str, Any]]:
    names = columns_of(data, f"DESCRIBE HISTORY {table}")
    rows = by_duckdb(data, f"DESCRIBE HISTORY {table}")
    return [dict(zip(names, row, strict=True)) for row in rows]
