"""What `polybus up` prints: live tables on a terminal, plain lines elsewhere, commands to try."""

import contextlib
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from polybus.cli.output import table_lines
from polybus.cli.up.demo import ORDERS, BusPorts
from polybus.cli.up.figures import Figures
from polybus.config import PORT, Config

PLAIN_INTERVAL_S = 5.0
# Not worth a line: the next step follows within a second.
STARTING = "starting"
ROWS_SHOWN = 12


class PlainDisplay:
    """Lines for a log file: each step and alert at once, figures every few seconds."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._shown_s = time.monotonic()
        self._steps: dict[str, str] = {}
        self._alerts_shown = 0

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, name: str, text: str, *, done: bool = False) -> None:
        """Show the progress of a part of the start; each name has one current text."""
        if self._steps.get(name) != text and text != STARTING:
            self._steps[name] = text
            self.say(f"{name}: {text}")

    def say(self, text: str) -> None:
        """Print a notice."""
        click.echo(text)
        sys.stdout.flush()

    def show(self, figures: Figures) -> None:
        """Show the newest figures."""
        new = figures.alert_count - self._alerts_shown
        self._alerts_shown = figures.alert_count
        for alert in list(figures.alerts)[-new:] if new else ():
            self.say(f"alert: {alert}")
        if time.monotonic() - self._shown_s >= self._interval_s:
            self._shown_s = time.monotonic()
            self.say(summary(figures))


class LiveDisplay(PlainDisplay):
    """Steps and figures at the bottom of a terminal; notices scroll above them."""

    def __init__(self) -> None:
        super().__init__()
        self._console = Console(highlight=False)
        self._live_steps: dict[str, tuple[str, bool]] = {}
        # One spinner for all steps and refreshes: a new one would always show its first frame.
        self._spinner = Spinner("dots")
        self._figures: Figures | None = None
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._figures is not None:
            self._console.print(summary(self._figures), markup=False)

    def step(self, name: str, text: str, *, done: bool = False) -> None:
        self._live_steps[name] = (text, done)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, figures: Figures) -> None:
        self._figures = figures

    def _render(self) -> RenderableType:
        lines = Text()
        spinner = str(self._spinner.render(time.monotonic()))
        for name, (text, done) in self._live_steps.items():
            mark, style = ("✓", "green") if done else (spinner, "yellow")
            lines.append(f"{mark} {name}: {text}\n", style=style)
        return Group(lines, *(_tables(self._figures) if self._figures is not None else ()))


def display() -> PlainDisplay:
    return LiveDisplay() if sys.stdout.isatty() else PlainDisplay()


def summary(figures: Figures) -> str:
    """All figures on one line."""
    clock = time.strftime("%H:%M:%S")
    parts = [f"{clock} in {figures.messages_in} ({figures.rate_per_s:.0f}/s)"]
    if figures.flows:
        running = sum(_is_running(flow) for flow in figures.flows)
        lag = sum(flow.get("lag") or 0 for flow in figures.flows)
        parts.append(f"flows {running}/{len(figures.flows)} running, lag {lag}")
    if figures.tables:
        rows = " ".join(f"{name}={count}" for name, count in figures.tables.items())
        parts.append(f"tables {rows}")
    parts.append(f"alerts {figures.alert_count}")
    return " · ".join(parts)


def _tables(figures: Figures) -> list[Text]:
    busiest = sorted(figures.topics.items(), key=lambda item: -item[1].messages_in)
    topics = [
        (name, one.messages_in, round(one.rate_per_s), one.messages_out, " ".join(one.published_on))
        for name, one in busiest
    ]
    flows = [
        (
            f"{flow.get('pipeline', '')}.{flow.get('flow', '')}",
            flow.get("error") or flow.get("state", ""),
            flow.get("rows"),
            round(flow.get("rows_per_s") or 0),
            flow.get("lag"),
            None if flow.get("batch_ms") is None else round(flow["batch_ms"]),
        )
        for flow in figures.flows
    ]
    return [
        *_table(("topic", "in", "in/s", "out", "published on"), topics),
        *_table(("flow", "state", "rows", "rows/s", "lag", "batch ms"), flows),
        *_table(("table", "rows"), list(figures.tables.items())),
        *(Text(f"! {alert}", style="red") for alert in figures.alerts),
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[Text]:
    if not rows:
        return []
    lines = table_lines(columns, rows[:ROWS_SHOWN])
    return [Text("\n".join([*lines, ""]), no_wrap=True, overflow="ellipsis")]


def _is_running(flow: Mapping[str, Any]) -> bool:
    """A flow that waits for its next trigger without an error counts as running."""
    waiting = flow.get("state") == "waiting" and not flow.get("error")
    return waiting or flow.get("state") == "running"


def first_steps(ports: BusPorts, config: Config, *, demo: bool, pipeline: bool) -> str:
    """The addresses of a bus that is ready, and commands to try."""
    polybus = _program()
    at = "" if ports.tcp == PORT else f" --url boson://127.0.0.1:{ports.tcp}"
    topic = ORDERS if demo else "news"
    queues = [one.topic or "" for one in config.connectors if "queue" in one.protocols]
    addresses = f"Boson, goMS, msgstream and HTTP on 127.0.0.1:{ports.tcp}"
    addresses += f", goMS datagrams on {ports.udp}" if ports.udp else ""
    addresses += f", the queue {queues[0]} on {ports.queue}" if ports.queue else ""
    commands = [] if demo else [f"topics create {topic} --data {config.data}"]
    commands += [f'publish {topic} "hello from me"{at}', f"tail {topic} --from earliest{at}"]
    if pipeline:
        query = "SELECT topic, count(*) FROM silver GROUP BY topic"
        commands += [f"tail '$alerts'{at}", f'sql "{query}" --data {config.data}']
    return "\n".join(
        [
            "",
            addresses,
            f"The log and the tables are in {config.data} (plain Arrow and Parquet files).",
            "",
            "Try, in another terminal:",
            "",
            *(f"  {polybus} {command}" for command in commands),
            "",
            f"or open http://127.0.0.1:{ports.tcp}/ in a browser. Ctrl-C stops everything.",
            "",
        ]
    )


def _program() -> str:
    """The command `polybus` as the user must type it."""
    path = Path(sys.executable).parent / "polybus"
    on_path = shutil.which("polybus")
    if on_path is not None and Path(on_path).resolve() == path.resolve():
        return "polybus"
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
