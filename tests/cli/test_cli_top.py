"""`polybus top` and `polybus graph`: what they show of a running bus, and how keys work."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_kit import COMMAND, ServedBus, environment, polybus, serve

from polybus.cli.graph import drawing, lines_of
from polybus.cli.top.screen import TopFigures, TopView, frame

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBus]:
    with serve(tmp_path_factory.mktemp("top") / "data", "news", "sport") as running:
        assert polybus("publish", "news", "hello", "--url", running.url()).returncode == 0
        yield running


def topic(name: str, rate: float, lag: int | None = None) -> dict[str, Any]:
    rates = {"in-per-s": rate, "out-per-s": 0.0, "bytes-in-per-s": 1500.0}
    return {"name": name, "start": 0, "stop": 12_345, "subscribers": 1, "lag": lag, **rates}


def busy() -> TopFigures:
    protocols = ("goms", "boson-frames", "boson-properties", "http", "msgstream", "queue")
    series = {"in.messages": 123_456.0, "in.bytes": 512e6, "out.messages": 1e6, "out.bytes": 9e9}
    series |= {"connections": 12_345.0, "sessions": 1234.0, "memory-bytes": 123e6, "cpu": 0.25}
    series |= {f"in.messages.{one}": 100_000.0 + at for at, one in enumerate(protocols)}
    time = "2026-01-31T12:00:00.000Z"
    event = {"kind": "connected", "time": time, "protocol": "goms", "peer": "x" * 80}
    return TopFigures(
        topics=[topic(f"t{number:03}", float(number), number) for number in range(100)],
        consumers=[
            {"group": "etl", "failed": True, "lag": 7, "lag-s": 3.25, "rows-per-s": 1.0},
            *({"group": f"g{at}", "failed": False, "lag": 1, "rows-per-s": 1.0} for at in "abcd"),
        ],
        sample={
            "series": {**series, "fsync-ms": None},
            "groups": {"etl": 7},
            "group-lag-s": {"etl": 3.25},
            "alerts": [{"code": "log.full", "text": "no room\x1b[2J"}],
        },
        alerts=[{"timestamp": time, "value": {"text": f"t{at} is quiet"}} for at in range(2)],
        events=[{"timestamp": time, "value": {"events": [event] * 9}}],
        messages=[{"offset": 4, "protocol": "goms", "value": {"a": "\x1b[2J"}}],
    )


@pytest.mark.parametrize("lines", [3, 24, 200])
def test_the_picture_fits_the_terminal(lines: int) -> None:
    shown = [line.plain for line in frame(busy(), TopView(), lines)]
    assert len(shown) <= lines
    assert shown[0].startswith("in 123,456/s, 488 MiB/s")
    assert "\x1b" not in "".join(shown)
    if lines == 24:
        assert all(len(line) <= 80 for line in shown if " connected " not in line)
        assert shown[1].startswith("in and out by protocol: queue 100,005/0 · msgstream 100,004/0")
        assert shown[3] == "problems: 1 · lag 7 messages, 3.2 s · disk free 0 B"
        assert shown[4].startswith("! log.full: no room") and shown[5].endswith(" t1 is quiet")
        assert "t099" in shown[7] and "12,345" in shown[7]
        assert any("more topics" in line for line in shown)
        assert "consumer etl: lag 7 (3.2 s), failed" in shown
        assert sum(" connected " in line for line in shown) == 3
        assert shown[-1].startswith("↑↓ choose")


def test_the_picture_says_since_when_no_bus_answers() -> None:
    shown = [line.plain for line in frame(busy(), TopView(lost_at="12:00:01"), 24)]
    assert shown[0] == "no answer from the bus since 12:00:01, trying again"
    assert len(shown) == 24 and any("t099" in line for line in shown)


def test_a_bus_that_has_said_nothing_yet_is_shown() -> None:
    shown = [line.plain for line in frame(TopFigures(), TopView(), 24)]
    assert "in and out by protocol: none yet" in shown
    assert "healthy · lag 0 messages, 0.0 s · disk free 0 B" in shown


def test_keys_sort_choose_open_and_close() -> None:
    figures, view = busy(), TopView()
    view.press("down", figures)
    view.press("enter", figures)
    assert view.opened == "t098"
    text = "\n".join(line.plain for line in frame(figures, view, 24))
    assert "t098" in text and "4  goms" in text and "\x1b" not in text
    view.press("escape", figures)
    for _ in range(4):
        view.press("s", figures)
    assert (view.opened, view.sort) == ("", "name")
    assert "t000" in frame(figures, view, 24)[7].plain
    for _ in range(200):
        view.press("down", figures)
    assert any("▶" in line.plain and "t099" in line.plain for line in frame(figures, view, 24))
    view.press("q", figures)
    assert view.is_over


def test_one_picture_is_printed_where_there_is_no_terminal(bus: ServedBus) -> None:
    done = polybus("top", "--once", "--data", str(bus.data))
    assert done.returncode == 0, done.stderr
    assert b"news" in done.stdout and b"connections" in done.stdout
    (empty := bus.data.parent / "empty").mkdir()
    refused = polybus("top", "--data", str(empty))
    assert refused.returncode == 1 and b"polybus serve" in refused.stderr


class Painted:
    """`polybus top` on a terminal of 80 by 24."""

    def __init__(self, data: Path) -> None:
        self.terminal, theirs = pty.openpty()
        size = environment(TERM="xterm", COLUMNS="80", LINES="24")
        command = [*COMMAND, "top", "--data", str(data)]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=size
        )
        os.close(theirs)

    def until(self, *texts: bytes) -> bytes:
        """Read until one of the texts is painted, and return it."""
        painted, deadline = b"", time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            painted += os.read(self.terminal, 65536)
            for text in texts:
                if text in painted:
                    return text
        raise AssertionError(painted)

    def press(self, key: bytes) -> None:
        os.write(self.terminal, key)

    def end(self) -> int:
        self.press(b"q")
        with contextlib.suppress(OSError):
            while os.read(self.terminal, 65536):
                pass
        os.close(self.terminal)
        return self.process.wait(TIMEOUT_S)


def test_on_a_terminal_it_runs_until_a_key_ends_it(bus: ServedBus) -> None:
    top = Painted(bus.data)
    top.until(b"sport")
    top.press(b"\n")
    top.until(b"no messages", b"hello")
    assert top.end() == 0


def test_a_bus_that_goes_away_is_missed_until_it_is_back(tmp_path: Path) -> None:
    with serve(tmp_path / "data", "news"):
        top = Painted(tmp_path / "data")
        top.until(b"healthy")
    top.until(b"no answer from the bus since ")
    with serve(tmp_path / "data", "sport"):
        top.until(b"sport")
        assert top.end() == 0


NODES: list[dict[str, Any]] = [
    {"id": "p", "kind": "producer", "label": "10.0.0.5", "protocol": "goms"},
    {"id": "t", "kind": "topic", "label": "<b>orders</b>"},
    {"id": "s", "kind": "subscription", "label": "goms", "count": 3},
    {"id": "f", "kind": "flow", "label": "etl", "lag": 1234},
    {"id": "x", "kind": "table", "label": "silver"},
]
EDGES: list[dict[str, Any]] = [
    {"from": "p", "to": "t", "messages-per-s": 12.5},
    {"from": "t", "to": "s", "messages-per-s": 25.0},
    {"from": "t", "to": "f", "messages-per-s": 0.0},
    {"from": "f", "to": "x", "messages-per-s": 0.0},
]


def test_the_graph_as_text_has_both_sides_of_each_topic() -> None:
    text = "\n".join(lines_of(NODES, EDGES))
    assert "← producer     10.0.0.5 (goms)" in text and "12/s" in text
    assert "→ subscription goms ×3" in text and "etl, lag 1,234" in text
    assert "→ table        silver" in text


def test_the_drawing_is_an_svg_in_which_names_are_text() -> None:
    drawn = ElementTree.fromstring(drawing(NODES, EDGES))
    texts = [element.text for element in drawn.iter() if element.tag.endswith("}text")]
    assert "<b>orders</b>" in texts and "25/s" in texts
    assert sum(element.tag.endswith("}rect") for element in drawn.iter()) == len(NODES)


def test_the_graph_of_a_running_bus_is_shown_and_drawn(bus: ServedBus, tmp_path: Path) -> None:
    found = json.loads(polybus("graph", "--json", "--data", str(bus.data)).stdout)
    assert {"id": "topic:news", "kind": "topic", "label": "news"}.items() <= next(
        node for node in found["nodes"] if node["label"] == "news"
    ).items()
    file = tmp_path / "flow.svg"
    done = polybus("graph", "--svg", str(file), "--data", str(bus.data))
    assert done.returncode == 0, done.stderr
    assert ElementTree.parse(file).getroot().tag.endswith("}svg")
    assert polybus("graph", "--data", str(bus.data)).returncode == 0
