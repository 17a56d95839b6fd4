"""How `polybus tail` prints a message: as text, JSON, raw bytes, a hex dump, or with indented JSON.

Colours are for terminals: click leaves them out elsewhere, and with NO_COLOR.
"""

import os
import re
from collections.abc import Callable

import click
import msgspec

from polybus.cli.common.output import as_json as value_as_json
from polybus.cli.common.output import shown
from polybus.client import Message

FORMATS = ("text", "json", "raw", "hex", "pretty")
HEX_WIDTH = 16
_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|(-?\d[\d.eE+-]*)|\b(true|false|null)\b')
Line = Callable[[Message], str | bytes]


def line_of(name: str, *, with_topic: bool, with_headers: bool) -> Line:
    """The function that prints one message in a format."""

    def text(message: Message) -> str:
        parts = [click.style(shown(message.topic), fg="cyan")] if with_topic else []
        if with_headers and message.headers:
            parts.append(f"[{_headers(message)}]")
        return "\t".join([*parts, coloured(shown(message.value), message.value)])

    def pretty(message: Message) -> str:
        place = "" if message.position is None else f" {message.position}"
        head = [click.style(f"{shown(message.topic)}{place}", fg="cyan", bold=True)]
        head += [f"  {_headers(message)}"] if message.headers else []
        try:
            value = msgspec.json.format(message.value, indent=2)
        except (msgspec.DecodeError, ValueError):
            return "\n".join([*head, shown(message.value)])
        lines = value.decode(errors="replace").splitlines()
        return "\n".join([*head, *(coloured(shown(line), b"{") for line in lines)])

    def hex_dump(message: Message) -> str:
        place = "" if message.position is None else f" {message.position}"
        head = f"{shown(message.topic)}{place} {len(message.value)} bytes"
        return "\n".join([click.style(head, fg="cyan"), *hex_lines(message.value)])

    by_name: dict[str, Line] = {
        "text": text,
        "json": _json,
        "raw": lambda message: message.value,
        "hex": hex_dump,
        "pretty": pretty,
    }
    return by_name[name]


def coloured(text: str, value: bytes) -> str:
    """The text of a JSON object or list with colours; other values stay as they are."""
    if value.lstrip()[:1] not in (b"{", b"[") or "NO_COLOR" in os.environ:
        return text

    def paint(found: re.Match[str]) -> str:
        quoted, colon, number, word = found.groups()
        if quoted is not None:
            return click.style(quoted, fg="blue" if colon else "green") + (colon or "")
        return click.style(number or word, fg="yellow" if number else "magenta")

    return _TOKEN.sub(paint, text)


def hex_lines(value: bytes) -> list[str]:
    """`00000000  68 65 6c 6c 6f                                   hello`."""
    lines = []
    for at in range(0, len(value), HEX_WIDTH):
        piece = value[at : at + HEX_WIDTH]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"{at:08x}  {piece.hex(' '):<{HEX_WIDTH * 3}} {text}")
    return lines


def _headers(message: Message) -> str:
    return ", ".join(f"{shown(name)}={shown(value)}" for name, value in message.headers.items())


def _json(message: Message) -> bytes:
    fields: dict[str, object] = {
        "topic": message.topic,
        "position": None if message.position is None else str(message.position),
        "gap": message.gap,
    }
    if message.headers:
        fields["headers"] = {name: value_as_json(value) for name, value in message.headers.items()}
    return msgspec.json.encode(fields | value_as_json(message.value))
