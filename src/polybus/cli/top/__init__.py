"""`polybus top`: the bus live in a terminal, with keys to sort and to open a topic."""

import contextlib
import functools
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from polybus.cli.common import admin
from polybus.cli.common.options import existing_data, settings_options
from polybus.cli.top.screen import ALERTS_SHOWN, EVENTS_SHOWN, TopFigures, TopView, frame
from polybus.config import Config
from polybus.errors import PolybusError, UsageError
from polybus.names import is_reserved

INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 5.0
MESSAGES_SHOWN = 50


@click.command(
    epilog="""\b
Examples:
  polybus top
  polybus top --once --data /var/lib/polybus
"""
)
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@settings_options
def top(config: Config, once: bool) -> None:
    """Show the bus live: rates, health, alerts, topics, consumers, events.

    While no bus answers, the last figures stay, with a line that says so.

    Keys: arrows or j and k choose a topic, Enter opens it, Escape closes it, s changes the order,
    q ends.
    """
    data = existing_data(config)
    view, console = TopView(), Console(highlight=False)
    figures = read_figures(data, view)
    if once or not (sys.stdin.isatty() and console.is_terminal):
        for line in frame(figures, view, console.height):
            click.echo(line.plain)
        return
    with _keys() as key_within, Live(console=console, screen=True, auto_refresh=False) as live:
        due_s = time.monotonic() + INTERVAL_S
        while not view.is_over:
            if time.monotonic() >= due_s:
                try:
                    figures = read_figures(data, view)
                    view.lost_at = ""
                except PolybusError:
                    view.lost_at = view.lost_at or time.strftime("%H:%M:%S")
                due_s = time.monotonic() + INTERVAL_S
            lines = frame(figures, view, console.height)
            live.update(Text("\n", no_wrap=True, overflow="ellipsis").join(lines), refresh=True)
            key = key_within(max(0.0, due_s - time.monotonic()))
            if key:
                view.press(key, figures)
                due_s = 0.0 if key == "enter" else due_s


def read_figures(data: Path, view: TopView) -> TopFigures:
    """The current figures of the bus, with the last messages of the open topic.

    Raises PolybusError if no bus answers.
    """
    run = admin.running(data)
    if run is None:
        text = f"no bus runs on {data}: start it with polybus serve"
        raise UsageError("client.unreachable", text)
    ask = functools.partial(admin.ask, run, "GET", timeout_s=ANSWER_TIMEOUT_S)
    topics = {one["name"]: one for one in ask("/v1/topics?system=true")["topics"]}

    def newest(name: str, number: int) -> list[dict[str, Any]]:
        if name not in topics:
            return []
        first = max(topics[name]["start"], topics[name]["stop"] - number)
        path = f"/v1/topics/{quote(name, safe='')}/messages?offset={first}"
        return list(ask(path)["messages"])

    return TopFigures(
        topics=[one for name, one in topics.items() if not is_reserved(name)],
        consumers=ask("/v1/consumers")["consumers"],
        sample=ask("/v1/figures"),
        alerts=newest("$alerts", ALERTS_SHOWN),
        events=newest("$events", EVENTS_SHOWN),
        messages=newest(view.opened, MESSAGES_SHOWN),
    )


NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\r": "enter",
    "\n": "enter",
    "\x1b": "escape",
    "\x03": "q",
    "k": "up",
    "j": "down",
}


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Inside the block, a function waits for a key and returns its name, or an empty text."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def within(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(descriptor, 8).decode(errors="replace")
        return NAMES.get(pressed, pressed)

    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield within
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
