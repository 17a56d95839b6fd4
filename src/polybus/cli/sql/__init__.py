"""`polybus sql`: query topics and tables with SQL."""

import csv
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import msgspec
import pyarrow as pa

from polybus.cli.common.options import existing_data, json_option, settings_options
from polybus.cli.common.output import echo_table, say, shown
from polybus.cli.sql.chart import CHART_ENDINGS, POINTS_MAX, chart_of, draw_terminal, save_chart
from polybus.cli.sql.engines import executed
from polybus.config import Config
from polybus.errors import UsageError
from polybus.lake.values import plain

LIMIT = 1000
"""Rows of a table on the terminal, unless --limit is given."""
SQL_BYTES_MAX = 1 << 20
CELL_CHARS_MAX = 80


@click.command(
    epilog="""\b
Examples:
  polybus sql "SELECT offset, text(value) FROM orders ORDER BY offset DESC LIMIT 10"
  polybus sql "SELECT protocol, count(*) FROM orders.eu GROUP BY protocol" --chart
  polybus sql "SELECT json(value):price AS price FROM orders" --csv > prices.csv
  polybus sql "SHOW TABLES"
  polybus sql --file report.sql --json
"""
)
@click.argument("query", required=False)
@click.option("--file", "file", type=click.Path(dir_okay=False), help="Read the SQL from a file.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "duckdb", "spark"]),
    default="auto",
    show_default=True,
    help="The engine that runs it. auto: DuckDB if it can, else Spark.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    help=f"Maximum number of rows.  [default: {LIMIT} in a table]",
)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option(
    "--chart",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Draw a chart: in the terminal, or as FILE.svg or FILE.html.",
)
@settings_options
def sql(
    config: Config,
    query: str | None,
    file: str | None,
    engine: str,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
    chart: str | None,
) -> None:
    """Query topics and tables with SQL, whether the bus runs or not. QUERY `-` is standard input.

    A topic is a table of its name (in double quotes or backticks if it has dots or dashes) with
    the columns topic, partition, offset, timestamp, key, value, headers, protocol, sender, epoch
    and date. text(value) is the value as text, json(value) as JSON.
    """
    # In `--chart "SELECT …"` click takes the query for the file of --chart.
    if chart and query is None and file is None and not chart.lower().endswith(CHART_ENDINGS):
        query, chart = chart, ""
    if sum([as_json, as_csv, chart is not None]) > 1:
        raise click.UsageError("give only one of --json, --csv and --chart")
    text = _text_of(query, file)
    folder = existing_data(config)
    if limit is None and not (as_json or as_csv or chart is not None):
        limit = LIMIT
    started = time.monotonic()
    with executed(text, folder, engine, rows_max=limit) as result:
        rows = LimitedRows(result.batches, limit)
        if chart is not None:
            _draw(result.schema, rows, chart)
        elif as_json:
            echo_json_rows(rows)
        elif as_csv:
            echo_csv(result.schema, rows)
        else:
            echo_rows(result.schema, rows)
        found = "1 row" if rows.count == 1 else f"{rows.count} rows"
        say(f"{result.engine}: {found} in {time.monotonic() - started:.2f} s")
        if rows.more or result.more:
            say(f"there are more rows; --limit N shows more than {rows.count}, --csv all")


def _text_of(query: str | None, file: str | None) -> str:
    """The statement from the argument, the file or standard input. Raises UsageError."""
    if (query is None) == (file is None):
        raise click.UsageError("give the SQL as an argument, or as --file FILE, or - for stdin")
    try:
        if file is not None:
            with open(file, encoding="utf-8") as opened:
                text = opened.read(SQL_BYTES_MAX + 1)
        else:
            text = sys.stdin.read(SQL_BYTES_MAX + 1) if query == "-" else str(query)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError("input.unreadable", f"{file or 'standard input'}: {why}") from error
    if len(text) > SQL_BYTES_MAX or not text.strip():
        raise UsageError("sql.statement", f"the SQL is empty, or over {SQL_BYTES_MAX} characters")
    return text


class LimitedRows:
    """Batches up to a number of rows.

    Attributes:
        count: the rows given so far.
        more: whether there were more rows than the limit.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], rows_max: int | None) -> None:
        self.count = 0
        self.more = False
        self._batches = batches
        self._rows_max = rows_max

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            left = batch.num_rows if self._rows_max is None else self._rows_max - self.count
            self.more = batch.num_rows > left
            kept = batch.slice(0, left) if self.more else batch
            self.count += kept.num_rows
            if kept.num_rows:
                yield kept
            if self.more:
                return


def echo_rows(schema: pa.Schema, batches: LimitedRows) -> None:
    """A table. All rows are kept to find the width of each column, so it needs a limit."""
    rows = [[_cell(value) for value in row] for batch in batches for row in _rows(batch)]
    echo_table(schema.names, rows)


def echo_json_rows(batches: LimitedRows) -> None:
    """One array of objects, one object per line."""
    out = sys.stdout.buffer
    separator = b"[\n"
    for batch in batches:
        for row in batch.to_pylist():
            out.write(separator + msgspec.json.encode(plain(row)))
            separator = b",\n"
    out.write(b"[]\n" if separator == b"[\n" else b"\n]\n")
    out.flush()


def echo_csv(schema: pa.Schema, batches: LimitedRows) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(schema.names)
    for batch in batches:
        writer.writerows([_csv_cell(value) for value in row] for row in _rows(batch))
    sys.stdout.flush()


def _draw(schema: pa.Schema, rows: LimitedRows, file: str) -> None:
    some = LimitedRows(iter(rows), POINTS_MAX + 1)
    chart = chart_of(pa.Table.from_batches(list(some), schema))
    if file:
        save_chart(chart, Path(file))
        say(f"drew {file}")
    else:
        click.echo(draw_terminal(chart, width=shutil.get_terminal_size().columns))


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    return zip(*[column.to_pylist() for column in batch.columns], strict=True)


def _cell(value: Any) -> Any:
    """A number as it is, anything else as text of limited length."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Decimal):
        return plain(value)
    if isinstance(value, datetime):
        value = value.isoformat(sep=" ").replace("+00:00", "Z")
    elif isinstance(value, list | dict):
        value = msgspec.json.encode(plain(value))
    text = shown(value if isinstance(value, bytes) else str(value))
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


def _csv_cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        return msgspec.json.encode(plain(value)).decode()
    value = plain(value)
    return f"base64:{value['base64']}" if isinstance(value, dict) else value
