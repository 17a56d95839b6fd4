"""How verbs speak: data on standard output, errors in one line on standard error."""

from __future__ import annotations

import base64
import sys
from collections.abc import Sequence
from typing import IO, Any

import click
import msgspec

from polybus.error_codes import CODES
from polybus.errors import ConfigError, PolybusError

# The caller's own words were wrong: exit 2, as for an unknown option.
_USAGE_CODES = (
    *("client.url", "client.scheme", "client.unsupported"),
    *("headers.invalid", "position.invalid"),
)


class Failure(click.ClickException):
    """A Polybus error on its way to standard error: what happened, then what to do next."""

    exit_code = 1

    def __init__(self, error: PolybusError) -> None:
        super().__init__(str(error))
        self._error = error

    def show(self, file: IO[Any] | None = None) -> None:
        for line in error_lines(self._error):
            click.echo(line, file=file or sys.stderr)


class UsageFailure(Failure):
    exit_code = 2


def failure(error: PolybusError) -> Failure:
    usage = isinstance(error, ConfigError) or error.code in _USAGE_CODES
    return UsageFailure(error) if usage else Failure(error)


def error_lines(error: PolybusError) -> list[str]:
    """`polybus: CODE: text`, and what to do about it where that is known.

    A config error is one line, which names the key: scripts rely on it.
    """
    lines = [f"polybus: {error.code}: {error.text}"]
    known = CODES.get(error.code)
    if known is not None and known.advice and not isinstance(error, ConfigError):
        lines.append(f"  {known.advice}")
    return lines


def echo_json(value: Any) -> None:
    """One compact JSON value on a line of its own."""
    click.echo(msgspec.json.encode(value))


def echo_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under their headings, numbers to the right; plain text, so that `cut` and `awk` work."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max(map(len, [heading, *(row[index] for row in cells)]))
        for index, heading in enumerate(columns)
    ]
    numeric = [
        bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        for index in range(len(columns))
    ]
    for line in [list(columns), *cells]:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ]
        click.echo("  ".join(aligned).rstrip())


def shown(value: bytes) -> str:
    """A value on one line: text with control characters escaped, anything else as base64.

    Values come from strangers; what they say must not steer the terminal.
    """
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(value).decode()}"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def as_json(value: bytes) -> dict[str, str]:
    """A value as JSON carries it: text if it is UTF-8, else base64."""
    try:
        return {"text": value.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
