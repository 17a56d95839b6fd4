"""Draws a result: as characters in a terminal, as SVG, or as a web page with the SVG.

The first column labels the points. Each numeric column after it is one series of bars, or one line
if there are many points.
"""

import html
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from polybus.errors import UsageError

POINTS_MAX = 2000
BARS_MAX = 60
TIME_BARS_MAX = 12
CHART_ENDINGS = (".svg", ".html", ".htm")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 420, 70, 20, 20, 90
_COLOURS = ("#2563eb", "#dc2626", "#16a34a", "#d97706", "#7c3aed", "#0891b2")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Chart:
    labels: list[str]
    series: dict[str, list[float]]
    is_line: bool


def chart_of(table: pa.Table) -> Chart:
    """Raises UsageError `sql.chart` if the table cannot be drawn."""
    if table.num_columns < 2 or table.num_rows == 0:
        text = "a chart needs rows, and two columns or more: a label, then numbers"
        raise UsageError("sql.chart", text)
    if table.num_rows > POINTS_MAX:
        text = f"{table.num_rows} points; a chart has at most {POINTS_MAX}: group or limit the rows"
        raise UsageError("sql.chart", text)
    first, *others = table.schema
    is_number = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    series = {
        field.name: [_number(value) for value in table.column(index).to_pylist()]
        for index, field in enumerate(others, 1)
        if any(test(field.type) for test in is_number)
    }
    if not series:
        names = ", ".join(field.name for field in others)
        raise UsageError("sql.chart", f"none of the columns after the first is a number: {names}")
    is_time = pa.types.is_temporal(first.type) and table.num_rows > TIME_BARS_MAX
    labels = [_label(value) for value in table.column(0).to_pylist()]
    return Chart(labels, series, is_line=is_time or table.num_rows > BARS_MAX)


def draw_terminal(chart: Chart, *, width: int) -> str:
    """The chart in characters, at most `width` wide."""
    draw = _line_text if chart.is_line else _bar_text
    parts = (f"{name}\n{draw(chart, values, width)}" for name, values in chart.series.items())
    return "\n\n".join(parts)


def save_chart(chart: Chart, path: Path) -> None:
    """Write the chart as SVG, or as a page if the file's name ends in .html.

    Raises UsageError `sql.chart` for another ending, or if the file cannot be written.
    """
    if path.suffix.lower() not in CHART_ENDINGS:
        raise UsageError("sql.chart", f"{path}: a chart is a .svg or a .html file")
    content, title = svg_of(chart, path.stem), html.escape(path.stem)
    if path.suffix.lower() != ".svg":
        head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        content = f"{head}<h1>{title}</h1>\n{content}</html>\n"
    try:
        path.write_text(content)
    except OSError as error:
        raise UsageError("sql.chart", f"{path}: {error.strerror}") from error


def svg_of(chart: Chart, title: str) -> str:
    """The chart as one SVG element without scripts or references to other files."""
    count = len(chart.labels)
    step = (_WIDTH - _LEFT - _RIGHT) / count
    low = min(0.0, *(min(values) for values in chart.series.values()))
    high = max(0.0, *(max(values) for values in chart.series.values()))
    span = (high - low) or 1.0
    centres = [_LEFT + step * (index + 0.5) for index in range(count)]

    def y_of(value: float) -> float:
        return _TOP + (_HEIGHT - _BOTTOM - _TOP) * (1 - (value - low) / span)

    shapes = []
    for value in (low + span * tick / 4 for tick in range(5)):
        y = y_of(value)
        shapes.append(
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
    for x, label in list(zip(centres, chart.labels, strict=True))[:: max(1, count // 20)]:
        place = f"translate({x:.1f},{_HEIGHT - _BOTTOM + 14}) rotate(40)"
        shapes.append(f'<text transform="{place}">{html.escape(label[:24])}</text>')
    width = step * 0.8 / len(chart.series)
    for number, (name, values) in enumerate(chart.series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        legend = f'<text x="{_LEFT + 150 * number}" y="14" fill="{colour}">{html.escape(name)}'
        shapes.append(f"{legend}</text>")
        if chart.is_line:
            pairs = zip(centres, values, strict=True)
            points = " ".join(f"{x:.1f},{y_of(value):.1f}" for x, value in pairs)
            shapes.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
            continue
        for x, label, value in zip(centres, chart.labels, values, strict=True):
            top, bottom = sorted((y_of(value), y_of(0)))
            tip = html.escape(f"{name} {label}: {_short(value)}")
            shapes.append(
                f'<rect x="{x - step * 0.4 + width * number:.1f}" y="{top:.1f}" '
                f'width="{width:.1f}" height="{bottom - top:.1f}" fill="{colour}">'
                f"<title>{tip}</title></rect>"
            )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, *shapes, "</svg>\n"])


def _bar_text(chart: Chart, values: list[float], width: int) -> str:
    label_width = min(30, max(map(len, chart.labels)))
    shown = [_short(value) for value in values]
    value_width = max(map(len, shown))
    room = max(10, width - label_width - value_width - 4)
    top = max(map(abs, values)) or 1.0
    lines = []
    for label, value, text in zip(chart.labels, values, shown, strict=True):
        whole, eighths = divmod(round(abs(value) / top * room * 8), 8)
        bar = "█" * whole + _EIGHTHS[eighths].strip()
        lines.append(f"{label[:label_width].ljust(label_width)}  {text.rjust(value_width)}  {bar}")
    return "\n".join(lines)


def _line_text(chart: Chart, values: list[float], width: int, height: int = 10) -> str:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    margin = max(len(_short(low)), len(_short(high)))
    columns = min(len(values), max(10, width - margin - 3))
    ends = [column * len(values) // columns for column in range(columns + 1)]
    means = [fmean(values[first:stop]) for first, stop in pairwise(ends)]
    lines = []
    for row in range(height, 0, -1):
        edge = {height: _short(high), 1: _short(low)}.get(row, "").rjust(margin)
        levels = [((mean - low) / span * (height * 8 - 1) + 1) - (row - 1) * 8 for mean in means]
        lines.append(f"{edge} │" + "".join(_HEIGHTS[max(0, min(8, round(at)))] for at in levels))
    first_last = f"{chart.labels[0]} … {chart.labels[-1]}"
    return "\n".join([*lines, f"{' ' * margin} └{'─' * columns}", f"{' ' * margin}  {first_last}"])


def _number(value: Any) -> float:
    return 0.0 if value is None or value != value else float(value)


def _label(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, datetime):
        value = value.isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")
    return "".join(char if char.isprintable() else "�" for char in str(value))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
