"""What `polybus up` shows: figures of the bus, the pipeline and the tables, and commands to try.

On a terminal they are live, elsewhere plain lines. The live part never has more lines than the
terminal: alerts come first, and lines without room are counted.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from polybus.cli.common.output import Quantity, count, size, span, table_lines
from polybus.cli.pipeline.display import is_failing
from polybus.cli.up.demo import ORDERS, BusPorts
from polybus.cli.up.figures import Figures, is_running
from polybus.config import PORT, Config

PLAIN_INTERVAL_S = 5.0
# Not shown: the next step follows within a second.
STARTING = "starting"
ALERTS_SHOWN = 3
FLOWS_SHOWN = 6


class PlainDisplay:
    """Lines for a log file: each step and alert at once, figures every few seconds."""

    def __init__(self, interval_s: float = PLAIN_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._shown_s = time.monotonic()
        self._steps: dict[str, str] = {}
        self._alerts_shown = 0

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
        self._began_s: dict[str, float] = {}
        # One spinner for all steps and refreshes: a new one would always show its first frame.
        self._spinner = Spinner("dots")
        self._figures: Figures | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator["LiveDisplay"]:
        with Live(
            get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True
        ):
            yield self
        if self._figures is not None:
            self._console.print(summary(self._figures), markup=False)

    def step(self, name: str, text: str, *, done: bool = False) -> None:
        self._live_steps[name] = (text, done)
        self._began_s.setdefault(name, time.monotonic())

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, figures: Figures) -> None:
        self._figures = figures

    def _render(self) -> RenderableType:
        spinner = str(self._spinner.render(time.monotonic()))
        lines = []
        for name, (text, done) in self._live_steps.items():
            mark, style = ("✓", "green") if done else (spinner, "yellow")
            # A counting number shows that it is alive.
            elapsed = "" if done else f" ({time.monotonic() - self._began_s[name]:.0f} s)"
            lines.append(Text(f"{mark} {name}: {text}{elapsed}", style=style))
        if self._figures is not None:
            # The cursor stands below the last line.
            lines += screen_lines(self._figures, self._console.height - 1 - len(lines))
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def display() -> contextlib.AbstractContextManager[PlainDisplay]:
    is_terminal = sys.stdout.isatty()
    return LiveDisplay().running() if is_terminal else contextlib.nullcontext(PlainDisplay())


def summary(figures: Figures) -> str:
    """All figures on one line."""
    tables = " · ".join([] if not figures.tables else [f"tables {_rows_text(figures)}"])
    parts = [time.strftime("%H:%M:%S"), _traffic_text(figures), *_flows_text(figures), tables]
    return " · ".join(part for part in [*parts, f"alerts {figures.alert_count}"] if part)


def screen_lines(figures: Figures, lines_max: int) -> list[Text]:
    """The figures in at most `lines_max` lines: alerts, a summary, topics, flows, tables."""
    alerts = [Text(f"! {one}", style="red") for one in reversed(figures.alerts)][:ALERTS_SHOWN]
    parts = [f"up {span(figures.uptime_s)}", _traffic_text(figures), *_flows_text(figures)]
    lines = [*alerts, Text(" · ".join([*parts, f"alerts {figures.alert_count}"]), style="bold")]
    below = [Text(f"tables: {_rows_text(figures)}")] if figures.tables else []
    flows = _table(_flow_rows(figures), FLOW_COLUMNS, min(FLOWS_SHOWN, lines_max // 4), "flows")
    room = lines_max - len(lines) - len(below) - len(flows) - 2
    topics = _table(_topic_rows(figures), TOPIC_COLUMNS, max(room, 1), "topics")
    return [*lines, *topics, *flows, *below][: max(lines_max, 1)]


def _traffic_text(figures: Figures) -> str:
    rate = f"{count(figures.rate_per_s)}/s"
    rate += f", {size(figures.bytes_per_s)}/s" if figures.bytes_per_s else ""
    return f"in {count(figures.messages_in)} messages ({rate})"


def _flows_text(figures: Figures) -> list[str]:
    if not figures.flows:
        return []
    running = sum(map(is_running, figures.flows))
    failing = sum(map(is_failing, figures.flows))
    failing_text = f", {failing} failing" if failing else ""
    lag = "not known yet" if figures.lag is None else count(figures.lag)
    return [f"flows {running}/{len(figures.flows)} running{failing_text}, lag {lag}"]


def _rows_text(figures: Figures) -> str:
    return ", ".join(f"{name} {count(rows)}" for name, rows in figures.tables.items())


TOPIC_COLUMNS = ("topic", "in", "in/s", "bytes/s", "out", "published on")
FLOW_COLUMNS = ("flow", "state", "rows", "rows/s", "lag", "batch", "error")


def _topic_rows(figures: Figures) -> list[list[object]]:
    busiest = sorted(
        figures.topics.values(), key=lambda one: (-one["rate-per-s"], -one["messages-in"])
    )
    return [
        [
            *(one["name"], count(one["messages-in"]), count(one["rate-per-s"])),
            size(one["bytes-rate-per-s"]) if "bytes-in" in one else None,
            *(count(one["messages-out"]), " ".join(one["published-on"])),
        ]
        for one in busiest
    ]


def _flow_rows(figures: Figures) -> list[list[object]]:
    return [
        [
            f"{flow.get('pipeline')}.{flow.get('flow')}",
            flow.get("state"),
            *(_known(flow.get(name)) for name in ("rows", "rows_per_s", "lag")),
            None if flow.get("batch_ms") is None else Quantity(f"{flow['batch_ms']:,} ms"),
            flow.get("error") or "",
        ]
        for flow in sorted(figures.flows, key=lambda flow: not is_failing(flow))
    ]


def _known(number: float | None) -> Quantity | None:
    return None if number is None else count(number)


def _table(
    rows: Sequence[Sequence[object]], columns: Sequence[str], rows_max: int, what: str
) -> list[Text]:
    if not rows:
        return []
    shown = len(rows) if len(rows) <= rows_max else max(rows_max - 1, 1)
    heading, *lines = table_lines(columns, rows[:shown])
    left = len(rows) - shown
    more = [Text(f"… and {left} more {what}", style="dim")] if left else []
    return [Text(heading, style="dim"), *(Text(line) for line in lines), *more]


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
            f"The log is in {config.log}, the tables are in {config.data} (plain Parquet files)."
            if config.is_cluster
            else f"The log and the tables are in {config.data} (plain Arrow and Parquet files).",
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
