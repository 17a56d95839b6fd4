"""What `polybus up` shows: live tables on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import click

from polybus.cli.up.figures import Figures

if TYPE_CHECKING:
    from rich.console import RenderableType

PLAIN_INTERVAL_S = 5.0
# Not worth a line: what it comes to follows within the second.
STARTING = "starting"
FLOWS_SHOWN = 12
TOPICS_SHOWN = 12
TABLES_SHOWN = 12


class Display(Protocol):
    """Where status, notices and figures go."""

    def __enter__(self) -> Display: ...

    def __exit__(self, *_: object) -> None: ...

    def step(self, name: str, text: str, *, done: bool = False) -> None:
        """How far the start of something is; the last word of each name is shown."""

    def say(self, text: str) -> None:
        """Something to be read, that stays."""

    def show(self, figures: Figures) -> None:
        """The newest figures."""


def display() -> Display:
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


class PlainDisplay:
    """Lines for a log file: each step as it comes, figures every few seconds."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._shown_s = time.monotonic()
        self._told: dict[str, str] = {}
        self._alerts_told = 0

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, name: str, text: str, *, done: bool = False) -> None:
        if self._told.get(name) != text and text != STARTING:
            self._told[name] = text
            self.say(f"{name}: {text}")

    def say(self, text: str) -> None:
        click.echo(text)
        sys.stdout.flush()

    def show(self, figures: Figures) -> None:
        new = figures.alert_count - self._alerts_told
        self._alerts_told = figures.alert_count
        for alert in list(figures.alerts)[-new:] if new else ():
            self.say(f"alert: {alert}")
        if time.monotonic() - self._shown_s >= self._interval_s:
            self._shown_s = time.monotonic()
            self.say(summary(figures))


def summary(figures: Figures) -> str:
    """All figures on one line."""
    clock = time.strftime("%H:%M:%S")
    parts = [f"{clock} in {figures.messages_in} ({figures.rate_per_s:.0f}/s)"]
    if figures.flows:
        running = sum(_is_at_work(flow) for flow in figures.flows)
        lag = sum(flow.get("lag") or 0 for flow in figures.flows)
        parts.append(f"flows {running}/{len(figures.flows)} running, lag {lag}")
    if figures.tables:
        rows = " ".join(f"{name}={count}" for name, count in figures.tables.items())
        parts.append(f"tables {rows}")
    parts.append(f"alerts {figures.alert_count}")
    return " · ".join(parts)


class LiveDisplay:
    """One screen that is painted again twice a second; what is said scrolls away above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._console = Console(highlight=False)
        self._steps: dict[str, tuple[str, bool]] = {}
        self._spinner = Spinner("dots")
        self._figures: Figures | None = None
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._figures is not None:
            self._console.print(summary(self._figures), markup=False)

    def step(self, name: str, text: str, *, done: bool = False) -> None:
        self._steps[name] = (text, done)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, figures: Figures) -> None:
        self._figures = figures

    def _render(self) -> RenderableType:
        from rich.console import Group

        parts: list[RenderableType] = [self._render_steps()]
        if self._figures is not None:
            parts += _tables(self._figures)
        return Group(*parts)

    def _render_steps(self) -> RenderableType:
        from rich.text import Text

        lines = Text()
        # One spinner for all steps, and for all paintings: a new one would never turn.
        turning = str(self._spinner.render(time.monotonic()))
        for name, (text, done) in self._steps.items():
            mark, style = ("✓", "green") if done else (turning, "yellow")
            lines.append(f"{mark} {name}: {text}\n", style=style)
        return lines


def _tables(figures: Figures) -> list[RenderableType]:
    from rich.text import Text

    shown: list[RenderableType] = []
    busiest = sorted(figures.topics.items(), key=lambda item: -item[1].messages_in)
    if busiest:
        rows = [
            (
                name,
                one.messages_in,
                f"{one.rate_per_s:.0f}",
                one.messages_out,
                _words(one.protocols),
            )
            for name, one in busiest[:TOPICS_SHOWN]
        ]
        shown.append(_grid(("topic", "in", "in/s", "out", "published on"), rows, numbers=(1, 2, 3)))
    if figures.flows:
        flows = [_flow_row(flow) for flow in figures.flows[:FLOWS_SHOWN]]
        headings = ("flow", "state", "rows", "rows/s", "lag", "batch ms")
        shown.append(_grid(headings, flows, numbers=(2, 3, 4, 5)))
    if figures.tables:
        tables = list(figures.tables.items())[:TABLES_SHOWN]
        shown.append(_grid(("table", "rows"), tables, numbers=(1,)))
    shown += [Text(f"! {alert}", style="red") for alert in figures.alerts]
    return shown


def _flow_row(flow: dict[str, Any]) -> tuple[object, ...]:
    name = f"{flow.get('pipeline', '')}.{flow.get('flow', '')}"
    rate, lag, batch_ms = flow.get("rows_per_s"), flow.get("lag"), flow.get("batch_ms")
    rows = flow.get("rows")
    return (
        name,
        flow.get("error") or flow.get("state", ""),
        "-" if rows is None else rows,
        f"{rate or 0:.0f}",
        "-" if lag is None else lag,
        "-" if batch_ms is None else f"{batch_ms:.0f}",
    )


def _grid(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[int]
) -> RenderableType:
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, padding=(0, 1), pad_edge=False)
    for index, heading in enumerate(headings):
        justify: Any = "right" if index in numbers else "left"
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        # Names come from strangers: plain text, with nothing that steers the terminal.
        table.add_row(*(Text(_printable(str(cell))) for cell in row))
    return table


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _words(words: set[str]) -> str:
    return " ".join(sorted(words))


def _is_at_work(flow: Mapping[str, Any]) -> bool:
    """One that only waits for its next look, as `watch` does, is at work too."""
    return flow.get("state") == "running" or (
        flow.get("state") == "waiting" and not flow.get("error")
    )
