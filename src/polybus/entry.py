"""Where the command `polybus` begins: a stop signal during its imports ends it quietly.

They take up to a second. Python would show a traceback for Ctrl-C, from the middle of some module,
and click would call it a failure. So this imports nothing before it has set its handlers.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

RUN_UNTIL_STOPPED = ("serve", "up", "tail")
"""A stop signal ends these with 0 (polybus.cli.common.exits)."""


def main() -> Any:
    verb = sys.argv[1:2]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_well if verb and verb[0] in RUN_UNTIL_STOPPED else _end)
    if verb and verb[0] in RUN_UNTIL_STOPPED:
        signal.signal(signal.SIGTERM, _end_well)
    from polybus.cli import main as commands

    # `tail` asks the bus first, and sets its own handlers when it begins to read.
    if verb != ["tail"]:
        commands.imported = _imported
    return commands()


def _imported() -> None:
    """A command is about to run: from here on Ctrl-C passes through its `finally`."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) in (_end, _end_well):
            signal.signal(number, usual)


def _end_well(*_: object) -> NoReturn:
    os._exit(0)


def _end(number: int, _: object) -> NoReturn:
    os._exit(128 + number)
