"""Tables of the format before Delta: they are refused, and converted by one command."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import polars as pl
import pytest
from old_tables_kit import BY_TOPIC, PAYLOADS, lay_out_old_tables
from topics_kit import make_topic

from polybus.errors import StorageError, UsageError
from polybus.lake import duck
from polybus.lake.old_tables import convert_tables
from polybus.lake.table import open_table, table_names
from polybus.log.disk import FileLock


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_topic(tmp_path / "data")
    lay_out_old_tables(tmp_path / "data")
    return tmp_path / "data"


def test_tables_of_the_old_format_are_refused_with_the_command_that_converts_them(
    data: Path,
) -> None:
    command = rf"lake\.old-format: table silver .*; run: polybus tables migrate --data {data}"
    with pytest.raises(UsageError, match=command):
        open_table(data, "silver").read()
    with pytest.raises(UsageError, match=r"lake\.old-format"):
        table_names(data)
    with duck.Engine(data) as engine, pytest.raises(UsageError, match=r"lake\.old-format"):
        engine.query("SELECT count(*) FROM silver")


def test_a_converted_table_has_the_same_rows_and_batches(data: Path) -> None:
    assert convert_tables(data) == ["by topic", "silver"]
    assert convert_tables(data) == []
    silver = open_table(data, "silver")
    rows = silver.read().sort_by("offset")
    assert rows["offset"].to_pylist() == list(range(6))
    assert [json.loads(text) for text in rows["payload"].to_pylist()] == PAYLOADS
    assert rows["properties"].to_pylist() == [[("k", "v")]] * 6
    assert rows["price"].to_pylist() == [None] * 4 + [1.5] * 2
    assert silver.last_batch("standard.decode:1") == 2
    assert len(silver.files(offset=(5, None))) == 1, "the statistics are kept"
    by_topic = open_table(data, "by topic")
    found = by_topic.read().to_pylist()
    assert sorted((row["topic"] or "", row["n"]) for row in found) == BY_TOPIC
    assert (by_topic.last_batch("w"), by_topic.last_batch("v")) == (7, 0)


def test_a_converted_table_is_read_by_other_engines(data: Path) -> None:
    convert_tables(data)
    silver = pl.read_delta(str(open_table(data, "silver").path)).sort("offset")
    assert [json.loads(text) for text in silver["payload"]] == PAYLOADS
    with duck.Engine(data) as engine:
        sql = "SELECT payload->>'b', sum(offset)::INT FROM silver GROUP BY 1"
        assert engine.query(sql).fetchall() == [("x y", 15)]
        sql = 'SELECT topic, n FROM "by topic"'
        found = sorted((topic or "", n) for topic, n in engine.query(sql).fetchall())
        assert found == BY_TOPIC
    names = [str(path) for path in open_table(data, "silver").files()]
    assert duckdb.connect().execute("SELECT count(*) FROM read_parquet(?)", [names]).fetchone()


def test_what_cannot_be_converted_stays_as_it_was(data: Path) -> None:
    (data / "pipeline").mkdir()
    with FileLock(data / "pipeline" / "lock"), pytest.raises(UsageError, match="stop it"):
        convert_tables(data)
    last = sorted((data / "tables" / "silver" / "_polybus").glob("*.json"))[-1]
    content = last.read_bytes()
    last.write_bytes(content.replace(b'"rows":2', b'"rows":3'))
    with pytest.raises(StorageError, match=rf"lake\.damaged: {last}: its checksum is wrong"):
        convert_tables(data)
    last.write_bytes(content)
    # A log of somebody else is not taken for ours.
    pl.DataFrame({"n": [1]}).write_delta(str(data / "tables" / "silver"))
    with pytest.raises(StorageError, match=r"lake\.damaged: .*does not have what .*_polybus has"):
        convert_tables(data)
    with pytest.raises(UsageError, match=r"lake\.old-format"):
        open_table(data, "silver").read()
