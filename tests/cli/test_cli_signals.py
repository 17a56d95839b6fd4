"""Stop signals while a command is still being imported, which takes up to a second."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner, Result

from polybus import entry
from polybus.cli import LazyGroup
from polybus.cli.common.output import ask_password

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_a_tail_well_while_no_server_answers(number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"ws://127.0.0.1:{server.getsockname()[1]}"
        # No import of a module without a name: the signal comes from here.
        command = [sys.executable, "-c", PROGRAM, "", "0", "polybus", "tail", "a*", "--url", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            server.settimeout(30)
            with server.accept()[0]:
                process.send_signal(number)
                output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, b"")


def ended(work: Callable[[], object]) -> Result:
    class Commands(LazyGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return click.command("work")(work)

    return CliRunner().invoke(Commands(), ["work"])


def test_ctrl_c_in_a_command_is_no_failure_and_shows_no_traceback() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    result = ended(work)
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    "ask",
    [
        lambda: click.confirm("Remove it?", abort=True),
        lambda: click.prompt("Name"),
        lambda: ask_password("--password-file"),
    ],
)
@pytest.mark.parametrize(("reason", "code"), [(KeyboardInterrupt, 130), (EOFError, 1)])
def test_ctrl_c_at_a_prompt_is_no_failure(
    ask: Callable[[], object],
    reason: type[BaseException],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise reason

    def work() -> None:
        for name in ("visible_prompt_func", "hidden_prompt_func"):
            monkeypatch.setattr(click.termui, name, interrupted)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: reason is EOFError)
        ask()

    result = ended(work)
    assert (result.exit_code, "Aborted" in result.output) == (code, code == 1)


def test_a_no_at_a_prompt_is_a_failure() -> None:
    result = ended(lambda: click.confirm("Remove it?", default=False, abort=True))
    assert result.exit_code == 1
