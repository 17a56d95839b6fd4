"""The daily report: a chart (SVG) and a page (HTML) of the lake table `report.daily`.

    python report.py [--data polybus-data] [--out .]

Lake tables are Delta tables, so this script needs no Spark.
"""

import argparse
import html
from pathlib import Path

import pyarrow as pa

from polybus.cli.sql.chart import chart_of, svg_of
from polybus.lake.table import open_table


def draw(daily: pa.Table) -> str:
    """Revenue per day, one bar per product, as SVG."""
    rows = daily.to_pylist()
    days = sorted({row["day"] for row in rows})
    columns: dict[str, list[object]] = {"day": list(days)}
    for product in sorted({row["product"] for row in rows}):
        revenue = {row["day"]: float(row["revenue"]) for row in rows if row["product"] == product}
        columns[product] = [revenue.get(day, 0.0) for day in days]
    return svg_of(chart_of(pa.table(columns)), "Revenue a day")


def page(daily: pa.Table, chart: str) -> str:
    """A self-contained HTML page with the chart."""
    rows = daily.sort_by([("day", "ascending"), ("product", "ascending")]).to_pylist()
    lines = "\n".join(
        f"<tr><td>{row['day']}<td>{html.escape(row['product'])}<td>{row['pieces']}"
        f"<td>{row['revenue']}</tr>"
        for row in rows
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Daily report</title>\n'
        f"<h1>Daily report</h1>\n<h2>Revenue a day</h2>\n{chart}"
        f"<table>\n<tr><th>day<th>product<th>pieces<th>revenue</tr>\n{lines}\n</table>\n</html>\n"
    )


def write_report(data: Path, out: Path) -> tuple[Path, Path]:
    """Write daily.svg and daily.html and return their paths."""
    daily = open_table(data, "report.daily").read()
    out.mkdir(parents=True, exist_ok=True)
    picture, text = out / "daily.svg", out / "daily.html"
    chart = draw(daily)
    picture.write_text(chart)
    text.write_text(page(daily, chart))
    return picture, text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("polybus-data"))
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    print(*write_report(given.data, given.out))
