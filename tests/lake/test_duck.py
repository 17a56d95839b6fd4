"""SQL on topics and tables with DuckDB: history and journal, each message once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from topics_kit import DAY_US, NOON_US, hand_over, make_topic, publish

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.lake import duck
from polybus.lake.table import open_table
from polybus.log import layout
from polybus.log.reading.reader import LogReader


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def ask(data: Path, sql: str) -> list[tuple[Any, ...]]:
    with duck.Engine(data) as engine:
        return [tuple(row) for row in engine.query(sql).fetchall()]


def test_a_topic_is_history_and_journal_with_each_message_once(data: Path) -> None:
    values = make_topic(data)
    found = ask(data, "SELECT offset, value FROM orders ORDER BY offset")
    assert found == list(enumerate(values))
    assert ask(data, "SELECT count(*) FROM orders") == [(30,)]


def test_every_column_is_the_same_in_all_three_parts(data: Path) -> None:
    make_topic(data)
    found = ask(data, "SELECT * FROM orders WHERE offset IN (3, 13, 23) ORDER BY offset")
    epoch = LogReader(data).bounds("orders").epoch
    for row, number in zip(found, (3, 13, 23), strict=True):
        topic, partition, offset, timestamp, key, value, headers, protocol, sender, born, day = row
        assert (topic, partition, offset, born) == ("orders", 0, number, epoch)
        assert (key, value) == (b"key 3", b'{"n": %d}' % number)
        assert (headers, protocol, sender) == ({"n": b"3"}, "boson", "test")
        assert str(day) == str(timestamp)[:10] == ("2026-01-31" if number < 10 else "2026-02-01")


def test_a_topic_that_is_named_twice_is_read_twice(data: Path) -> None:
    make_topic(data)
    sql = "SELECT count(*) FROM orders a JOIN orders b ON a.offset = b.offset"
    assert ask(data, sql) == [(30,)]
    union = "SELECT count(*) FROM (SELECT key FROM orders UNION ALL SELECT key FROM orders)"
    assert ask(data, union) == [(60,)]


def test_a_hand_over_in_the_middle_of_a_query_changes_nothing(data: Path) -> None:
    publish(data, "orders", [b"old"] * 5000)
    hand_over(data)
    publish(data, "orders", [b"new"] * 20_000)
    with duck.Engine(data) as engine:
        _, batches = engine.stream("SELECT offset FROM orders", batch_rows=2048)
        found = next(batches).column(0).to_pylist()
        hand_over(data)  # Replaces the small file, and takes the journal away.
        for batch in batches:
            found += batch.column(0).to_pylist()
    assert sorted(found) == list(range(25_000))


def test_each_query_sees_what_has_come(data: Path) -> None:
    make_topic(data)
    with duck.Engine(data) as engine:
        assert engine.query("SELECT count(*) FROM orders").fetchall() == [(30,)]
        publish(data, "orders", [b"more"])
        assert engine.query("SELECT count(*) FROM orders").fetchall() == [(31,)]


def test_a_day_that_is_not_asked_for_is_not_read(data: Path) -> None:
    make_topic(data)
    first = next(layout.topic_folder(data, "orders").glob("history/date=2026-01-31/*.parquet"))
    first.write_bytes(b"not a file that could be read")
    sql = "SELECT count(*) FROM orders WHERE date = '2026-02-01' AND offset >= 20"
    # The schema is taken from the first file, so that one must be whole.
    publish(data, "two", [b"x"] * 3)
    publish(data, "two", [b"y"] * 3, timestamp_us=NOON_US + DAY_US)
    publish(data, "two", [b"z"] * 3, timestamp_us=NOON_US + 2 * DAY_US)
    hand_over(data)
    files = sorted(layout.topic_folder(data, "two").glob("history/*/*.parquet"))
    files[1].write_bytes(b"not a file that could be read")
    assert ask(data, "SELECT count(*) FROM two WHERE date = '2026-01-31'") == [(3,)]
    with pytest.raises(StorageError, match=r"sql\.unreadable.*2026-01-31"):
        ask(data, sql)


def test_names_with_dots_and_dashes_take_either_quotes_or_none_where_sql_allows(data: Path) -> None:
    make_topic(data, "orders.eu-1")
    make_topic(data, "orders.eu")
    for name in ('"orders.eu-1"', "`orders.eu-1`", "orders.eu", '"ORDERS.EU"', '"$events"'):
        if name == '"$events"':
            publish(data, "$events", [b"x"] * 30)
        assert ask(data, f"SELECT count(*) FROM {name}") == [(30,)]


def test_text_and_json_of_values_that_are_neither_are_null(data: Path) -> None:
    publish(data, "orders", [b'{"price": 2.5}', b"no json", b"\xff\xfe", b"[1]"])
    found = ask(data, "SELECT text(value), json(value)->>'price' FROM orders ORDER BY offset")
    assert found == [('{"price": 2.5}', "2.5"), ("no json", None), (None, None), ("[1]", None)]
    assert ask(data, "SELECT json('{\"a\": 1}')->>'a', text('x')") == [("1", "x")]


def test_lake_tables_are_there_with_partitions_and_younger_columns(data: Path) -> None:
    make_topic(data)
    table = open_table(data, "gold.traffic")
    rows = pa.table({"topic": ["a", "b"], "n": [1, 2]})
    table.append(rows, writer="w", batch_id=0, partition_by=["topic"])
    table.append(
        rows.append_column("late", pa.array([5, 6])), writer="w", batch_id=1, partition_by=["topic"]
    )
    sql = "SELECT topic, sum(n), sum(late) FROM gold.traffic GROUP BY topic ORDER BY topic"
    assert ask(data, sql) == [("a", 2, 5), ("b", 4, 6)]
    table.commit([], remove=list(table.state.files), writer="w", batch_id=2)
    assert ask(data, 'SELECT count(*), max(n) FROM "gold.traffic"') == [(0, None)]
    both = open_table(data, "orders")
    both.append(pa.table({"n": [7]}), writer="w", batch_id=0)
    assert ask(data, "SELECT count(*) FROM orders") == [(30,)], "the topic has the name"
    assert ask(data, "SELECT n FROM tables.orders") == [(7,)]


@pytest.mark.parametrize(
    ("sql", "code", "says"),
    [
        ("SELECT * FROM ordrs", "sql.table-unknown", "did you mean orders"),
        ("SELECT * FROM zzz", "sql.table-unknown", "there are orders"),
        ("SELECT nope FROM orders", "sql.invalid", "LINE 1: SELECT nope FROM orders\n"),
        ("SELEC value FROM orders", "sql.invalid", "^^^^^"),
        ("SELECT value FROM orders; SELECT 1", "sql.statement", "got 2"),
        ("DROP TABLE orders", "sql.statement", "DROP"),
        ("CREATE TABLE x (a INT)", "sql.statement", "CREATE"),
        ("COPY orders TO '/tmp/x.csv'", "sql.statement", "COPY"),
        ("SET memory_limit = '100GB'", "sql.statement", "SET"),
        ("ATTACH '/tmp/other.db'", "sql.statement", "ATTACH"),
        ("SELECT * FROM read_csv('/etc/passwd')", "sql.failed", "disabled by configuration"),
        ("SELECT * FROM '/etc/passwd'", "sql.table-unknown", "/etc/passwd"),
        ("SELECT * FROM a.b.c.d", "sql.table-unknown", "c.d"),
        ("", "sql.statement", "got 0"),
        ("SELECT 1 / (SELECT 'x')::INT", "sql.failed", "x"),
    ],
)
def test_what_cannot_be_run_is_named(data: Path, sql: str, code: str, says: str) -> None:
    make_topic(data)
    with pytest.raises(PolybusError) as raised:
        ask(data, sql)
    assert raised.value.code == code
    assert says in raised.value.text


def test_damage_in_the_journal_names_the_file_and_the_offsets(data: Path) -> None:
    make_topic(data)
    segment = layout.segments(data)[-1]
    content = bytearray(segment.read_bytes())
    content[-64] ^= 1
    segment.write_bytes(content)
    with pytest.raises(StorageError, match=rf"log\.damaged.*orders.*{segment.name}"):
        ask(data, "SELECT max(value) FROM orders")


def test_a_table_whose_file_is_gone_is_named(data: Path) -> None:
    make_topic(data)
    table = open_table(data, "silver")
    table.append(pa.table({"n": [1]}), writer="w", batch_id=0)
    table.files()[0].unlink()
    with pytest.raises(StorageError, match=r"lake\.damaged: table silver: .*parquet is missing"):
        ask(data, "SELECT * FROM silver")


def test_a_folder_that_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.not-found"):
        duck.Engine(tmp_path)


def test_nothing_is_left_behind(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topic(data)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with duck.Engine(data) as engine:
        engine.query("SELECT * FROM orders ORDER BY value").fetchall()
    assert list((tmp_path / "tmp").iterdir()) == []
