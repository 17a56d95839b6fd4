"""Typed silver: a topic with a schema has a table of its columns, which follows its schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines_kit import check_same
from standard_kit import Pipe, Topics
from topics_kit import publish

from polybus.config import DeclaredTopic
from polybus.errors import UsageError
from polybus.lake import duck
from polybus.lake.evolution import evolved
from polybus.lake.infer import infer
from polybus.lake.table import Conflict, LakeTable, TableChange, open_table
from polybus.lake.typed import SCHEMA_VERSION
from polybus.schema_ddl import columns_of
from polybus.spark.declared_fields import schema_fields
from polybus.spark.pipelines.flows import FlowProgress
from polybus.spark.pipelines.standard import typed
from polybus.spark.pipelines.standard.batches import StandardBatches
from polybus.spark.tables import append
from polybus.spark.views import collect


def orders(schema: str) -> DeclaredTopic:
    return DeclaredTopic(name="orders", schema=schema)


FIRST = orders("id INT NOT NULL, price DECIMAL(6,2), tags ARRAY<STRING>, more VARIANT")


class TypedPipe(Pipe):
    """With the warnings that the flow shows."""

    def restart(self, *, begun: int | None = None) -> None:
        self.figures = FlowProgress()
        writer = "standard.decode:test"
        self.batches = StandardBatches(self.data, writer, None, begun, figures=self.figures)

    @property
    def warning(self) -> str | None:
        self.figures._take_offsets([])
        return self.figures.warning

    def ids(self) -> list[Any]:
        return [row[0] for row in self.rows("silver_orders", "id")]

    def schema_version(self) -> str | None:
        return open_table(self.data, "silver_orders").settings.get(SCHEMA_VERSION)


def test_every_engine_reads_the_typed_rows_that_silver_has(spark: Any, tmp_path: Path) -> None:
    publish(tmp_path, "orders", [b"{}"])
    pipe, topics = TypedPipe(spark, tmp_path, FIRST), Topics()
    values = [
        '{"id": 1, "price": 1.5, "tags": ["a", null], "more": {"x": [1]}}',
        '{"id": "2", "price": "3.25"}',
        '{"id": "no"}',
        "text",
        '{"id": 3, "price": null, "other": true}',
    ]
    pipe.run(0, [topics.message("orders", value) for value in values])
    pipe.run(1, [topics.message("chat", '{"id": 5}'), topics.message("orders", '{"id": 4}')])
    pipe.run(1, [])
    assert len(check_same(spark, tmp_path, "silver_orders")) == 4
    rows = pipe.rows("silver_orders", "id", "price", "tags", "more")
    assert [(row[0], str(row[1])) for row in rows] == [
        (1, "1.50"),
        (2, "3.25"),
        (3, "None"),
        (4, "None"),
    ]
    assert rows[0][2:] == (["a", None], '{"x":[1]}')
    assert pipe.schema_version() == "1"
    [about] = [row[1] for row in pipe.rows("silver_orders", "id", "_message") if row[0] == 4]
    assert (about["offset"], about["protocol"]) == (5, "goms")


def test_a_table_that_is_made_later_has_the_rows_of_before(spark: Any, tmp_path: Path) -> None:
    pipe, topics = TypedPipe(spark, tmp_path), Topics()
    values = ('{"id": 1}', '{"id": "x"}', "text", "[1]", '{"id": 2}')
    pipe.run(0, [topics.message("orders", value) for value in values])
    pipe.configure(FIRST)
    pipe.run(1, [topics.message("orders", '{"id": 3}')])
    assert pipe.ids() == [1, 2, 3]


def test_a_table_is_made_without_a_new_message_of_its_topic(spark: Any, tmp_path: Path) -> None:
    pipe, topics = TypedPipe(spark, tmp_path), Topics()
    pipe.run(0, [topics.message("orders", '{"id": 1}'), topics.message("chat", "{}")])
    pipe.configure(FIRST, DeclaredTopic(name="none", schema="id INT"))
    pipe.run(1, [topics.message("chat", "{}")])
    assert pipe.ids() == [1]
    pipe.configure(FIRST, DeclaredTopic(name="chat", schema="id INT"))
    pipe.restart()
    pipe.batches.make_typed(spark)
    assert len(pipe.rows("silver_chat", "id")) == 2 and not pipe.rows("silver_none", "id")
    pipe.run(2, [topics.message("chat", '{"id": 3}'), topics.message("orders", '{"id": 2}')])
    assert len(pipe.rows("silver_chat", "id")) == 3 and pipe.ids() == [1, 2]


def test_rows_that_a_table_refuses_come_with_the_next_ones(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other topics do not wait for the table, and what it has missed is noted in it."""
    pipe, topics = TypedPipe(spark, tmp_path, FIRST), Topics()
    pipe.run(0, [topics.message("orders", '{"id": 1}')])
    real = LakeTable.change

    def change(self: LakeTable, given: TableChange) -> bool:
        if self.name == "silver_orders" and given.batch is not None:
            raise UsageError("lake.schema", "another type")
        return real(self, given)

    with monkeypatch.context() as patched:
        patched.setattr(LakeTable, "change", change)
        for number in (1, 2):
            pipe.run(number, [topics.message("orders", f'{{"id": {number + 1}}}')])
        assert pipe.warning is not None and "another type" in pipe.warning
    assert pipe.ids() == [1] and len(pipe.silver("offset")) == 3
    pipe.restart()
    pipe.run(3, [topics.message("orders", '{"id": 4}'), topics.message("orders", "text")])
    assert pipe.ids() == [1, 2, 3, 4]
    pipe.run(4, [topics.message("orders", '{"id": 5}')])
    assert pipe.ids() == [1, 2, 3, 4, 5]


