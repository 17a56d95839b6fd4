"""The animated recording of a terminal in README: real commands on a real bus, in a real terminal.

`make screenshots` puts it into docs/img/terminal.svg; otherwise it goes to a temporary folder. The
picture must show the commands and what they write now, apart from numbers and the width of columns.
"""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from html import escape, unescape
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from polybus.testing import run_bus

ROOT = Path(__file__).parent.parent.parent
PICTURE = ROOT / "docs" / "img" / "terminal.svg"
COLUMNS, ROWS = 80, 24
CONSOLE = Console(width=COLUMNS)
COMMANDS = (
    """polybus publish orders '{"id": 7, "city": "Bern", "total": 19.5}' --receipt""",
    """polybus publish orders '{"id": 8, "city": "Rome", "total": 4.25}' --receipt""",
    "polybus tail orders --from earliest --count 2",
    "polybus topics list",
    "polybus graph",
)
NUMBER = re.compile(r"[0-9][0-9.,:]*( ?([KMGT]i)?B| ?(s|min|m|h|d))?\b")
RENEW = "docs/img/terminal.svg shows what a command no longer writes: run make screenshots"
TYPED_S, READ_S, END_S = 1.2, 1.0, 5.0
LINE_PX, CHARACTER_PX = 18, 8.4
COLOURS = {1: "#ff7b72", 2: "#7ee787", 3: "#f2cc60", 4: "#79c0ff", 5: "#d2a8ff", 6: "#76e3ea"}


def shown_by(command: str, folder: Path, url: str) -> str:
    """What a command writes to a terminal of this size."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (ROWS, COLUMNS))
    environment = os.environ | {"POLYBUS_URL": url, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    arguments = [sys.executable, "-m", "polybus.cli", *shlex.split(command)[1:]]
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        said = b""
        try:
            while some := os.read(controller, 1 << 16):
                said += some
        except OSError:  # The end, on Linux.
            pass
        os.close(controller)
    assert process.returncode == 0, said.decode()
    return said.decode().replace("\r\n", "\n")


def spans(line: Text, y: int) -> str:
    """A line as SVG, in the colours that it had."""
    parts = []
    for start, segment in enumerate(line.divide(range(1, len(line)))):
        style = segment.get_style_at_offset(CONSOLE, 0) if len(segment) else None
        number = style.color.number if style is not None and style.color is not None else None
        fill = COLOURS.get((number or 0) % 8)
        x = 16 + start * CHARACTER_PX
        colour = f' fill="{fill}"' if fill else ""
        if segment.plain.strip():
            parts.append(f'<tspan x="{x:.1f}"{colour}>{escape(segment.plain)}</tspan>')
    return f'<text y="{y}">{"".join(parts)}</text>'


def animated(recorded: list[tuple[str, str]]) -> str:
    """An SVG that shows the commands and what they wrote, one after the other, again and again."""
    moments: list[tuple[float, Text]] = []
    at_s = 0.3
    for command, said in recorded:
        at_s += TYPED_S
        moments.append((at_s, Text.assemble(("$ ", "green"), command)))
        at_s += READ_S
        moments += [(at_s, Text.from_ansi(line)) for line in said.rstrip("\n").split("\n")]
        moments.append((at_s, Text("")))
    whole_s = at_s + END_S
    frames, lines = [], []
    for number, (moment_s, line) in enumerate(moments):
        part = 100 * moment_s / whole_s
        hidden, visible = f"0%,{part:.2f}%{{opacity:0}}", f"{part + 0.01:.2f}%,100%{{opacity:1}}"
        frames.append(f"@keyframes l{number}{{{hidden}{visible}}}")
        drawn = spans(line, 52 + number * LINE_PX)
        style = f"animation:l{number} {whole_s:.1f}s infinite"
        lines.append(drawn.replace("<text ", f'<text style="{style}" ', 1))
    width, height = round(COLUMNS * CHARACTER_PX) + 32, 52 + len(moments) * LINE_PX
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        "<title>Publishing, reading and listing in a terminal</title><style>"
        "text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        "fill:#c9d1d9}" + "".join(frames) + "@media(prefers-reduced-motion){text{animation:none"
        "!important}}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
        '<circle cx="20" cy="18" r="5" fill="#ff5f56"/>'
        '<circle cx="38" cy="18" r="5" fill="#ffbd2e"/>'
        '<circle cx="56" cy="18" r="5" fill="#27c93f"/>' + "\n".join(lines) + "</svg>\n"
    )


def lines_of(svg: str) -> list[str]:
    """The lines of the picture; blanks are not drawn, so they follow from the places."""
    lines = []
    for drawn in re.findall(r"<text [^>]*>(.*?)</text>", svg):
        line = ""
        for x, character in re.findall(r'<tspan x="([0-9.]+)"[^>]*>([^<]*)</tspan>', drawn):
            line = line.ljust(round((float(x) - 16) / CHARACTER_PX)) + unescape(character)
        lines.append(line)
    return lines


def stable(lines: list[str]) -> list[str]:
    """Lines without what differs each time: numbers with their units, and the width of columns.

    Commands stay as they are.
    """
    return [
        line if line.startswith("$ ") else " ".join(NUMBER.sub("#", line).split()) for line in lines
    ]


@pytest.mark.slow
async def test_the_recording_shows_what_the_commands_write(tmp_path: Path) -> None:
    async with run_bus("orders", data=str(tmp_path / "polybus-data")) as node:
        url = f"http://127.0.0.1:{node.tcp_port}"
        recorded = []
        for command in COMMANDS:
            # The bus looks at its counters each second; until then it has no rates to list.
            node.http.figures.sample()
            said = await asyncio.to_thread(shown_by, command, tmp_path, url)
            recorded.append((command, said))
    svg = animated(recorded)
    folder = PICTURE.parent if os.environ.get("SCREENSHOTS") else tmp_path
    (folder / PICTURE.name).write_text(svg)

    assert "Bern" in recorded[2][1] and "orders" in recorded[3][1]
    assert all(max(map(len, map(_plain, said.split("\n")))) <= COLUMNS for _, said in recorded)
    assert [one[2:] for one in lines_of(svg) if one.startswith("$ ")] == list(COMMANDS)
    assert stable(lines_of(PICTURE.read_text())) == stable(lines_of(svg)), RENEW


@pytest.mark.parametrize(
    ("shown", "now"),
    [
        ("topic   size\nnews   9 B", "topic   bytes\nnews   9 B"),
        ("1795010653152:0", "stored at 1795010653152:0"),
        ("orders  2  -", "orders  2  -  -"),
    ],
)
def test_a_picture_of_what_a_command_wrote_once_is_noticed(shown: str, now: str) -> None:
    old, new = animated([("polybus x", shown)]), animated([("polybus x", now)])
    assert stable(lines_of(old)) != stable(lines_of(new))


def test_numbers_times_and_widths_may_differ_in_the_picture() -> None:
    old = animated([("polybus x 1", "1795010653152:0\nnews  2  80 B    0.3/s   9 s  1s ago  ×2")])
    new = animated([("polybus x 1", "1796010653152:7\nnews  14  1.2 KiB  12/s  3 min  2m ago  ×3")])
    assert stable(lines_of(old)) == stable(lines_of(new))
    assert lines_of(old)[:2] == ["$ polybus x 1", "1795010653152:0"]


def _plain(line: str) -> str:
    return Text.from_ansi(line).plain
