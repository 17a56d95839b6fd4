"""The README and the start page are run as they are written, and show what really comes out.

A `console` block has commands after `$ ` and their output below; `...` stands for further output. A
`python` block is run, and prints what the `text` block after it says. Commands run as they are, in
a shell, in an empty folder with a `.venv/bin`; but the environment lets the bus take any free port,
and netcat is given that port. Ports, epochs and sizes may differ from those shown.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from docs_kit import ROOT, run_by

PAGES = [ROOT / "README.md", ROOT / "docs" / "start.md"]
BLOCK = re.compile(r"```(console|python|text)\n(.*?)```", re.DOTALL)
TIMEOUT_S = 30
SERVER = re.compile(r"polybus serve|make run")
CONNECTORS = '[{"protocol":"tcp","port":0},{"protocol":"udp","port":0,"speaks":"goms"}]'


class Step(NamedTuple):
    """One thing the reader does: `kind` is console, python or stop."""

    kind: str
    text: str
    shown: list[str]


def steps_of(page: str) -> Iterator[Step]:
    """What the page tells its reader to do, in order."""
    end = 0
    blocks = list(BLOCK.finditer(page))
    for number, block in enumerate(blocks):
        prose, end = page[end : block.start()], block.end()
        if "Stop" in prose and "Ctrl-C" in prose:
            yield Step("stop", "", [])
        if block[1] == "console":
            for part in re.split(r"^\$ ", block[2], flags=re.MULTILINE)[1:]:
                command, *shown = part.splitlines()
                yield Step("console", command, shown)
        elif block[1] == "python":
            yield Step("python", block[2], blocks[number + 1][2].splitlines())


def plain(lines: list[str]) -> list[str]:
    """Lines without what differs from run to run."""
    text = "\n".join(lines)
    # With a port of its own the demo's suggestions name it.
    text = re.sub(r" --url boson://127\.0\.0\.1:\d+", "", text)
    text = re.sub(r"://127\.0\.0\.1:\d+", "://ADDRESS", text)
    text = re.sub(r"one port \(\d+\)", "one port (PORT)", text)
    text = re.sub(r"\b\d{13}:", "EPOCH:", text)
    text = re.sub(r"in \d+\.\d+ s$", "in N s", text, flags=re.MULTILINE)
    return re.sub(r"[\d.]+ KiB", "N KiB", text).splitlines()


class Reader:
    """Somebody who follows a page in a fresh checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[str] | None = None
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        kept = {name: text for name, text in os.environ.items() if "POLYBUS" not in name}
        self._environment = kept | {"POLYBUS_CONNECTORS": CONNECTORS}

    def follow(self, step: Step) -> None:
        if step.kind == "stop":
            self.stop()
        elif step.kind == "python":
            code = re.sub(r"127\.0\.0\.1:55545", f"127.0.0.1:{self._port()}", step.text)
            assert self._run([sys.executable, "-c", code], 0) == step.shown
        elif SERVER.search(step.text):
            self._serve(step)
        else:
            refused = bool(step.shown) and step.shown[0].startswith("polybus: ")
            command = step.text
            if re.search(r"\bnc ", command):
                # It knows no POLYBUS_URL.
                command = command.replace("127.0.0.1 55545", f"127.0.0.1 {self._port()}")
            lines = self._run(["bash", "-o", "pipefail", "-c", command], int(refused))
            assert plain(lines) == plain(step.shown), step.text

    def stop(self) -> None:
        """Ctrl-C, if a bus runs."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            assert self._server.wait(TIMEOUT_S) == 0
            self._close()

    def leave(self) -> None:
        """Whatever happened, no process stays."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(TIMEOUT_S)
            self._close()

    def _close(self) -> None:
        assert self._server is not None and self._server.stdout is not None
        self._server.stdout.close()
        self._server = None

    def _run(self, command: list[str], code: int) -> list[str]:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == code, done.stdout
        return done.stdout.splitlines()

    def _serve(self, step: Step) -> None:
        assert self._server is None, "the page never says to stop the bus before"
        command, shown = step.text, step.shown
        if command == "make run":
            command, shown = what_make_runs(shown)
        self._server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._server.stdout is not None
        lines = first_lines(self._server.stdout, len([line for line in shown if line != "..."]))
        assert plain(lines) == plain([line for line in shown if line != "..."])
        port = re.search(r"tcp://127\.0\.0\.1:(\d+)", lines[0])
        assert port is not None
        self._environment |= {
            "TEST_PORT": port[1],
            "POLYBUS_URL": f"boson://127.0.0.1:{port[1]}",
        }

    def _port(self) -> str:
        return self._environment["TEST_PORT"]


def first_lines(stream: IO[str], count: int) -> list[str]:
    return [stream.readline().rstrip("\n") for _ in range(count)]


def what_make_runs(shown: list[str]) -> tuple[str, list[str]]:
    """The Makefile's command, and what is shown after make's and pip's lines."""
    makefile = (ROOT / "Makefile").read_text()
    said = re.search(r'echo "(Setting up .*)"', makefile)
    recipe = re.search(r"^run:.*\n\t(.*)", makefile, re.MULTILINE)
    assert said is not None and recipe is not None
    command = recipe[1].replace("$(BIN)", ".venv/bin").replace("$(if $(PORT), --port $(PORT))", "")
    # pip tells its progress in between.
    assert shown[:3] == [said[1], "...", command]
    return command, shown[3:]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    somebody = Reader(tmp_path)
    yield somebody
    somebody.leave()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_whoever_follows_the_page_sees_what_it_shows(page: Path, reader: Reader) -> None:
    steps = list(steps_of(page.read_text()))
    code = run_by("test_readme.py", page.relative_to(ROOT).as_posix())
    assert len(steps) >= len(code) > 4
    if any(re.search(r"\bnc ", step.text) for step in steps) and shutil.which("nc") is None:
        text = "nc is missing; on Debian: apt-get install netcat-openbsd"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    for step in steps:
        reader.follow(step)
    reader.stop()


def test_the_readme_fits_on_two_screens_and_has_every_part() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings[:5] == ["Try it", "Protocols", "From Python", "Guarantees", "Why not Polybus"]
    assert "make test" in text and "security" in text.lower()
