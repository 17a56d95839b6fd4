"""Generates docs/reference from the source: `python -m polybus.cli.reference [--check] FOLDER`."""

import ast
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from polybus import config as configuration
from polybus.cli import main as root
from polybus.cli.common import exits
from polybus.cli.reference.access_page import access_page
from polybus.config import Settings
from polybus.error_codes import GROUPS

HELP_WIDTH = 88
NOTE = "<!-- Generated from the source by `make reference`; edit the source. -->"


@click.command(epilog="Example: python -m polybus.cli.reference --check docs/reference")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a page is out of date.")
def reference(folder: Path, check: bool) -> None:
    """Write the reference pages, or check that they are current."""
    stale = []
    for name, content in pages().items():
        path = folder / name
        if check:
            if not path.exists() or path.read_text() != content:
                stale.append(name)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    if stale:
        click.echo(f"out of date in {folder}: {', '.join(stale)}; run `make reference`", err=True)
        exits.end(good=False)


def pages() -> dict[str, str]:
    """File name to content."""
    return {
        "access.md": access_page(NOTE),
        "cli.md": cli_page(),
        "config.md": config_page(),
        "errors.md": errors_page(),
    }


def cli_page() -> str:
    lines = ["# Command line", "", NOTE, ""]
    lines += ["Exit codes: 0 done, 1 failed, 2 wrong usage or configuration. An error is one line"]
    lines += ["`polybus: CODE: text` on standard error ([the codes](errors.md)).", ""]
    for path, command in _commands(("polybus",), root, None):
        lines += [f"{'#' * min(len(path) + 1, 4)} {' '.join(path)}", "", "```text"]
        lines += [*_help(path, command).splitlines(), "```", ""]
    return "\n".join(lines)


def _commands(
    path: tuple[str, ...], command: click.Command, parent: click.Context | None
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1], parent=parent)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _commands((*path, name), found, context)


def _help(path: tuple[str, ...], command: click.Command) -> str:
    context = click.Context(
        command,
        info_name=" ".join(path),
        terminal_width=HELP_WIDTH,
        max_content_width=HELP_WIDTH,
        # As in a shell; a command keeps the option of the first context that asks for its help.
        help_option_names=root.context_settings["help_option_names"],
    )
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def config_page() -> str:
    lines = ["# Configuration", "", NOTE, "", inspect.getdoc(configuration) or "", ""]
    tree = ast.parse(inspect.getsource(configuration))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind, heading in _groups():
        lines += [f"## {heading}", "", inspect.getdoc(kind) or "", ""]
        lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
        notes: dict[str, str] = {}
        for base in reversed(kind.__mro__):
            notes |= _notes(classes[base.__name__]) if base.__name__ in classes else {}
        for field in msgspec.structs.fields(kind):
            name = f"`{field.encode_name}`"
            assert notes[field.name], f"{kind.__name__}.{field.name} has no meaning in config.py"
            cells = (name, _type(field.type), _default(field), notes[field.name])
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _groups() -> Iterator[tuple[type[Settings], str]]:
    """The settings groups in the order of the page, each with its heading."""
    yield configuration.Config, "Top level"
    yield configuration.Connector, "`Connector`, in `[[connectors]]`"
    yield configuration.Tls, "`Tls`, in a connector's `tls`"
    yield configuration.KafkaTls, "`KafkaTls`, in `cluster.tls`"
    yield configuration.KafkaLogin, "`KafkaLogin`, in `cluster.login`"
    yield configuration.DeclaredTopic, "`DeclaredTopic`, in `[[topics]]`"
    yield configuration.DeclaredTable, "`DeclaredTable`, in `[[tables]]`"
    yield configuration.Mask, "`Mask`, in `[[http.masks]]`"
    yield configuration.Retention, "`Retention`, in a topic's `retention`"
    for field in msgspec.structs.fields(configuration.Config):
        if isinstance(field.type, type) and issubclass(field.type, Settings):
            yield field.type, f"`{field.type.__name__}`, in `[{field.encode_name}]`"


def _notes(node: ast.ClassDef) -> dict[str, str]:
    """The docstring that follows each field in the source."""
    notes = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        note = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            note = " ".join(str(following.value.value).split())
        notes[statement.target.id] = note.replace("|", "\\|")
    return notes


_WORDS = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`"}


def _type(kind: Any) -> str:
    """A type as the page names it."""
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return " or ".join(f'`"{word}"`' for word in arguments)
    if origin is dict:
        return f"table of {_type(arguments[1])}"
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if arguments:
        lists = [one for one in arguments if typing.get_origin(one) is list]
        if lists and typing.get_args(lists[0])[0] in arguments:
            return f"one or a list of {_type(typing.get_args(lists[0])[0])}"
        return " or ".join(_type(one) for one in arguments if one is not type(None))
    if isinstance(kind, type) and issubclass(kind, Settings):
        return f"table `{kind.__name__}`"
    return _WORDS[kind]


def _default(field: msgspec.structs.FieldInfo) -> str:
    value: Any = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "required"
    if isinstance(value, Settings):
        return "see below"
    if value is None:
        return "not set"
    if field.name == "connectors":
        return "TCP with detection and UDP for goMS, on 127.0.0.1:55545"
    text = msgspec.json.encode(value).decode()
    return f"`{text}`".replace("|", "\\|")


def errors_page() -> str:
    lines = ["# Error codes", "", NOTE, ""]
    lines += ["Codes are stable; the texts of errors may change.", ""]
    for heading, group in GROUPS.items():
        lines += [f"## {heading}", "", "| code | meaning | what to do |", "|---|---|---|"]
        for code, meaning in group.items():
            advice = meaning.advice.replace("|", "\\|")
            lines.append(f"| `{code}` | {meaning.text} | {advice} |")
        lines.append("")
    return "\n".join(lines)