def test_a_batch_runs_again_if_another_writer_changes_the_table_meanwhile(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, topics = TypedPipe(spark, tmp_path, orders("id INT")), Topics()
    pipe.run(0, [topics.message("orders", '{"id": 1}')])
    pipe.configure(orders("id BIGINT"))
    second, real = [topics.message("orders", '{"id": 2}')], LakeTable.change

    def change(self: LakeTable, given: TableChange) -> bool:
        if given.based_on is not None:
            real(self, TableChange(settings={"somebody": "else"}))
        return real(self, given)

    with monkeypatch.context() as patched:
        patched.setattr(LakeTable, "change", change)
        with pytest.raises(Conflict):
            pipe.run(1, second)
    pipe.restart(begun=1)
    pipe.run(1, second)
    assert pipe.ids() == [1, 2] and pipe.schema_version() == "2"


@pytest.mark.parametrize("lost", ["silver_orders", "silver", "traffic"])
def test_a_batch_that_runs_again_adds_nothing_twice(
    spark: Any, tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch ends before a table gets it; the next life of the flow runs it again."""
    pipe, topics = TypedPipe(spark, tmp_path, FIRST), Topics()
    pipe.run(0, [topics.message("orders", '{"id": 1}')])
    second = [topics.message("orders", '{"id": 2}')]
    real = LakeTable.change

    def change(self: LakeTable, *given: Any) -> bool:
        if self.name == lost:
            raise OSError("killed")
        return real(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(LakeTable, "change", change)
        with pytest.raises(OSError, match="killed"):
            pipe.run(1, second)
    pipe.restart(begun=1)
    pipe.run(1, second)
    assert pipe.ids() == [1, 2]
    assert [row[0] for row in pipe.silver("payload:id::int")] == [1, 2]


def test_a_schema_change_that_readers_can_follow_is_taken(spark: Any, tmp_path: Path) -> None:
    publish(tmp_path, "orders", [b"{}"])
    pipe, topics = TypedPipe(spark, tmp_path, FIRST), Topics()
    pipe.run(0, [topics.message("orders", '{"id": 1, "price": 1.25, "more": [2]}')])
    wide = "id BIGINT, price DECIMAL(12,4), tags ARRAY<STRING>, more VARIANT, note STRING"
    pipe.configure(orders(wide))
    pipe.run(1, [topics.message("orders", '{"id": 5000000000, "note": "x"}')])
    assert pipe.warning is None and pipe.schema_version() == "2"
    rows = pipe.rows("silver_orders", "id", "price", "more", "note")
    assert [(row[0], str(row[1]), *row[2:]) for row in rows] == [
        (1, "1.2500", "[2]", None),
        (5_000_000_000, "None", None, "x"),
    ]
    assert len(check_same(spark, tmp_path, "silver_orders")) == 2


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("id STRING, price DECIMAL(6,2), tags ARRAY<STRING>, more VARIANT", "id is integer, now"),
        ("id INT, tags ARRAY<STRING>, more VARIANT", "column price is missing"),
        ("ID INT, price DECIMAL(6,2), tags ARRAY<STRING>, more VARIANT", "now spelled ID"),
        ("id INT, price DECIMAL(6,3), tags ARRAY<STRING>, more VARIANT", "price is decimal"),
        ("id INT, price DECIMAL(6,2), tags ARRAY<INT>, more VARIANT", "tags is"),
        ("id INT, price DECIMAL(6,2), tags ARRAY<STRING>, more STRING", "more is JSON, now"),
    ],
)
def test_a_schema_change_that_breaks_readers_is_refused_with_what_to_do(
    spark: Any, tmp_path: Path, schema: str, problem: str
) -> None:
    table = open_table(tmp_path, "silver_orders")
    fields = typed.columns_of("silver_orders", "orders", FIRST.schema or "")
    with pytest.raises(UsageError, match=rf"pipeline\.schema-change.*{problem}.*tables drop"):
        evolved(table.name, fields, typed.columns_of("silver_orders", "orders", schema))


def test_a_topic_with_a_refused_schema_goes_on_with_the_one_it_has(
    spark: Any, tmp_path: Path
) -> None:
    pipe, topics = TypedPipe(spark, tmp_path, FIRST), Topics()
    pipe.run(0, [topics.message("orders", '{"id": 1}')])
    pipe.configure(orders("id STRING NOT NULL"))
    pipe.run(1, [topics.message("orders", '{"id": "x"}'), topics.message("orders", '{"id": 2}')])
    assert pipe.warning is not None and "id is integer, now string" in pipe.warning
    assert (pipe.ids(), pipe.schema_version()) == ([1, 2], "1")
    assert [row[0] for row in pipe.rows("quarantine", "offset")] == [1]
    publish(tmp_path, "orders", [b"{}"])
    with duck.Engine(tmp_path) as engine:
        found = engine.query("SELECT id, price FROM silver.orders ORDER BY id").fetchall()
    assert found == [(1, None), (2, None)], "the view has the columns of the table"
    view = collect(spark, "SELECT id, price FROM silver.orders ORDER BY id", tmp_path, rows_max=9)
    assert view.to_pydict() == {"id": [1, 2], "price": [None, None]}
    pipe.configure(FIRST)
    pipe.run(2, [topics.message("orders", '{"id": 3}')])
    assert pipe.warning is None and pipe.ids() == [1, 2, 3]


@pytest.mark.parametrize(
    "schema",
    [
        *("id BIGINT NOT NULL, name STRING COMMENT 'x, y', `a b`: dec(12, 2)", "id BIGNT"),
        *("s STRUCT<x: INT, y STRING NOT NULL>, m MAP<STRING, ARRAY<DOUBLE>>", "STRUCT<a INT>"),
        *("i interval day to second, t timestamp without time zone, v void", "a text", "a json"),
        *("a string collate UNICODE, b varchar(3)", "a varchar", "a int(3)", "a array<int", "a"),
        *("a int -- x\n, b /* y */ byte", "a int b int", "a int,", "a-b int", "a int; b int"),
        *("a map<int>", "a decimal()", "a int default 3", "a int not", "a struct<>, b real"),
        *("a TIMESTAMP(6)", "a TIMESTAMP_NTZ(6)", "a TIMESTAMP_LTZ(06)", "a TIMESTAMP(3)"),
        *("a TIMESTAMP(9)", "a TIMESTAMP_NTZ(3)", "a TIMESTAMP()", "a TIME(9)", "a TIME(10)"),
        *("a STRING COLLATE system.builtin.UNICODE", "a CHAR(3) COLLATE `UNICODE`"),
        *("a STRING COLLATE builtin.UNICODE", "a STRING COLLATE", "a INT COLLATE UNICODE"),
        *("a INT COMMENT r'x\\'", 'a INT COMMENT R"x"', "a INT COMMENT 'x' \"y\" r'z'"),
        *("a INT COMMENT 'x''y'", "a INT COMMENT 'x'y'z'", "a STRUCT<b: INT COMMENT 'x' 'y'>"),
        *("a INT /* /* */ */", "a INT /* /* */", "a INT /*", "a INT /*+ x */", "a INT /*/ */"),
        *("a DECIMAL(50,2)", "a DECIMAL(39)", "a DECIMAL(38, 38)", "a DECIMAL(3,5)"),
        *("a DECIMAL(0)", "a DECIMAL(10L)", "a VARCHAR(x)", "a VARCHAR(2147483647)"),
        *("a CHAR(2147483648)", "a VARCHAR(\u0663)"),
        *("\xe9 INT", "`\xe9` INT", "a STRUCT<\xe9: INT>"),
        *("1 INT", "1a INT", "1e5 INT", "7bd INT", "7b INT", "_ INT", "a-- x\\\ny\n INT"),
        *("a TIMESTAMP WITH TIME ZONE", "a TIMESTAMP(6) WITH LOCAL TIME ZONE"),
        *("a TIMESTAMP WITHOUT LOCAL TIME ZONE", "a TIMESTAMP_LTZ WITHOUT TIME ZONE"),
        *("a TIMESTAMP WITHOUT TIME", "a TIME(3) WITHOUT TIME ZONE", "a TIME WITH LOCAL TIME ZONE"),
        *("a INTERVAL DAY TO", "a INTERVAL TO", "a INTERVAL DAY DAY", "a INTERVAL SECOND TO DAY"),
        *("a INTERVAL YEAR TO MONTH", "a INTERVAL YEAR TO DAY", "a INTERVAL HOUR TO HOUR"),
    ],
)
def test_the_config_accepts_the_schemas_that_spark_accepts(spark: Any, schema: str) -> None:
    def is_accepted(read: Callable[[], object]) -> bool:
        try:
            read()
        except (ValueError, UsageError):
            return False
        return True

    accepted = is_accepted(lambda: schema_fields("orders", schema))
    assert is_accepted(lambda: columns_of(schema)) == accepted


def test_a_table_of_somebody_else_is_left_alone(spark: Any, tmp_path: Path) -> None:
    table = open_table(tmp_path, "silver_orders")
    append(spark.range(1), table, writer="mine", batch_id=0)
    pipe, topics = TypedPipe(spark, tmp_path, FIRST), Topics()
    pipe.run(0, [topics.message("orders", '{"id": 7}')])
    assert pipe.warning is not None and "not a table of the standard pipeline" in pipe.warning
    assert pipe.ids() == [0] and pipe.silver("offset") == [(0,)]


def test_a_proposed_schema_quarantines_the_messages_that_it_says(
    spark: Any, tmp_path: Path
) -> None:
    odd = ['" 7 "', '"1.9"', '"1_0"', '"NaN"', "NaN", "1e19", "-1", '"2026-01-31"', "0"]
    odd += ['"7"', "1.9", "true", '"x"', "[1]", "{}", "1e400", "9223372036854775808", "null", '""']
    usual = '{"n": 5, "d": 1.5, "b": true, "t": "2026-01-31T12:00:00Z"}'
    values = [f'{{"{name}": {one}}}' for name in ("n", "d", "b", "t") for one in odd]
    schema = infer([usual.encode()], outliers_max=0.0).schema.replace(" NOT NULL", "")
    assert schema == "n BIGINT, d DOUBLE, b BOOLEAN, t TIMESTAMP"
    told = {
        value
        for value in values
        if infer([usual.encode()] * 500 + [value.encode()], outliers_max=0.01).quarantined
    }
    pipe, topics = TypedPipe(spark, tmp_path, orders(schema)), Topics()
    pipe.run(0, [topics.message("orders", value) for value in values])
    bad = {values[offset] for (offset,) in pipe.rows("quarantine", "offset")}
    assert bad == told
