"""Auto CDC flows: tables that a topic of changes keeps up to date, types 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines_kit import check_same
from pipeline_kit import PipelineFolder, as_json
from spark_kit import running_bus

from polybus.lake.folders import drop_table
from polybus.lake.table import open_table, table_names

PYTHON = """
    from pyspark import pipelines as dp
    from pyspark.sql import functions as F

    @dp.temporary_view
    def changes():
        columns = "id INT, city STRING, note STRING, op STRING, at INT"
        row = F.from_json(F.col("value").cast("string"), columns)
        return spark.readStream.table("crm").select(row.alias("row")).select("row.*")

    dp.create_streaming_table("people")
    dp.create_auto_cdc_flow(
        target="people",
        source="changes",
        keys=["id"],
        sequence_by=F.col("at"),
        apply_as_deletes="op = 'delete'",
        except_column_list=["op", "at"],
    )

    @dp.materialized_view
    def cities():
        return spark.read.table("people").groupBy("city").count()
    """
SQL = """
    CREATE STREAMING TABLE history;

    CREATE FLOW periods AS AUTO CDC INTO history
    FROM STREAM(changes)
    KEYS (id)
    APPLY AS DELETE WHEN op = 'delete'
    SEQUENCE BY at
    COLUMNS * EXCEPT (op, at)
    STORED AS SCD TYPE 2
    TRACK HISTORY ON (city);
    """
FIRST = [
    {"id": 1, "city": "Bern", "note": "a", "at": 10},
    {"id": 2, "city": "Oslo", "note": "a", "at": 10},
    {"id": 1, "city": "Rome", "note": "b", "at": 30},
    {"city": "Nowhere", "at": 40},
]
LATER = [
    {"id": 1, "city": "Rome", "note": "c", "at": 40},
    {"id": 2, "op": "delete", "at": 50},
    {"id": 1, "city": "Nice", "note": "late", "at": 20},
    {"id": 2, "city": "Lima", "note": "late", "at": 45},
]


KINDS = ("", ".changes", ".quarantine")


@pytest.fixture
def crm(spark: Any, tmp_path: Path) -> Iterator[PipelineFolder]:
    with running_bus(tmp_path, ["crm"]) as bus:
        bus.publish("crm", as_json(FIRST))
        yield PipelineFolder(spark, bus, tmp_path)


def test_changes_that_come_late_are_put_where_they_belong(crm: PipelineFolder) -> None:
    crm.write("crm/people.py", PYTHON)
    crm.write("crm/history.sql", SQL)
    (refresh,) = {flow.refresh for flow in crm.run().flows} - {""}
    assert refresh == "full, because of its input people, whose rows change"
    assert crm.rows("crm.people", "id", "city", "note") == [(1, "Rome", "b"), (2, "Oslo", "a")]
    for name in ("crm.people", "crm.history"):
        (row,) = crm.rows(f"{name}.quarantine", "row", "reason")
        assert "Nowhere" in row[0] and "a key or the sequence number is null" in row[1]
    crm.bus.publish("crm", as_json(LATER))
    crm.run()
    assert crm.rows("crm.people", "id", "city", "note") == [(1, "Rome", "c")]
    assert crm.rows("crm.cities", "city", "count") == [("Rome", 1)]
    history = [
        (1, "Bern", "a", 10, 20),
        (1, "Nice", "late", 20, 30),
        (1, "Rome", "c", 30, None),
        (2, "Lima", "late", 45, 50),
        (2, "Oslo", "a", 10, 45),
    ]
    columns = ("id", "city", "note", "__START_AT", "__END_AT")
    assert crm.rows("crm.history", *columns) == history

    changed = PYTHON.replace('keys=["id"]', 'keys=["id", "city"]')
    crm.write("crm/people.py", changed)
    assert "keys id, city" in crm.problem()
    crm.write("crm/people.py", PYTHON)
    crm.run(reset=["history"])
    assert crm.rows("crm.history", *columns) == history
    assert open_table(crm.bus.data, "crm.people").last_batch("reset") is None
    assert len(crm.rows("crm.history.changes", "id")) == len(FIRST) + len(LATER) - 1
    made = {f"crm.{one}{kind}" for one in ("people", "history") for kind in KINDS}
    assert set(table_names(crm.bus.data)) == {*made, "crm.cities"}
    for name in (*made, "crm.cities"):
        assert check_same(crm.spark, crm.bus.data, name), name
    drop_table(crm.bus.data, "crm.people.changes")
    assert "table crm.people.changes was removed" in crm.problem()


HEAD = "from pyspark import pipelines as dp\n"
TABLE = "dp.create_streaming_table('t')\n"
FLOW = "dp.create_auto_cdc_flow('t', source='crm', keys=['{}'], sequence_by='offset'{})\n"
STREAM = "@dp.table\ndef u():\n    return spark.readStream.table('t')\n"
WRONG = {
    "no such key": (TABLE + FLOW.format("colour", ""), 3, "has no column colour"),
    "key is left out": (
        TABLE + FLOW.format("topic", ", column_list=['offset']"),
        3,
        "the key topic must be one of the columns",
    ),
    "nested key": (TABLE + FLOW.format("headers", ""), 3, "the key headers is map<string,binary>"),
    "partitions": (
        TABLE.replace("'t'", "'t', partition_cols=['topic']") + FLOW.format("key", ""),
        3,
        "has partitions",
    ),
    "two flows": (
        f"{TABLE}{FLOW.format('key', '')}@dp.append_flow(target='t')\ndef more():\n    pass\n",
        3,
        "has another flow",
    ),
    "a stream of it": (TABLE + FLOW.format("key", "") + STREAM, 6, "the rows of t change"),
}


@pytest.fixture(scope="module")
def shared(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PipelineFolder]:
    folder = tmp_path_factory.mktemp("cdc")
    with running_bus(folder, ["crm"]) as bus:
        yield PipelineFolder(spark, bus, folder)


@pytest.mark.parametrize("case", WRONG)
def test_a_flow_that_cannot_apply_changes_is_reported_with_its_line(
    shared: PipelineFolder, case: str
) -> None:
    body, line, words = WRONG[case]
    path = shared.write("bad.py", HEAD + body)
    text = shared.problem()
    assert f"{path}:{line}: " in text and words in text
