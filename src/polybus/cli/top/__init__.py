"""`polybus top`: the bus live in a terminal, with keys to sort and to open a topic."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from urllib.parse import quote

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from polybus.cli.common import admin
from polybus.cli.common.options import existing_data, settings_options
from polybus.cli.top.screen import TopFigures, TopView, frame
from polybus.config import Config
from polybus.errors import PolybusError, UsageError

INTERVAL_S = 1.0
MESSAGES_SHOWN = 50


@click.command(
    epilog="""\b
Examples:
  polybus top
  polybus top --once --data /var/lib/polybus
"""
)
@click.option("--once", is_flag=True, help="Print one picture and end.")
@settings_options
def top(config: Config, once: bool) -> None:
    """Show the bus live: rates, topics, consumers, connections.

    Keys: arrows or j and k choose a topic, Enter opens it, Escape closes it, s changes the order,
    q ends.
    """
    run = admin.running(existing_data(config))
    if run is None:
        text = f"no bus runs on {config.data}: start it with polybus serve"
        raise UsageError("client.unreachable", text)
    view, console = TopView(), Console(highlight=False)
    if once or not (sys.stdin.isatty() and console.is_terminal):
        for line in frame(read_figures(run, view), view, console.height):
            click.echo(line.plain)
        return
    with _keys() as key_within, Live(console=console, screen=True, auto_refresh=False) as live:
        due_s, figures = 0.0, TopFigures()
        while not view.is_over:
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + INTERVAL_S
                with contextlib.suppress(PolybusError):
                    figures = read_figures(run, view)
            lines = frame(figures, view, console.height)
            live.update(Text("\n", no_wrap=True, overflow="ellipsis").join(lines), refresh=True)
            key = key_within(max(0.0, due_s - time.monotonic()))
            if key:
                view.press(key, figures)
                due_s = 0.0 if key == "enter" else due_s


def read_figures(run: admin.RunningBus, view: TopView) -> TopFigures:
    """What the bus says now, and the last messages of the topic that is open."""
    figures = TopFigures(
        topics=admin.ask(run, "GET", "/v1/topics")["topics"],
        consumers=admin.ask(run, "GET", "/v1/consumers")["consumers"],
        series=admin.ask(run, "GET", "/v1/figures").get("series", {}),
    )
    found = [topic for topic in figures.topics if topic["name"] == view.opened]
    if found:
        first = max(found[0]["start"], found[0]["stop"] - MESSAGES_SHOWN)
        path = f"/v1/topics/{quote(view.opened, safe='')}/messages?offset={first}"
        figures.messages = admin.ask(run, "GET", path)["messages"]
    return figures


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
    """Inside the block, a function waits for a key and returns its name, or nothing."""
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
