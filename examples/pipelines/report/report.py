"""The daily report: a chart (PNG) and a page (HTML) of the lake table `report.daily`.

    python report.py [--data polybus-data] [--out .]

Tables of the lake are Parquet: no Spark is needed to read them.
"""

import argparse
import base64
import html
from pathlib import Path

import matplotlib
import pyarrow as pa

from polybus.lake.table import open_table

matplotlib.use("Agg")
from matplotlib import pyplot


def draw(daily: pa.Table, path: Path) -> None:
    """Revenue per day, one stack a day, one colour a product."""
    rows = daily.sort_by([("day", "ascending"), ("product", "ascending")]).to_pylist()
    days = sorted({row["day"] for row in rows})
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    below = dict.fromkeys(days, 0.0)
    for product in sorted({row["product"] for row in rows}):
        revenue = {row["day"]: float(row["revenue"]) for row in rows if row["product"] == product}
        heights = [revenue.get(day, 0.0) for day in days]
        axes.bar([str(day) for day in days], heights, bottom=list(below.values()), label=product)
        below = {day: low + high for (day, low), high in zip(below.items(), heights, strict=True)}
    axes.set_title("Revenue a day")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def page(daily: pa.Table, chart: Path) -> str:
    """One file that can be sent by mail: the chart is inside."""
    picture = base64.b64encode(chart.read_bytes()).decode()
    rows = daily.sort_by([("day", "ascending"), ("product", "ascending")]).to_pylist()
    lines = "\n".join(
        f"<tr><td>{row['day']}<td>{html.escape(row['product'])}<td>{row['pieces']}"
        f"<td>{row['revenue']}</tr>"
        for row in rows
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Daily report</title>\n'
        f'<h1>Daily report</h1>\n<img alt="Revenue a day" src="data:image/png;base64,{picture}">\n'
        f"<table>\n<tr><th>day<th>product<th>pieces<th>revenue</tr>\n{lines}\n</table>\n</html>\n"
    )


def write_report(data: Path, out: Path) -> tuple[Path, Path]:
    """Write daily.png and daily.html and return their paths."""
    daily = open_table(data, "report.daily").read()
    out.mkdir(parents=True, exist_ok=True)
    chart, text = out / "daily.png", out / "daily.html"
    draw(daily, chart)
    text.write_text(page(daily, chart))
    return chart, text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("polybus-data"))
    parser.add_argument("--out", type=Path, default=Path())
    given = parser.parse_args()
    print(*write_report(given.data, given.out))
