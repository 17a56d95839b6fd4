"""`polybus sql`: engines, output and charts, and what it says when it cannot."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cli_kit import polybus, serve
from click.testing import CliRunner, Result
from log_kit import opened_log

from polybus.batch import Batch
from polybus.cli import main
from polybus.cli.sql import engines as sql_engines
from polybus.cli.sql.chart import chart_of, draw_terminal, svg_of
from polybus.errors import PolybusError, UsageError
from polybus.lake.table import open_table
from polybus.lake.values import plain
from polybus.log.history.handover import compact
from polybus.spark.pipelines.running import service

NOON_US = 1_769_860_800_000_000  # 2026-01-31T12:00:00Z


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped bus with two topics, in history and in the journal, and a table."""
    folder = tmp_path_factory.mktemp("sql") / "data"
    folder.mkdir()
    for part in range(2):
        log = opened_log(folder, lambda: NOON_US)
        if not part:
            log.create_topic("orders")
            log.create_topic("orders.eu-1")
        values = [b'{"n": %d}' % number for number in range(part * 1000, part * 1000 + 1000)]
        log.append(Batch.of("orders", values, headers=[{"h": b"1"}] * 1000))
        log.append(Batch.of("orders.eu-1", [b"text, with a comma", b"\xff\x00", b"\x1b[31mred"]))
        log.sync()
        log.close()
        if not part:
            compact(folder)
    open_table(folder, "gold").append(pa.table({"n": [1, 2]}), writer="w", batch_id=0)
    return folder


def run(data: Path, *arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["sql", "--data", str(data), *arguments], **options)


def test_a_query_prints_a_table_and_says_which_engine_ran_it(data: Path) -> None:
    done = polybus("sql", "SELECT count(*) AS n FROM orders", "--data", str(data))
    assert (done.returncode, done.stdout) == (0, b"   n\n2000\n")
    assert re.fullmatch(rb"duckdb: 1 row in \d+\.\d\d s\n", done.stderr)


def test_a_running_bus_is_asked_through_its_files(tmp_path: Path) -> None:
    with serve(tmp_path, "news") as bus:
        for text in ("one", "two"):
            polybus("publish", "news", text, "--receipt", "--url", bus.url())
        done = polybus("sql", "SELECT offset, value FROM news", "--json", "--data", str(tmp_path))
    assert json.loads(done.stdout) == [
        {"offset": 0, "value": "one"},
        {"offset": 1, "value": "two"},
    ]


