"""docs/howto/secure.md: its ten commands are run as they are written."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_kit import environment
from docs_kit import ROOT, run_by

TIMEOUT_S = 60
# Any free port, in place of the one that the page names.
CONNECTORS = '[{"protocol":"tcp","port":0},{"protocol":"udp","port":0,"speaks":"goms"}]'


def commands() -> list[str]:
    blocks = run_by("cli/test_secure_page.py", "docs/howto/secure.md")
    lines = [line for block in blocks for line in block.text.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ")]


class Operator:
    """Somebody who types the commands, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / ".venv").mkdir()
        (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
        self._environment = environment(
            XDG_CONFIG_HOME=str(folder / "config"), POLYBUS_CONNECTORS=CONNECTORS
        )
        self.server: subprocess.Popen[bytes] | None = None
        self.exported = ""

    def run(self, command: str, typed: str = "") -> str:
        done = subprocess.run(
            ["bash", "-c", f"{self.exported}\n{command}"],
            cwd=self._folder,
            env=self._environment,
            input=typed.encode(),
            capture_output=True,
            timeout=TIMEOUT_S,
            # Without a terminal, passwords are read from the input.
            start_new_session=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.decode()

    def serve(self, command: str, ready: str) -> str:
        """Start a bus; what is in its line that has the word."""
        log = (self._folder / "log").open("wb")
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        log.close()
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if ready in line.decode():
                return line.decode()
        raise AssertionError((self._folder / "log").read_text())

    def interrupt(self) -> None:
        assert self.server is not None and self.server.stdout is not None
        self.server.send_signal(signal.SIGINT)
        self.server.stdout.read()
        assert self.server.wait(TIMEOUT_S) == 0
        self.server.stdout.close()
        self.server = None


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    somebody = Operator(tmp_path)
    yield somebody
    if somebody.server is not None:
        somebody.server.kill()
        somebody.server.wait(TIMEOUT_S)


@pytest.mark.slow
def test_ten_commands_lead_from_the_demo_to_a_bus_on_the_network(operator: Operator) -> None:
    demo, *create, topic, grant, serve, export, login, publish, tail = commands()
    assert len(commands()) == 10 and len(create) == 2
    recipe = re.search(r"^run:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert demo == "make run" and recipe is not None
    # Without what installs the package.
    operator.serve(re.sub(r"\$\(if .*\)", "", recipe[1].replace("$(BIN)", ".venv/bin")), "ready")
    operator.interrupt()
    for command in create:
        operator.run(command, "secret\nsecret\n")
    operator.run(topic)
    operator.run(grant)
    ready = operator.serve(serve, "ready")
    port = re.search(r"tcp://0\.0\.0\.0:(\d+)", ready)
    assert port is not None and "udp://127.0.0.1" in ready
    operator.exported = export.replace("55545", port[1])
    operator.run(login, "secret\n")
    assert re.fullmatch(r"\d+:0\n", operator.run(publish))
    assert operator.run(tail) == "a pair of boots\n"
    # Nobody comes in without TLS.
    plain = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=TIMEOUT_S)
    plain.request("GET", "/healthz")
    assert plain.getresponse().status == 403
    plain.close()
    operator.interrupt()
