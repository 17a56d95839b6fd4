"""What was measured: figures with their bars, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Unit = Literal["s", "rows/s", "ms", "MiB", "×"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number; `bar` says what it, or its ratio to a peer, has to be at most or least.

    Attributes:
        work, who: what was done, and by whom.
        value: the median, in `unit`; `p99` the same of the slowest, where that means something.
        ratio: our time over the peer's, or our rate over it; None where there is no peer.
        at_most, at_least: the bar of `ratio` if there is one, else of `value`.
        note: what a reader has to know to compare it.
    """

    work: str
    who: str
    value: float
    unit: Unit
    p99: float | None = None
    ratio: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None where there is no bar."""
        held = self.value if self.ratio is None else self.ratio
        if self.at_most is not None:
            return held <= self.at_most
        if self.at_least is not None:
            return held >= self.at_least
        return None

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"met": self.met}


def quantiles(samples: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile (of few samples: the largest)."""
    ordered = sorted(samples)
    return median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def render(figures: Sequence[Figure], facts: dict[str, str]) -> RenderableType:
    """The table, what it was measured on, and which bars were missed."""
    table = Table(title="polybus bench --spark", title_justify="left", pad_edge=False)
    for name in ("work", "who"):
        table.add_column(name)
    for name in ("figure", "ratio", "bar"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("note")
    last = None
    for figure in figures:
        if last is not None and figure.work != last:
            table.add_section()
        verdict = {None: "", True: "[green]met[/green]", False: "[red]not met[/red]"}[figure.met]
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} ×"
        work = "" if figure.work == last else figure.work
        table.add_row(work, figure.who, shown(figure), ratio, bar_of(figure), verdict, figure.note)
        last = figure.work
    text = Text("\n".join(f"{name}: {fact}" for name, fact in facts.items()), style="dim")
    return Group(table, text, Text(""), Text(summary(figures)))


def shown(figure: Figure) -> str:
    value, unit = figure.value, figure.unit
    if unit == "rows/s":
        return f"{value / 1e6:.2f} M/s"
    late = "" if figure.p99 is None else f", p99 {figure.p99:.0f}"
    digits = 2 if unit in ("s", "×") else 0
    return f"{value:.{digits}f} {unit}{late}"


def bar_of(figure: Figure) -> str:
    sign, bar = ("≤", figure.at_most) if figure.at_most is not None else ("≥", figure.at_least)
    if bar is None:
        return ""
    return f"{sign} {bar:g} {'×' if figure.ratio is not None else figure.unit}"


def summary(figures: Sequence[Figure]) -> str:
    """How many bars were met, and each that was not."""
    held = [figure for figure in figures if figure.met is not None]
    missed = [figure for figure in held if not figure.met]
    lines = [f"{len(held) - len(missed)} of {len(held)} bars met."]
    lines += [
        f"Not met: {figure.work}, {figure.who}: {shown(figure)}"
        + ("" if figure.ratio is None else f", {figure.ratio:.2f} ×")
        + f"; the bar is {bar_of(figure)}."
        for figure in missed
    ]
    return "\n".join(lines)
