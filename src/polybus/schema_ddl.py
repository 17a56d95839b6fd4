"""The columns that a topic declares, in Spark's notation: `id BIGINT NOT NULL, tags ARRAY<STRING>`.

This reads what Spark reads, without Spark: the config is checked where there is none, and DuckDB
has other names for the types.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from polybus import names

COLUMNS_MAX = 200
TYPES = {
    **{one: one for one in ("array", "map", "struct", "variant", "string", "varchar", "char")},
    **{one: one for one in ("bigint", "int", "smallint", "tinyint", "double", "float", "decimal")},
    **{one: one for one in ("boolean", "date", "time", "timestamp", "timestamp_ntz", "binary")},
    **{one: one for one in ("interval", "void", "geometry", "geography")},
    **{"long": "bigint", "integer": "int", "short": "smallint", "byte": "tinyint"},
    **{"real": "float", "dec": "decimal", "numeric": "decimal", "character": "char"},
    "timestamp_ltz": "timestamp",
}
"""Spark's words for types, and the one of each type."""
_TOKEN = re.compile(
    r"(?:\s|--[^\n]*|/\*.*?\*/)*"
    r"""(`(?:[^`]|``)*`|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*"|\w+|[<>(),:]|\Z|.)""",
    re.DOTALL,
)
_QUOTES = frozenset("'\"\\`")
_INTERVAL = ("year", "month", "day", "hour", "minute", "second", "to")
_ZONE = ("with", "without", "local", "time", "zone")
_NOT_IN_TABLES = ("geography", "geometry", "interval", "time", "void")
_ARGUMENTS = {
    **{"char": (1, 1), "varchar": (1, 1), "decimal": (0, 2), "time": (0, 1)},
    **{"geometry": (1, 1), "geography": (1, 1)},
}
"""How many arguments a type needs, and how many it takes at most; others take none."""


class ColumnType(NamedTuple):
    """A type: with the digits of a decimal, the fields of a struct, or the types inside others."""

    name: str
    arguments: tuple[str, ...] = ()
    fields: tuple["Column", ...] = ()
    inside: tuple["ColumnType", ...] = ()


class Column(NamedTuple):
    name: str
    type: ColumnType


def columns_of(schema: str) -> tuple[Column, ...]:
    """The columns of a schema. Raises ValueError, which names the column."""
    reader = _Columns(schema)
    # Spark takes STRUCT<…> as the list of its fields.
    is_struct = reader.peek(0).lower() == "struct" and reader.peek(1) == "<"
    found = reader.type("").fields if is_struct else reader.columns("", "")
    if reader.peek(0):
        raise ValueError(f"{reader.peek(0)!r} follows the last column")
    if len(found) > COLUMNS_MAX:
        raise ValueError(f"it has more than {COLUMNS_MAX} columns")
    for column in found:
        if not _QUOTES.isdisjoint(column.name):
            raise ValueError(f"the name {column.name} contains a quote")
    return found


class _Columns:
    def __init__(self, text: str) -> None:
        self._tokens = [match[1] for match in _tokens(text)]
        self._at = 0

    def peek(self, ahead: int) -> str:
        """A token that follows; empty after the last one."""
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def columns(self, path: str, end: str) -> tuple[Column, ...]:
        found = []
        while True:
            name = self._take()
            if not re.match(r"[\w`]", name):
                raise ValueError(f"{path or 'the schema'}: a column is missing before {name!r}")
            name = name[1:-1].replace("``", "`") if name[0] == "`" else name
            if self.peek(0) == ":":
                self._take()
            inner = f"{path}.{name}" if path else name
            found.append(Column(name, self.type(inner)))
            self._skip_options(inner)
            if self.peek(0) == end:
                return tuple(found)
            self._expect(",", inner)

    def type(self, path: str) -> ColumnType:
        word = self._take()
        if not word or not re.match(r"\w", word):
            raise ValueError(f"{path}: its type is missing")
        name = TYPES.get(word.lower())
        if name is None:
            text = f"{path}: there is no type {word[:40]}{names.meant(word, TYPES)}"
            known = sorted({*TYPES.values()} - {*_NOT_IN_TABLES})
            raise ValueError(f"{text} (types: {', '.join(known)})")
        if name == "struct":
            self._expect("<", path)
            fields = () if self.peek(0) == ">" else self.columns(path, ">")
            self._expect(">", path)
            return ColumnType(name, fields=fields)
        if name in ("array", "map"):
            self._expect("<", path)
            inside = [self.type(path)]
            if name == "map":
                self._expect(",", path)
                inside.append(self.type(path))
            self._expect(">", path)
            return ColumnType(name, inside=tuple(inside))
        arguments = self._arguments(path)
        least, most = _ARGUMENTS.get(name, (0, 0))
        if not least <= len(arguments) <= most:
            raise ValueError(f"{path}: {word} must have {most or 'no'} numbers in parentheses")
        if name in ("time", "timestamp", "interval"):
            while self.peek(0).lower() in (_INTERVAL if name == "interval" else _ZONE):
                self._take()
        if self.peek(0).lower() == "collate":
            self._take()
            self._take()
        return ColumnType(name, arguments)

    def _arguments(self, path: str) -> tuple[str, ...]:
        found: list[str] = []
        if self.peek(0) != "(":
            return ()
        while self._take() != ")":
            found.append(self._take())
            if not found[-1].isalnum() or self.peek(0) not in (",", ")"):
                raise ValueError(f"{path}: ) is missing")
        return tuple(found)

    def _skip_options(self, path: str) -> None:
        """NOT NULL, COMMENT 'text'."""
        if self.peek(0).lower() == "not":
            self._take()
            if self._take().lower() != "null":
                raise ValueError(f"{path}: NULL is missing after NOT")
        if self.peek(0).lower() == "comment":
            self._take()
            if self._take()[:1] not in ("'", '"'):
                raise ValueError(f"{path}: the text of COMMENT is missing")

    def _take(self) -> str:
        self._at += 1
        return self.peek(-1)

    def _expect(self, token: str, path: str) -> None:
        found = self._take()
        if found != token:
            what = f"{found[:40]!r} follows" if found else "the schema ends"
            raise ValueError(f"{path}: {token} is missing: {what}")


def _tokens(text: str) -> Iterator[re.Match[str]]:
    return (match for match in _TOKEN.finditer(text) if match[1])