def test_sql_comes_from_a_file_or_from_standard_input(data: Path, tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("SELECT 1 AS a -- a comment\n")
    assert run(data, "--file", str(tmp_path / "q.sql"), "--csv").stdout == "a\n1\n"
    assert run(data, "-", "--csv", input="SELECT 2 AS a").stdout == "a\n2\n"
    missing = run(data, "--file", str(tmp_path / "none.sql"))
    assert missing.exit_code == 1 and "input.unreadable" in missing.stderr
    assert "Errno" not in missing.stderr
    assert run(data).exit_code == 2
    assert run(data, "SELECT 1", "--file", "x").exit_code == 2
    assert "sql.statement" in run(data, " ").stderr


def test_json_has_text_where_values_are_text_and_base64_where_not(data: Path) -> None:
    done = run(data, 'SELECT value FROM "orders.eu-1" ORDER BY offset LIMIT 3', "--json")
    assert [row["value"] for row in json.loads(done.stdout)] == [
        "text, with a comma",
        {"base64": "/wA="},
        "\x1b[31mred",
    ]
    assert json.loads(run(data, "SELECT 1 AS a WHERE false", "--json").stdout) == []
    row = json.loads(run(data, "SELECT * FROM orders LIMIT 1", "--json").stdout)[0]
    assert (row["timestamp"], row["date"]) == ("2026-01-31T12:00:00Z", "2026-01-31")
    assert row["headers"] == {"h": "1"}


def test_csv_can_be_read_back(data: Path) -> None:
    done = run(data, "SELECT offset, value FROM `orders.eu-1` ORDER BY 1 LIMIT 2", "--csv")
    rows = list(csv.reader(io.StringIO(done.stdout)))
    assert rows == [["offset", "value"], ["0", "text, with a comma"], ["1", "base64:/wA="]]


def test_nothing_in_a_value_steers_the_terminal(data: Path) -> None:
    done = run(data, 'SELECT value, text(value) FROM "orders.eu-1" WHERE offset = 2')
    assert "\x1b" not in done.stdout
    assert done.stdout.count("\\x1b[31mred") == 2


def test_a_long_result_is_cut_with_a_notice_unless_it_goes_elsewhere(data: Path) -> None:
    done = run(data, "SELECT offset FROM orders ORDER BY offset")
    assert len(done.stdout.splitlines()) == 1001
    assert "duckdb: 1000 rows" in done.stderr and "there are more rows" in done.stderr
    done = run(data, "SELECT offset FROM orders", "--limit", "7")
    assert len(done.stdout.splitlines()) == 8
    done = run(data, "SELECT offset FROM orders", "--csv")
    assert len(done.stdout.splitlines()) == 2001 and "more rows" not in done.stderr
    done = run(data, "SELECT offset FROM orders LIMIT 1000")
    assert "more rows" not in done.stderr, "exactly as many as fit"


def test_show_tables_and_describe_need_no_engine_to_be_chosen(data: Path) -> None:
    done = run(data, "show tables;", "--json")
    assert json.loads(done.stdout) == [
        {"name": "orders", "kind": "topic", "rows": 2000},
        {"name": "orders.eu-1", "kind": "topic", "rows": 6},
        {"name": "gold", "kind": "table", "rows": 2},
    ]
    done = run(data, "DESCRIBE orders", "--csv")
    assert [line.split(",")[0] for line in done.stdout.splitlines()[1:]] == [
        *("topic", "partition", "offset", "timestamp", "key", "value", "headers"),
        *("protocol", "sender", "epoch", "date"),
    ]


@pytest.mark.parametrize(
    ("query", "code", "says"),
    [
        ("SELECT * FROM ordrs", "sql.table-unknown", "did you mean orders"),
        ("SELECT nope FROM orders", "sql.invalid", "^^^^"),
        ("DELETE FROM orders", "sql.statement", "DELETE"),
    ],
)
def test_a_mistake_is_named_with_what_to_do_next(
    data: Path, query: str, code: str, says: str
) -> None:
    done = run(data, query)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"polybus: {code}: " in done.stderr and says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_data_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(tmp_path / "none", "SELECT 1")
    assert done.exit_code == 1 and "log.no-data" in done.stderr
    done = run(tmp_path, "SELECT 1")
    assert done.exit_code == 1 and "data.not-found" in done.stderr


# Engines.


@pytest.fixture
def pipeline(data: Path, tmp_path: Path) -> Iterator[list[str]]:
    """A pipeline's socket that answers as the driver does, and what it was asked."""
    asked: list[str] = []

    def run_sql(query: str, rows_max: int) -> tuple[pa.Table, bool]:
        asked.append(query)
        if "boom" in query:
            raise UsageError("sql.failed", "Spark's own words")
        return pa.table({"n": [1, 2, 3]}).slice(0, rows_max), rows_max < 3

    answering = service.Service(data, stop=lambda: None, run_sql=run_sql)
    service.write_status(data, "running")
    yield asked
    answering.stop()
    service.write_status(data, "stopped")


def test_what_duckdb_cannot_parse_goes_to_the_running_pipeline(
    data: Path, pipeline: list[str]
) -> None:
    query = "SELECT * FROM orders LATERAL VIEW explode(array(1)) t AS x"
    done = run(data, query, "--csv")
    assert done.stdout == "n\n1\n2\n3\n"
    assert "DuckDB cannot run this" in done.stderr
    assert "spark (the running pipeline's): 3 rows" in done.stderr
    assert pipeline == [query]
    run(data, "SELECT count(*) FROM orders")
    assert len(pipeline) == 1, "what DuckDB can run stays here"


@pytest.mark.parametrize(
    "query",
    ["SELEC 1", "SELECT 1 FROM", "SELECT nope(1)", "SELECT 'lateral view' FROM orders WHERE"],
)
def test_a_slip_of_the_pen_does_not_start_spark(
    data: Path, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_engines, "_by_spark", _never)
    done = run(data, query)
    assert done.exit_code == 1
    assert "sql.invalid" in done.stderr and "--engine spark" in done.stderr


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("Spark was asked")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM orders LATERAL VIEW explode(array(1)) t AS x",
        "SELECT get_json_object(value, '$.a') FROM orders",
        "SELECT date_format(timestamp, 'yyyy') FROM orders",
        "SELECT 'a' RLIKE 'b'",
    ],
)
def test_what_is_spark_s_own_sql_starts_it(
    data: Path, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"n": [7]})
    answer = sql_engines.SqlResult("spark (started for this)", rows.schema, iter(rows.to_batches()))
    monkeypatch.setattr(sql_engines, "_by_spark", lambda *_, **__: answer)
    done = run(data, query, "--csv")
    assert (done.exit_code, done.stdout) == (0, "n\n7\n"), done.stderr


