"""What `polybus up` shows: figures of the bus, the pipeline and the tables, and commands to try.

On a terminal they are live tables, elsewhere plain lines.
"""

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from polybus.cli.output import table_lines
from polybus.cli.pipeline.display import flow_table, is_failing
from polybus.cli.up.demo import ORDERS, BusPorts
from polybus.client import connect
from polybus.client.http.blocking import request_json
from polybus.config import PORT, Config
from polybus.errors import PolybusError

PLAIN_INTERVAL_S = 5.0
# Not worth a line: the next step follows within a second.
STARTING = "starting"
ROWS_SHOWN = 12
ALERTS_SHOWN = 5
ALERT_CHARS_MAX = 200
ANSWER_TIMEOUT_S = 5.0
RETRY_S = 1.0


class Figures:
    """Everything that is displayed, of the bus at a port and its data folder.

    `topics` are as the bus lists them, and their rates; `flows` are the pipeline's own figures.
    """

    def __init__(self, port: int = 0, data: Path = Path()) -> None:
        self.topics: dict[str, dict[str, Any]] = {}
        self.flows: list[dict[str, Any]] = []
        self.tables: dict[str, int] = {}
        self.alerts: deque[str] = deque(maxlen=ALERTS_SHOWN)
        self.alert_count = 0
        self._port = port
        self._data = data
        self._updated_s = 0.0
        self._tables: dict[Path, Any] = {}

    @property
    def messages_in(self) -> int:
        return sum(one["messages-in"] for one in self.topics.values())

    @property
    def rate_per_s(self) -> float:
        return float(sum(one["rate-per-s"] for one in self.topics.values()))

    async def update(self) -> None:
        """Read new figures; while the bus does not answer, the old ones stay."""
        with contextlib.suppress(PolybusError, OSError):
            self._count(await asyncio.to_thread(self._topics))
        self.tables = await asyncio.to_thread(self._table_rows)

    def _topics(self) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self._port}"
        answer = request_json(url, "GET", "/v1/topics?system=true", timeout_s=ANSWER_TIMEOUT_S)
        found: list[dict[str, Any]] = answer["topics"]
        return found

    def _count(self, found: list[dict[str, Any]]) -> None:
        now_s = time.monotonic()
        seconds = now_s - self._updated_s if self._updated_s else 0.0
        before, self.topics = self.topics, {}
        for one in found:
            if one["messages-in"] or one["messages-out"]:
                known = before.get(one["name"], {"messages-in": 0})["messages-in"]
                # The counters of a restarted bus begin at 0.
                new = max(0, one["messages-in"] - known)
                one["rate-per-s"] = new / seconds if seconds else 0.0
                self.topics[one["name"]] = one
        self._updated_s = now_s

    def _table_rows(self) -> dict[str, int]:
        """The rows of each table that can be read."""
        rows: dict[str, int] = {}
        folder = self._data / "tables"
        if not folder.is_dir() or find_spec("deltalake") is None:
            return rows
        from polybus.lake.table import LakeTable

        for path in sorted(folder.iterdir()):
            table = self._tables.setdefault(path, LakeTable(path))
            with contextlib.suppress(PolybusError, OSError):
                if table.exists:
                    rows[table.name] = table.rows
        return rows

    async def follow_alerts(self) -> None:
        """Add each alert as it arrives, until cancelled."""
        while True:
            try:
                async with connect(f"boson://127.0.0.1:{self._port}") as client:
                    async for message in client.subscribe("$alerts"):
                        self.alert_count += 1
                        self.alerts.append(alert_text(message.value))
            except PolybusError:
                # The bus is restarting, or its version has no alerts.
                await asyncio.sleep(RETRY_S)


def alert_text(value: bytes) -> str:
    """Any alert as one printable line."""
    try:
        alert = json.loads(value)
    except ValueError:
        alert = None
    if not isinstance(alert, dict):
        return repr(value[:100])
    text = alert.get("text")
    shown = text if isinstance(text, str) else json.dumps(alert)
    return "".join(char if char.isprintable() else "?" for char in shown)[:ALERT_CHARS_MAX]


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


def display() -> contextlib.AbstractContextManager[PlainDisplay]:
    is_terminal = sys.stdout.isatty()
    return LiveDisplay().running() if is_terminal else contextlib.nullcontext(PlainDisplay())


def summary(figures: Figures) -> str:
    """All figures on one line."""
    clock = time.strftime("%H:%M:%S")
    parts = [f"{clock} in {figures.messages_in} ({figures.rate_per_s:.0f}/s)"]
    if figures.flows:
        running = sum(_is_running(flow) for flow in figures.flows)
        lag = sum(flow.get("lag") or 0 for flow in figures.flows)
        failing = sum(map(is_failing, figures.flows))
        failing_text = f", {failing} failing" if failing else ""
        parts.append(f"flows {running}/{len(figures.flows)} running{failing_text}, lag {lag}")
    if figures.tables:
        rows = " ".join(f"{name}={count}" for name, count in figures.tables.items())
        parts.append(f"tables {rows}")
    parts.append(f"alerts {figures.alert_count}")
    return " · ".join(parts)


def _tables(figures: Figures) -> list[RenderableType]:
    busiest = sorted(figures.topics.values(), key=lambda one: -one["messages-in"])
    topics = [
        (
            *(one["name"], one["messages-in"], round(one["rate-per-s"]), one["messages-out"]),
            " ".join(one["published-on"]),
        )
        for one in busiest
    ]
    flows: list[RenderableType] = []
    if figures.flows:
        flows = [flow_table(figures.flows[:ROWS_SHOWN]), ""]
    return [
        *_table(("topic", "in", "in/s", "out", "published on"), topics),
        *flows,
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
