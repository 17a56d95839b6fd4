"""How verbs print: data on standard output, notices and progress on standard error.

Values, names and error texts may come from anyone who can publish. `shown` and `table_lines` escape
control characters, so that no text can control the terminal.
"""

import base64
import contextlib
import functools
import getpass
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import msgspec


class Quantity(str):
    """The text of a number with its unit."""


_NUMBERS = (int, float, Quantity)


def count(number: float) -> Quantity:
    """`1,234`; below ten with a digit after the point if there is one."""
    return Quantity(f"{number:,.1f}" if number < 10 and number % 1 else f"{number:,.0f}")


def plural(number: int, word: str) -> str:
    """`1 topic`, `1,234 topics`."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"


def size(number: float) -> Quantity:
    """`12.3 KiB`, as in the console: limits in the config are powers of two."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1023.5 and len(units) > 1:
        number /= 1024
        del units[0]
    digits = 1 if number < 99.5 and units[0] != "B" else 0
    return Quantity(f"{number:.{digits}f} {units[0]}")


def span(seconds: float) -> Quantity:
    """`45 s`, `12 min`, `3 h 5 min`, `9 d`."""
    minutes, days = int(seconds // 60), seconds / 86_400
    if seconds < 60:
        return Quantity(f"{max(seconds, 0):.0f} s")
    if minutes < 60:
        return Quantity(f"{minutes} min")
    return Quantity(f"{minutes // 60} h {minutes % 60} min" if days < 2 else f"{days:.0f} d")


def echo_json(value: Any) -> None:
    """Print one compact JSON value on a line of its own."""
    click.echo(msgspec.json.encode(value))


def echo(as_json: bool, value: Any, text: str) -> None:
    """Print the value with `--json`, else the text."""
    echo_json(value) if as_json else click.echo(text)


def say(text: str) -> None:
    """Print a notice on standard error."""
    click.echo(text, err=True)


def echo_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    for line in table_lines(columns, rows):
        click.echo(line)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows under their headings in plain text, so that `cut` and `awk` work.

    Columns of numbers and quantities are aligned to the right; None is printed as `-`.
    """
    cells = [["-" if cell is None else shown(str(cell)) for cell in row] for row in rows]
    lines = [list(columns), *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    right = [
        any(isinstance(row[index], _NUMBERS) for row in rows)
        and all(row[index] is None or isinstance(row[index], _NUMBERS) for row in rows)
        for index in range(len(columns))
    ]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def shown(value: bytes | str) -> str:
    """A value on one line: text with control characters escaped, anything else as base64."""
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(value).decode()}"
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


@contextlib.contextmanager
def progress_bar(
    text: str, total: float | None = None, *, hidden: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error if that is a terminal.

    Yields a function that updates it by `advance`, `completed`, `total` or `description`.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    disable = hidden or not console.is_terminal
    with Progress(console=console, transient=True, disable=disable) as bar:
        yield functools.partial(bar.update, bar.add_task(text[:60], total=total))


def ask_password(instead: str, *, twice: bool = False) -> str:
    """The password that the user types, unseen, or a line of standard input.

    `instead` is the option for scripts, which the error names if there is neither.
    """
    with warnings.catch_warnings():
        # Without a terminal there is nobody to see it.
        warnings.simplefilter("ignore", getpass.GetPassWarning)
        try:
            found: str = click.prompt(
                "Password", hide_input=True, confirmation_prompt=twice, err=True
            )
        except click.Abort as error:
            if sys.stdin.isatty() or isinstance(error.__context__, KeyboardInterrupt):
                raise
            text = f"there is no terminal for the password; use {instead}"
            raise click.UsageError(text) from None
    return found
