"""Stop signals while a command is still being imported, which takes up to a second."""

from __future__ import annotations

import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from polybus import entry
from polybus.cli import LazyGroup

PROGRAM = f"""
import os, signal, sys
module, number, *sys.argv = sys.argv[1:]

class Interrupt:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), int(number))

# Tests that run in the background of a shell ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from {entry.__name__} import main
main()
"""


@pytest.mark.parametrize(
    ("verb", "number", "code"),
    [
        ("serve", signal.SIGINT, 0),
        ("serve", signal.SIGTERM, 0),
        ("tail", signal.SIGINT, 0),
        ("tail", signal.SIGTERM, 0),
        ("publish", signal.SIGINT, 130),
        ("publish", signal.SIGTERM, -signal.SIGTERM),
    ],
)
@pytest.mark.parametrize("module", ["click", "polybus.config_file"])
def test_a_stop_signal_during_the_imports_ends_a_command_quietly(
    verb: str, number: int, code: int, module: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, str(int(number)), "polybus", verb, "--help"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_ctrl_c_in_a_command_is_no_failure_and_shows_no_traceback() -> None:
    @click.command()
    def work() -> None:
        raise KeyboardInterrupt

    class Commands(LazyGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return work

    ended = CliRunner().invoke(Commands(), ["work"])
    assert (ended.exit_code, ended.output) == (130, "")
