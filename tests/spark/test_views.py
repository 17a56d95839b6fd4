"""Materialized views: refreshed with new rows alone where that gives the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_kit import PipelineFolder, as_json
from spark_kit import running_bus

from polybus.lake.table import open_table
from polybus.spark.pipelines.declared.view_flow import FILE
from polybus.spark.pipelines.flows import checkpoints_of

SQL = """
    CREATE STREAMING TABLE orders AS
    SELECT row.* FROM (
      SELECT from_json(string(value), 'id INT, city STRING, amount DECIMAL(8,2)') AS row
      FROM STREAM(shop)
    );

    CREATE TEMPORARY VIEW big AS SELECT * FROM orders WHERE amount > 5;

    CREATE MATERIALIZED VIEW sums AS
    SELECT upper(city) AS city, sum(amount) AS amount, count(*) AS n, count(city) AS cities,
      min(id) AS first, max(id) AS last
    FROM orders GROUP BY upper(city);

    CREATE MATERIALIZED VIEW ids AS SELECT id + 1 AS id FROM big;

    CREATE MATERIALIZED VIEW means AS SELECT city, avg(amount) AS mean FROM orders GROUP BY city;

    CREATE MATERIALIZED VIEW pairs AS
    SELECT a.id FROM orders AS a JOIN orders AS b ON a.city = b.city
    """
FIRST: list[dict[str, Any]] = [{"id": 1, "city": "Bern", "amount": 5}, {"id": 2, "amount": 7.5}]
LATER: list[dict[str, Any]] = [
    {"id": 3, "city": "bern", "amount": 1.25},
    {"id": 4, "city": "Oslo", "amount": 9},
    {"id": 5, "amount": None},
]
SUMS = ("city", "amount", "n", "cities", "first", "last")


@pytest.fixture
def shop(spark: Any, tmp_path: Path) -> Iterator[PipelineFolder]:
    with running_bus(tmp_path, ["shop"]) as bus:
        bus.publish("shop", as_json(FIRST))
        yield PipelineFolder(spark, bus, tmp_path)


def shown(shop: PipelineFolder) -> list[list[str]]:
    sums = [tuple(map(str, row)) for row in shop.rows("shop.sums", *SUMS)]
    return [sorted(map(repr, sums)), sorted(map(repr, shop.rows("shop.ids", "id")))]


def test_a_view_reads_only_new_rows_if_that_gives_the_same_rows(shop: PipelineFolder) -> None:
    shop.write("shop.sql", SQL)
    prepared = shop.run()
    assert {flow.name: flow.refresh for flow in prepared.flows if flow.refresh} == {
        "sums": "incremental",
        "ids": "incremental",
        "means": "full, because of the average in column mean",
        "pairs": "full, because of Join",
    }
    orders, note = open_table(shop.bus.data, "shop.orders"), {}
    for name in ("sums", "ids"):
        path = checkpoints_of(shop.bus.data, "shop") / name / FILE
        note[path] = path.read_bytes()
    (old,) = orders.files()
    rows = old.read_bytes()
    shop.bus.publish("shop", as_json(LATER))
    shop.run(refresh=["orders"])
    assert shop.rows("shop.ids", "id") == [(3,)], "only the table was refreshed"

    old.write_bytes(b"x" * len(rows))  # only new rows are read, so nobody notices
    shop.run(refresh=["sums", "ids"])
    after = [
        [
            "('BERN', '6.25', '2', '2', '1', '3')",
            "('None', '7.50', '2', '0', '2', '5')",
            "('OSLO', '9.00', '1', '1', '4', '4')",
        ],
        ["(3,)", "(5,)"],
    ]
    assert shown(shop) == after
    old.write_bytes(rows)

    for path, text in note.items():  # as after a crash before the note was written
        path.write_bytes(text)
    shop.run()
    assert shown(shop) == after
    versions = [open_table(shop.bus.data, f"shop.{name}").version for name in ("sums", "ids")]
    shop.run()
    assert versions == [
        open_table(shop.bus.data, f"shop.{name}").version for name in ("sums", "ids")
    ]
    assert len(shop.rows("shop.means", "city")) == 4

    changed = SQL.replace("id + 1", "id + 2")
    shop.write("shop.sql", changed)
    shop.run()
    assert shown(shop)[1] == ["(4,)", "(6,)"]
    shop.write("shop.sql", SQL)
    shop.run(refresh=["ids"], reset=["sums"])
    assert shown(shop) == after
