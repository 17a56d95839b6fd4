"""Every query in the documents runs on DuckDB and on Spark, with the same result."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from docs_kit import ROOT
from standard_kit import Pipe, Topics
from topics_kit import publish

from polybus.config import DeclaredTopic
from polybus.errors import UsageError
from polybus.lake import duck
from polybus.lake.table import open_table
from polybus.spark.views import collect

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ORDERS = DeclaredTopic(name="orders", schema="id BIGINT NOT NULL, name STRING, tags ARRAY<STRING>")
VALUES = [
    '{"id": 7, "name": "x y", "tags": ["a", "b"], "order": {"id": 1.50}}',
    '{"id": "8", "order": {"id": null}}',
    '{"id": 9, "name": null, "tags": []}',
]


def queries() -> list[str]:
    """The statements after `polybus sql` in code of the documents."""
    found = []
    for page in PAGES:
        for line in re.findall(r"^(?:\$ |    )?(?:\S*/)?(polybus sql .*)$", page.read_text(), re.M):
            words = shlex.split(line)
            found += [words[2]] if words[2][0] not in "[-" else []
    return sorted(set(found) - {"SHOW TABLES", "Usage:"})


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
    return [tuple(row.values()) for row in collect(spark, sql, data, rows_max=1000).to_pylist()]


def test_the_documents_have_queries() -> None:
    assert len(queries()) >= 12


@pytest.mark.parametrize("sql", queries())
def test_a_query_of_the_documents_is_the_same_on_both_engines(
    spark: Any, data: Path, sql: str
) -> None:
    by_duck, by_its_rival = by_duckdb(data, sql), by_spark(spark, data, sql)
    if sql.startswith("DESCRIBE"):
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
    *("payload:order", "payload:nothing", "payload:order.id::double", "s.payload:id::int + 1"),
)


def test_paths_into_json_are_the_same_on_both_engines(spark: Any, data: Path) -> None:
    for expression in EXPRESSIONS:
        sql = f"SELECT {expression} AS x FROM silver s WHERE topic = 'orders' ORDER BY offset"
        assert by_duckdb(data, sql) == by_spark(spark, data, sql), expression


def test_a_declared_topic_has_the_same_view_on_both_engines(spark: Any, data: Path) -> None:
    sql = "SELECT id, name, tags, _message.offset AS o FROM silver.orders ORDER BY o"
    found = by_duckdb(data, sql)
    assert found[:3] == [(7, "x y", ["a", "b"], 0), (8, None, None, 1), (9, None, [], 2)]
    assert by_spark(spark, data, sql) == found


def test_older_versions_are_the_same_on_both_engines(spark: Any, data: Path) -> None:
    versions = open_table(data, "silver").folder
    times = [(versions / f"{number:020d}.json").stat().st_mtime for number in range(2)]
    between = datetime.fromtimestamp(sum(times) / 2, UTC).isoformat()
    ask = "SELECT count(*) AS n, max(silver.offset) AS o FROM silver"
    for sql, expected in {
        f"{ask} VERSION AS OF 0 WHERE topic = 'orders'": (3, 2),
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
        "SELECT 1 FROM orders VERSION AS OF 0": "sql.table-unknown",
    }.items():
        with pytest.raises(UsageError, match=re.escape(error)):
            by_duckdb(data, sql)
        with pytest.raises(UsageError, match=re.escape(error)):
            by_spark(spark, data, sql)
