"""Decides which exit code a command has. No other file chooses one.

0    The command did what it was asked. A command that runs until it is stopped (`serve`, `up`,
     `tail`) ends with 0 after Ctrl-C or SIGTERM.
1    It failed: a Polybus error that is not about usage, or a bad result: `verify` found damage,
     `torture` found a broken promise, `doctor` found what keeps a bus from running, `replay` ended
     early, a pipeline failed.
2    Wrong usage: an option or argument that click refuses, a wrong setting, or a Polybus error
     whose code is in USAGE_CODES.
130  Ctrl-C ended another command, or came while it was imported.
143  `bench` or `torture` was ended by SIGTERM.

`up` ends with the exit code of the bus if the bus does not start.
"""

import sys
from typing import IO, Any, NoReturn

import click

from polybus.error_codes import CODES
from polybus.errors import ConfigError, PolybusError, StorageError

DONE, FAILED, USAGE = 0, 1, 2
USAGE_CODES = (
    *("client.url", "client.token-file", "client.scheme", "client.unsupported"),
    *("headers.invalid", "position.invalid", "shell.unknown", "where.invalid"),
)


class CommandFailure(click.ClickException):
    """A Polybus error for standard error: what happened, then what to do next."""

    exit_code = FAILED

    def __init__(self, error: PolybusError) -> None:
        super().__init__(str(error))
        self._error = error

    def show(self, file: IO[Any] | None = None) -> None:
        error = self._error
        click.echo(f"polybus: {error.code}: {error.text}", file=file or sys.stderr)
        # A config error is one line, which names the key: scripts rely on it.
        known = CODES.get(error.code)
        if known is not None and known.advice and not isinstance(error, ConfigError):
            click.echo(f"  {known.advice}", file=file or sys.stderr)


class UsageFailure(CommandFailure):
    exit_code = USAGE


def failure(error: PolybusError) -> CommandFailure:
    usage = isinstance(error, ConfigError) or error.code in USAGE_CODES
    return UsageFailure(error) if usage else CommandFailure(error)


def at_start(error: StorageError) -> StorageError:
    """The error of a start: nothing runs that could try again by itself."""
    code = {"log.full": "data.full", "log.failed": "data.failed"}.get(error.code, error.code)
    return StorageError(code, error.text)


def end(*, good: bool) -> NoReturn:
    """End a command that has printed its own messages."""
    sys.exit(DONE if good else FAILED)


def end_with(code: int) -> NoReturn:
    """End with the exit code of a child process."""
    sys.exit(code)


def end_by_signal(number: int, frame: object) -> NoReturn:
    """A signal handler that leaves through every `finally`."""
    sys.exit(128 + number)
