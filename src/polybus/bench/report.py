"""From samples to the table: medians, ratios, bars met and missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polybus.bench.measure import Outcome
from polybus.bench.scenarios import Metric, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant of one scenario, as the table shows it."""

    scenario: str
    work: str
    metric: Metric
    who: str
    is_bus: bool
    value: float | None
    p99_us: float | None
    cpu_s_per_million: float | None
    ratio: float | None
    """The bus's figure over this one's; None in the bus's own row."""
    bar: float | None
    goal: float | None
    met: bool | None
    """None where there is no bar, or no peer to hold it against."""
    error: str | None

    def as_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return fields | {"metric": self.metric.value}


def rows_of(scenario: Scenario, outcomes: Sequence[Outcome]) -> list[Row]:
    """The rows of one scenario; the first is the bus's."""
    return [_row(scenario, outcome, outcomes[0]) for outcome in outcomes]


def _row(scenario: Scenario, outcome: Outcome, bus: Outcome) -> Row:
    entry, metric = outcome.entry, scenario.metric
    value, ours = outcome.value(metric), bus.value(metric)
    is_bus = outcome is bus
    ratio = ours / value if not is_bus and ours is not None and value else None
    bar = scenario.limit if is_bus else entry.bar
    held = value if is_bus else ratio
    met = None
    if bar is not None and bus.errors and (is_bus or value is not None):
        met = False  # a bus that fails even one run meets no bar
    elif bar is not None and held is not None:
        met = held >= bar if metric.more_is_better else held <= bar
    late = sorted(sample["p99_us"] for sample in outcome.samples if "p99_us" in sample)
    return Row(
        scenario=scenario.name,
        work=scenario.title,
        metric=metric,
        who=entry.label or outcome.broker.title,
        is_bus=is_bus,
        value=value,
        p99_us=late[len(late) // 2] if late else None,
        cpu_s_per_million=outcome.cpu_s_per_million(),
        ratio=ratio,
        bar=bar,
        goal=entry.goal,
        met=met,
        error=outcome.errors[0] if outcome.errors else None,
    )


def render(rows: Sequence[Row], machine: dict[str, str]) -> RenderableType:
    """The table, what it was measured on, and which bars were missed."""
    table = Table(title="polybus bench", title_justify="left", show_lines=False, pad_edge=False)
    table.add_column("work", max_width=34)
    table.add_column("who")
    table.add_column("figure", justify="right")
    table.add_column("CPU s per M", justify="right")
    table.add_column("bus is", justify="right")
    table.add_column("bar", justify="right")
    table.add_column("")
    last = None
    for row in rows:
        new = row.scenario != last
        if new and last is not None:
            table.add_section()
        last = row.scenario
        table.add_row(
            f"{row.work} [dim]({row.scenario})[/dim]" if new else "",
            f"[bold]{row.who}[/bold]" if new else row.who,
            _figure(row),
            "" if row.cpu_s_per_million is None else f"{row.cpu_s_per_million:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f} ×",
            _bar(row),
            _verdict(row),
        )
    facts = Text("\n".join(f"{name}: {text}" for name, text in machine.items()), style="dim")
    return Group(table, facts, Text(""), Text(summary(rows)))


def summary(rows: Sequence[Row]) -> str:
    """How many bars were met, and each that was not."""
    held = [row for row in rows if row.met is not None]
    missed = [row for row in held if not row.met]
    lines = [f"{len(held) - len(missed)} of {len(held)} bars met."]
    unmeasured = sum(row.bar is not None for row in rows) - len(held)
    if unmeasured:
        lines.append(f"{unmeasured} more could not be measured: their peers did not run.")
    failed = {row.scenario for row in rows if row.error and row.is_bus}
    for row in missed:
        if row.scenario in failed:
            reached = "the bus failed"
        elif row.ratio is not None:
            reached = f"{row.ratio:.2f} × {row.who}"
        else:
            reached = _figure(row)
        lines.append(f"Not met: {row.scenario}: {reached}, the bar is {_bar(row)}.")
    wrong = [row for row in rows if row.error and not row.error.startswith("not installed")]
    lines += [f"Failed: {row.scenario}, {row.who}: {row.error}" for row in wrong]
    return "\n".join(lines)


def _figure(row: Row) -> str:
    if row.value is None:
        installed = not (row.error or "").startswith("not installed")
        return "failed" if installed else "not installed"
    if row.metric is Metric.LATENCY:
        return f"{row.value:.0f} µs, p99 {row.p99_us or 0:.0f}"
    if row.metric is Metric.MEMORY:
        return f"{row.value / 1024:.1f} KiB each"
    if row.metric is Metric.WAIT:
        return f"{row.value:.0f} ms"
    return f"{row.value / 1e6:.2f} M/s" if row.value >= 1e5 else f"{row.value / 1e6:.3f} M/s"


def _bar(row: Row) -> str:
    if row.bar is None:
        return ""
    sign = "≥" if row.metric.more_is_better else "≤"
    if row.is_bus:
        return f"{sign} {row.bar / 1024:g} KiB"
    goal = "" if row.goal is None else f" (goal {row.goal:g})"
    return f"{sign} {row.bar:g} ×{goal}"


def _verdict(row: Row) -> str:
    if row.met is None:
        return ""
    return "[green]met[/green]" if row.met else "[red]not met[/red]"
