"""`polybus sql`: query topics and tables with SQL."""

import shutil
import sys
import time
from pathlib import Path

import click
import pyarrow as pa

from polybus.cli.options import existing_data, json_option, settings_options
from polybus.cli.output import say
from polybus.cli.sql.chart import CHART_ENDINGS, POINTS_MAX, chart_of, draw_terminal, save_chart
from polybus.cli.sql.engines import executed
from polybus.cli.sql.rows import LimitedRows, echo_csv, echo_json_rows, echo_rows
from polybus.config import Config
from polybus.errors import UsageError

LIMIT = 1000
"""Rows of a table on the terminal, unless --limit is given."""
SQL_BYTES_MAX = 1 << 20


@click.command(
    epilog="""\b
Examples:
  polybus sql "SELECT offset, text(value) FROM orders ORDER BY offset DESC LIMIT 10"
  polybus sql 'SELECT protocol, count(*) FROM "orders.eu" GROUP BY protocol' --chart
  polybus sql "SELECT json(value)->>'price' AS price FROM orders" --csv > prices.csv
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


def _draw(schema: pa.Schema, rows: LimitedRows, file: str) -> None:
    some = LimitedRows(iter(rows), POINTS_MAX + 1)
    chart = chart_of(pa.Table.from_batches(list(some), schema))
    if file:
        save_chart(chart, Path(file))
        say(f"drew {file}")
    else:
        click.echo(draw_terminal(chart, width=shutil.get_terminal_size().columns))


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
        raise UsageError("input.unreadable", f"{file or 'standard input'}: {error}") from error
    if len(text) > SQL_BYTES_MAX or not text.strip():
        raise UsageError("sql.statement", f"the SQL is empty, or over {SQL_BYTES_MAX} characters")
    return text
