"""SQL on topics and tables with DuckDB: history and journal, each message once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner
from topics_kit import DAY_US, NOON_US, hand_over, make_topic, publish

from polybus.cli import main
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.lake import duck
from polybus.lake.table import open_table
from polybus.log import delta, layout
from polybus.log.reading.reader import LogReader


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def polybus(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


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


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("value::varchar", ['{"id": 7}', "no", None]),
        ("CAST(value AS string)", ['{"id": 7}', "no", None]),
        ("CASE WHEN true THEN value END::text", ['{"id": 7}', "no", None]),
        ("CAST(value AS string):id", ["7", None, None]),
        ("value::varchar:id", ["7", None, None]),
        ("value::json->>'id'", ["7", None, None]),
        ("json_extract(value, '$.id')", ["7", None, None]),
        ("json_extract(value, ['$.id'])", [["7"], None, None]),
        ("json_extract_string(value, 'id') = '7'", [True, None, None]),
        ("json_keys(value)", [["id"], None, None]),
        ("json_valid(value)", [True, False, None]),
        ("count(*) OVER ()::text", ["3"] * 3),
        ("key::varchar || DATE '2026-01-31'::varchar", [f"key {n}2026-01-31" for n in range(3)]),
        ("list_transform([offset], lambda x: x::text)", [["0"], ["1"], ["2"]]),
        ("E'it\\'s a:b'", ["it's a:b"] * 3),
    ],
)
def test_bytes_as_text_or_json_are_the_text(data: Path, expression: str, result: list[Any]) -> None:
    publish(data, "orders", [b'{"id": 7}', b"no", b"\xff\xfe"])
    assert ask(data, f"SELECT {expression} FROM orders ORDER BY offset") == [(x,) for x in result]
    assert ask(data, "SELECT max(value)::text FROM orders WHERE offset < 2") == [('{"id": 7}',)]
    with duck.Engine(data) as engine:
        schema, _ = engine.stream("SELECT value::varchar, CAST(value AS string):id FROM orders")
    assert schema.names == ['CAST("value" AS VARCHAR)', "CAST(value AS VARCHAR):id"]


# What people write every day: the rewriting for bytes must not change any of it.
ORDINARY = r"""
count(*)::text
CAST(count(*) AS varchar)
TRY_CAST(count(*) AS varchar)
count(*) FILTER (id > 1)::text
(count(*) FILTER (id > 1))::text
round(avg(id), 2)::text
list(id ORDER BY id)::text
string_agg(id::text, ',' ORDER BY id)
max(name)::text
min(name)::varchar || max(id)::varchar
max(payload)::json
TRY_CAST(max(payload) AS json)
TRY_CAST(max(name) AS json)
CAST(max(id) AS json)
sum(id)::json
max(ts)::text
json_extract(max(payload), '$.a')
json_extract_string(max(payload), 'b')
json_keys(max(payload))
json_type(max(payload), '$.a')
json_valid(max(name))
json_array_length(max(payload), 'c')
json_extract_path_text(max(payload), 'b')
(SELECT max(id) FROM tables.plain)::text
id::text
id::text::varchar::text
(sum(id) OVER ())::text
(lag(name) OVER (ORDER BY id))::text
row_number() OVER (ORDER BY id)::text
unnest([1, 2])::text
unnest(l)::varchar
id AS x, x::text
id AS x, TRY_CAST(x AS json)
name::text
TRY_CAST(name AS json)
TRY_CAST(payload AS json)
TRY_CAST(id AS json)
payload::json
payload::json->>'b'
CAST(id AS text) || '-' || CAST(ts AS text)
l::text
l::json
s::text
s::json
TRY_CAST(s AS varchar)
NULL::text
NULL::json
ts::date::text
CASE WHEN id > 1 THEN name END::text
coalesce(name::text, id::text)
list_transform(l, lambda x: x::text)
json_extract(payload, '$.a')
json_extract(payload, '')
json_extract_string(payload, '')
json_extract(payload, 'a')
json_extract(payload, ['$.a', '$.b'])
json_extract(l, 0)
json_extract(s, 'k')
json_extract_string(l, 1)
json_extract(json_extract(payload, 'd'), 'e')
json_keys(payload)
json_keys(payload, '$.d')
json_keys(s)
json_type(payload)
json_type(l)
json_structure(payload)
json_pretty(payload)
json_contains(payload, '{"a": 1}')
json_exists(payload, '$.a')
json_value(payload, '$.a')
json_array_length(l)
json_valid(name)
json_valid(payload)
$$a:b$$ || $tag$it's offset::text x VERSION AS OF 3 $$ $tag$
payload->>$$b$$
payload->>E'b'
id::text FROM tables.plain GROUP BY id::text
id::text, count(*)::text FROM tables.plain GROUP BY ALL
id::text AS t, count(*) FROM tables.plain GROUP BY t HAVING sum(id)::text = '3'
name FROM tables.plain WHERE id::text IN ('1', '3')
name FROM tables.plain ORDER BY id::text DESC
id FROM tables.plain QUALIFY (row_number() OVER (ORDER BY id))::text = '2'
DISTINCT (id % 2)::text FROM tables.plain
t.n::text FROM (SELECT count(*) AS n FROM tables.plain) t
n::text FROM (WITH c AS (SELECT max(name) AS n FROM tables.plain) SELECT n FROM c)
a.id::text FROM tables.plain a JOIN tables.plain b ON a.id::text = b.id::text
""".strip().splitlines()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[duck.Engine, Any]]:
    """A table without bytes, in our engine and in DuckDB alone."""
    data = tmp_path_factory.mktemp("plain") / "data"
    publish(data, "orders", [b"x"])
    rows = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int64()),
            "name": ["é", "a\\x41b", None],
            "payload": ['{"a":1,"b":"ü\\\\x","c":[1],"d":{"e":2}}', "[1, 2]", None],
            "l": pa.array([[1, 2], [3], None], pa.list_(pa.int64())),
            "s": pa.array([{"k": 1}, {"k": None}, None], pa.struct({"k": pa.int64()})),
            "ts": pa.array([NOON_US, DAY_US, None], pa.timestamp("us")),
        }
    )
    open_table(data, "plain").append(rows, writer="w", batch_id=0)
    settings = {"default_null_order": "nulls_first_on_asc_last_on_desc"}
    with duckdb.connect(config=settings) as alone, duck.Engine(data) as engine:
        alone.execute("SET TimeZone = 'UTC'")
        alone.execute("CREATE SCHEMA tables")
        alone.register("rows", rows)
        alone.execute("CREATE TABLE tables.plain AS SELECT * FROM rows")
        yield engine, alone


@pytest.mark.parametrize("expression", ORDINARY)
def test_without_bytes_a_statement_gives_what_duckdb_gives(
    plain: tuple[duck.Engine, Any], expression: str
) -> None:
    engine, alone = plain
    sql = f"SELECT {expression}"
    if "FROM tables.plain" not in expression or "(SELECT max(id)" in expression:
        sql += " FROM tables.plain"
    expected = sorted(map(repr, alone.execute(sql).fetchall()))
    assert sorted(map(repr, engine.query(sql).fetchall())) == expected


def test_a_cast_that_is_tried_is_null_and_one_that_is_not_fails(data: Path) -> None:
    publish(data, "orders", [b"no", b'{"a": 1}'])
    sql = "SELECT TRY_CAST(text(value) AS json), TRY_CAST(max(value) OVER () AS json) FROM orders"
    assert ask(data, sql) == [(None, '{"a": 1}'), ('{"a": 1}', '{"a": 1}')]
    with pytest.raises(UsageError, match=r"sql\.failed: .*Malformed JSON"):
        ask(data, "SELECT CAST(text(value) AS json) FROM orders")
    with duck.Engine(data) as engine:
        sql = (
            "SELECT TRY_CAST(key AS json), upper(epoch::text), TRY_CAST(offset AS text) FROM orders"
        )
        assert engine.stream(sql)[0].names == [
            *('TRY_CAST("key" AS JSON)', "upper(CAST(epoch AS VARCHAR))"),
            'TRY_CAST("offset" AS VARCHAR)',
        ]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("max(value)::text", '{"é": "\\\\x41"}'),
        ("text(max(value))", '{"é": "\\\\x41"}'),
        ("json(max(value))->>'é'", "\\x41"),
        ("json_extract_string(max(value), 'é')", "\\x41"),
        ("json_keys(max(value))", ["é"]),
        ("json_keys(any_value(x))", ["é"]),
        ("json_valid(max(value))", True),
        ("max(text(value))::json->>'é'", "\\x41"),
        ("text(count(*))", "1"),
    ],
)
def test_aggregates_of_bytes_are_the_text(data: Path, expression: str, result: Any) -> None:
    publish(data, "orders", ['{"é": "\\\\x41"}'.encode()])
    assert ask(data, f"SELECT {expression} FROM (SELECT *, value AS x FROM orders)") == [(result,)]


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


def test_older_versions_are_those_of_lake_tables(data: Path) -> None:
    publish(data, "both", [b"{}"])
    for batch in range(2):
        open_table(data, "both").append(pa.table({"n": [batch]}), writer="w", batch_id=batch)
    for name in ("both", "tables.both"):
        for words in ("VERSION AS OF 0", "for version as of 0"):
            assert ask(data, f"SELECT n FROM {name} {words}") == [(0,)]


@pytest.mark.parametrize(
    ("sql", "code", "says"),
    [
        ("SELECT t:timestamp FROM orders", "sql.invalid", "a space after its colon: name: exp"),
        ("SELECT * FROM ordrs", "sql.table-unknown", "did you mean orders"),
        ("SELECT * FROM zzz", "sql.table-unknown", "there are orders"),
        ("SELECT * FROM silver.orders", "sql.table-unknown", "polybus up makes it"),
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
        ("SELECT value, $ref FROM orders", "sql.failed", "parameters: ref"),
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


def test_a_damaged_table_affects_no_statement_about_others(data: Path) -> None:
    make_topic(data)
    rows = pa.table({"n": [1]})
    for batch in range(2):
        open_table(data, "broken").append(rows, writer="w", batch_id=batch)
    delta.version_path(open_table(data, "broken").folder, 1).unlink()
    assert ask(data, "SELECT count(*) FROM orders") == [(30,)]
    with pytest.raises(StorageError, match=r"lake\.damaged: table broken: .*is missing"):
        ask(data, "SELECT * FROM broken")
    listed = polybus("sql", "SHOW TABLES", "--csv", "--data", str(data)).stdout
    assert {"orders,topic,30", "broken,table,"} <= set(listed.splitlines())


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
