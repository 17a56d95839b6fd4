"""`polybus sql`: ask topics and tables with SQL."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from polybus.cli.options import data_options, existing_data, json_option, load_config
from polybus.errors import UsageError

if TYPE_CHECKING:
    from polybus.cli.sql.engines import Answer
    from polybus.cli.sql.output import Limited

LIMIT = 1000
"""Rows of a table on the terminal, unless --limit says otherwise."""
SQL_BYTES_MAX = 1 << 20
_CHART_ENDINGS = (".svg", ".html", ".htm")


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
    help="Who runs it. auto: DuckDB if it can, else Spark.",
)
@click.option(
    "--limit", type=click.IntRange(1), help=f"At most so many rows.  [default: {LIMIT} in a table]"
)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option(
    "--chart",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Draw it: in the terminal, or as FILE.svg or FILE.html.",
)
@data_options
def sql(
    query: str | None,
    file: str | None,
    engine: str,
    limit: int | None,
    as_json: bool,
    as_csv: bool,
    chart: str | None,
    data: str | None,
    config_path: str | None,
) -> None:
    """Ask topics and tables with SQL, whether the bus runs or not. QUERY `-` is standard input.

    A topic is a table of its name (in double quotes or backticks if it has dots or dashes) with
    the columns topic, partition, offset, timestamp, key, value, headers, protocol, sender, epoch
    and date. text(value) is the value as text, json(value) as JSON.
    """
    # `--chart "SELECT …"`: click took the query for the option's file.
    if chart and query is None and file is None and not chart.lower().endswith(_CHART_ENDINGS):
        query, chart = chart, ""
    if sum([as_json, as_csv, chart is not None]) > 1:
        raise click.UsageError("--json, --csv and --chart are one or another")
    text = _text_of(query, file)
    folder = existing_data(load_config(data, config_path))
    # Heavy: Arrow, and an engine.
    from polybus.cli.sql.engines import answered
    from polybus.cli.sql.output import Limited

    if limit is None and not (as_json or as_csv):
        limit = LIMIT if chart is None else None
    started = time.monotonic()
    with answered(text, folder, engine, rows_max=limit, say=_say) as answer:
        rows = Limited(answer.batches, limit)
        _print(answer, rows, as_json=as_json, as_csv=as_csv, chart=chart)
        found = "1 row" if rows.count == 1 else f"{rows.count} rows"
        _say(f"{answer.engine}: {found} in {time.monotonic() - started:.2f} s")
        if rows.more or answer.more:
            _say(f"there are more rows; --limit N shows more than {rows.count}, --csv all")


def _print(
    answer: Answer, rows: Limited, *, as_json: bool, as_csv: bool, chart: str | None
) -> None:
    from polybus.cli.sql import output as sql_output

    if chart is not None:
        _draw(answer, rows, chart)
    elif as_json:
        sql_output.echo_json_rows(rows)
    elif as_csv:
        sql_output.echo_csv(answer.schema, rows)
    else:
        sql_output.echo_rows(answer.schema, rows)


def _draw(answer: Answer, rows: Limited, file: str) -> None:
    import pyarrow as pa

    from polybus.cli.sql.chart import POINTS_MAX, chart_of, draw_terminal, save_chart
    from polybus.cli.sql.output import Limited

    some = Limited(iter(rows), POINTS_MAX + 1)
    chart = chart_of(pa.Table.from_batches(list(some), answer.schema))
    if file:
        save_chart(chart, Path(file))
        _say(f"drew {file}")
    else:
        click.echo(draw_terminal(chart, width=shutil.get_terminal_size().columns))


def _text_of(query: str | None, file: str | None) -> str:
    """The statement, wherever it is. Raises UsageError `input.unreadable`."""
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


def _say(text: str) -> None:
    click.echo(text, err=True)
