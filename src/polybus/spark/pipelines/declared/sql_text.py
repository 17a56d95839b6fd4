"""SQL as text: the statements of a file with their lines, and names that are read as streams.

This module only skips strings and comments. Spark's own parser reads the statements.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# Strings, quoted names and comments: nothing inside them is a word of the statement.
_OPAQUE = r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/"
_STREAM = re.compile(
    rf"(?P<opaque>{_OPAQUE})"
    r"|\bSTREAM\s*(?:\(\s*(?P<inner>(?:`[^`]+`|[\w$.-]+))\s*\)|\s(?P<bare>(?:`[^`]+`|[A-Za-z_][\w.]*)))",
    re.IGNORECASE | re.DOTALL,
)
_PIECE = re.compile(rf"{_OPAQUE}|`[^`]*`|;|[^'\"`;/-]+|.", re.DOTALL)
STREAM_MARK = "@stream"
"""The suffix of the temporary view that stands for a stream in a statement."""


class Statement(NamedTuple):
    text: str
    line: int


def statements(text: str) -> Iterator[Statement]:
    """The statements of a file without semicolons, each with its first line."""
    begin = 0
    for match in _PIECE.finditer(text):
        if match.group() == ";":
            yield from _statement(text, begin, match.start())
            begin = match.end()
    yield from _statement(text, begin, len(text))


def _statement(text: str, begin: int, end: int) -> Iterator[Statement]:
    body = text[begin:end]
    lead = re.match(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", body, re.DOTALL)
    skipped = lead.end() if lead else 0
    if body[skipped:].strip():
        yield Statement(body[skipped:].rstrip(), text.count("\n", 0, begin + skipped) + 1)


def with_stream_names(text: str) -> str:
    """Mark streams: a statement may read one name as a stream and as a table.

    `STREAM(orders)` becomes ``STREAM(`orders@stream`)``.
    """

    def renamed(match: re.Match[str]) -> str:
        if match.group("opaque"):
            return match.group()
        name = (match.group("inner") or match.group("bare")).strip("`")
        return f"STREAM(`{name}{STREAM_MARK}`)"

    return _STREAM.sub(renamed, text)


def relation_of(quoted: str) -> str:
    """The plain name in Spark's `` `a`.`b` ``."""
    return ".".join(part.strip("`") for part in re.findall(r"`[^`]*`|[^.`]+", quoted))