def test_the_engine_can_be_chosen(data: Path, pipeline: list[str]) -> None:
    done = run(data, "SELECT 1", "--engine", "spark", "--limit", "2")
    assert "there are more rows" in done.stderr and len(done.stdout.splitlines()) == 3
    done = run(data, "SELECT boom", "--engine", "spark")
    assert done.exit_code == 1 and "sql.failed: Spark's own words" in done.stderr
    done = run(data, "SELEC 1", "--engine", "duckdb")
    assert done.exit_code == 1 and "sql.invalid" in done.stderr
    assert len(pipeline) == 2


def test_a_column_that_is_nowhere_is_not_looked_for_on_spark(
    data: Path, pipeline: list[str]
) -> None:
    assert run(data, "SELECT nope FROM orders").exit_code == 1
    assert pipeline == []


def test_without_duckdb_or_spark_it_says_what_is_missing(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.setattr(sql_engines, "_is_spark_here", lambda: False)
    done = run(data, "SELECT 1")
    assert done.exit_code == 1
    assert "sql.engine-missing" in done.stderr and "polybus[sql]" in done.stderr


# Charts.


def test_a_chart_is_drawn_in_the_terminal(data: Path) -> None:
    query = "SELECT offset % 3 AS rest, count(*) AS n FROM orders GROUP BY ALL ORDER BY 1"
    done = run(data, "--chart", query)
    lines = done.stdout.splitlines()
    assert lines[0] == "n"
    assert [line.split()[:2] for line in lines[1:]] == [["0", "667"], ["1", "667"], ["2", "666"]]
    assert "█" in lines[1]


def test_a_chart_is_a_picture_or_a_page_that_needs_nothing_else(data: Path, tmp_path: Path) -> None:
    query = "SELECT '$<b>' AS what, 5 AS n UNION ALL SELECT 'y', 2.5"
    done = run(data, query, "--chart", str(tmp_path / "c.svg"))
    assert done.exit_code == 0, done.stderr
    run(data, query, "--chart", str(tmp_path / "c.html"))
    page = (tmp_path / "c.html").read_text()
    assert "<b>" not in page and "$&lt;b&gt;" in page
    assert not re.search(r"(src|href)=|<script|url\(", page)
    svg = (tmp_path / "c.svg").read_text()
    assert svg in page
    names = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg)]
    assert names.count("rect") == 2


@pytest.mark.parametrize(
    ("query", "file", "says"),
    [
        ("SELECT 1 AS a", "", "two columns"),
        ("SELECT 'a' AS a, 'b' AS b", "", "none of the columns after the first is a number: b"),
        ("SELECT 1, 2", "x.gif", "a .svg or a .html"),
        ("SELECT 1, 2", "no/folder/x.html", "No such file"),
        ("SELECT offset, epoch FROM orders UNION ALL SELECT 1, 1", "", "at most 2000"),
    ],
)
def test_what_cannot_be_drawn_is_said(data: Path, query: str, file: str, says: str) -> None:
    done = run(data, query, "--chart", *([file] if file else []))
    assert done.exit_code == 1
    assert "sql.chart" in done.stderr and says in done.stderr


def test_many_points_make_a_line_that_fits(data: Path) -> None:
    table = pa.table({"t": list(range(500)), "n": [number % 50 for number in range(500)]})
    chart = chart_of(table)
    assert chart.is_line
    assert max(map(len, draw_terminal(chart, width=60).splitlines())) <= 60
    assert "<polyline" in svg_of(chart, "t")
    with pytest.raises(PolybusError, match="needs rows"):
        chart_of(table.slice(0, 0))


def test_options_that_contradict_each_other_are_usage_errors(data: Path) -> None:
    assert run(data, "SELECT 1", "--json", "--csv").exit_code == 2
    assert run(data, "SELECT 1", "--engine", "other").exit_code == 2
    assert run(data, "SELECT 1", "--limit", "0").exit_code == 2


def test_values_are_plain_in_json() -> None:
    assert plain([("a", b"x")]) == {"a": "x"}
    assert plain({"n": Decimal("12"), "x": Decimal("1.5")}) == {"n": 12, "x": 1.5}
    assert plain([b"a", None]) == ["a", None]
