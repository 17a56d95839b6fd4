"""A chart of a result: in the terminal, as PNG, or as a web page that needs nothing else.

The first column is what the points are called, every column of numbers after it is a line or a set
of bars. Many points make lines, few make bars.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from polybus.errors import UsageError

POINTS_MAX = 2000
BARS_MAX = 60
TIME_BARS_MAX = 12
_COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#d97706", "#7c3aed", "#0891b2")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Chart:
    labels: list[str]
    series: dict[str, list[float]]
    is_line: bool


def chart_of(table: pa.Table) -> Chart:
    """Raises UsageError `sql.chart` if there is nothing to draw."""
    if table.num_columns < 2 or table.num_rows == 0:
        text = "a chart needs rows, and two columns or more: what, and how much"
        raise UsageError("sql.chart", text)
    if table.num_rows > POINTS_MAX:
        text = f"{table.num_rows} points; a chart has at most {POINTS_MAX}: group or limit the rows"
        raise UsageError("sql.chart", text)
    first, *others = table.schema
    series = {
        field.name: [_number(value) for value in table.column(index + 1).to_pylist()]
        for index, field in enumerate(others)
        if _is_number(field.type)
    }
    if not series:
        names = ", ".join(field.name for field in others)
        raise UsageError("sql.chart", f"none of the columns after the first is a number: {names}")
    is_time = pa.types.is_temporal(first.type) and table.num_rows > TIME_BARS_MAX
    labels = [_label(value) for value in table.column(0).to_pylist()]
    return Chart(labels, series, is_line=is_time or table.num_rows > BARS_MAX)


def draw_terminal(chart: Chart, *, width: int) -> str:
    """The chart in characters, at most `width` wide."""
    parts = []
    for name, values in chart.series.items():
        body = (
            _line_text(chart, values, width) if chart.is_line else _bar_text(chart, values, width)
        )
        parts.append(f"{name}\n{body}")
    return "\n\n".join(parts)


def save_chart(chart: Chart, path: Path) -> None:
    """Write a .png or a .html.

    Raises:
        UsageError: `sql.chart`, another ending, a folder that is not there, no matplotlib.
    """
    try:
        if path.suffix.lower() == ".png":
            _save_png(chart, path)
        elif path.suffix.lower() in (".html", ".htm"):
            path.write_text(page_of(chart, path.stem))
        else:
            raise UsageError("sql.chart", f"{path}: a chart is a .png or a .html")
    except OSError as error:
        raise UsageError("sql.chart", f"{path}: {error.strerror}") from error


def page_of(chart: Chart, title: str) -> str:
    """A web page with the chart as SVG: no script, nothing from elsewhere."""
    width, height, left, bottom = 900, 420, 70, 90
    top = max(max(values) for values in chart.series.values())
    low = min(0.0, *(min(values) for values in chart.series.values()))
    span = (top - low) or 1.0
    count = len(chart.labels)
    step = (width - left - 20) / count

    def x(index: int) -> float:
        return left + step * (index + 0.5)

    def y(value: float) -> float:
        return 20 + (height - bottom - 20) * (1 - (value - low) / span)

    shapes = []
    for number, (name, values) in enumerate(chart.series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        if chart.is_line:
            points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
            shapes.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
        else:
            bar = step * 0.8 / len(chart.series)
            for index, value in enumerate(values):
                at = x(index) - step * 0.4 + bar * number
                tall = abs(y(value) - y(0))
                shapes.append(
                    f'<rect x="{at:.1f}" y="{min(y(value), y(0)):.1f}" width="{bar:.1f}" '
                    f'height="{tall:.1f}" fill="{colour}"><title>{html.escape(name)} '
                    f"{html.escape(chart.labels[index])}: {_short(value)}</title></rect>"
                )
        shapes.append(
            f'<text x="{left + 150 * number}" y="14" fill="{colour}">{html.escape(name)}</text>'
        )
    every = max(1, count // 20)
    for index in range(0, count, every):
        text = html.escape(chart.labels[index][:24])
        shapes.append(
            f'<text transform="translate({x(index):.1f},{height - bottom + 14}) rotate(40)">'
            f"{text}</text>"
        )
    for tick in range(5):
        value = low + span * tick / 4
        shapes.append(
            f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{_short(value)}</text>'
            f'<line x1="{left}" x2="{width - 20}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            'stroke="#ddd"/>'
        )
    title = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        f"<h1>{title}</h1>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}" font-family="sans-serif" font-size="11">\n'
        + "\n".join(shapes)
        + "\n</svg></html>\n"
    )


def _save_png(chart: Chart, path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        text = "PNG needs matplotlib, which is not installed; --chart FILE.html needs nothing"
        raise UsageError("sql.chart", text) from error
    figure, axes = pyplot.subplots(figsize=(9, 4.2), dpi=120)
    places = range(len(chart.labels))
    share = 0.8 / len(chart.series)
    for number, (name, values) in enumerate(chart.series.items()):
        if chart.is_line:
            axes.plot(places, values, label=name)
        else:
            moved = [place + share * (number - (len(chart.series) - 1) / 2) for place in places]
            axes.bar(moved, values, share, label=name)
    every = max(1, len(chart.labels) // 20)
    # A dollar sign would begin a formula, and a topic may have one.
    labels = [label.replace("$", r"\$") for label in chart.labels[::every]]
    axes.set_xticks(list(places)[::every], labels, rotation=40, ha="right")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _bar_text(chart: Chart, values: list[float], width: int) -> str:
    label_width = min(30, max(map(len, chart.labels)))
    shown = [_short(value) for value in values]
    value_width = max(map(len, shown))
    room = max(10, width - label_width - value_width - 4)
    top = max(map(abs, values)) or 1.0
    lines = []
    for label, value, text in zip(chart.labels, values, shown, strict=True):
        eighths = round(abs(value) / top * room * 8)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        lines.append(f"{label[:label_width].ljust(label_width)}  {text.rjust(value_width)}  {bar}")
    return "\n".join(lines)


def _line_text(chart: Chart, values: list[float], width: int, height: int = 10) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    margin = max(len(_short(low)), len(_short(high)))
    columns = min(len(values), max(10, width - margin - 3))
    means = []
    for column in range(columns):
        first = column * len(values) // columns
        part = values[first : max(first + 1, (column + 1) * len(values) // columns)]
        means.append(sum(part) / len(part))
    lines = []
    for row in range(height, 0, -1):
        edge = {height: _short(high), 1: _short(low)}.get(row, "").rjust(margin)
        levels = [((mean - low) / span * (height * 8 - 1) + 1) - (row - 1) * 8 for mean in means]
        lines.append(f"{edge} │" + "".join(_HEIGHTS[max(0, min(8, round(at)))] for at in levels))
    ends = f"{chart.labels[0]} … {chart.labels[-1]}"
    return "\n".join([*lines, f"{' ' * margin} └{'─' * columns}", f"{' ' * margin}  {ends}"])


def _is_number(kind: Any) -> bool:
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(test(kind) for test in numeric)


def _number(value: Any) -> float:
    return 0.0 if value is None or value != value else float(value)


def _label(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, datetime):
        text = value.isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")
    elif isinstance(value, date | Decimal):
        text = str(value)
    else:
        text = str(value)
    return "".join(char if char.isprintable() else "�" for char in text)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
