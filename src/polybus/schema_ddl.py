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
    r"[ \t-\r\xa0\u1680\u2000-\u200a\u2028\u202f\u205f\u3000]+|--(?:\\\n|[^\r\n])*"
    r"""|(`(?:[^`]|``)*`|[rR]'[^']*'|[rR]"[^"]*"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+|.)""",
    re.DOTALL,
)
"""Spaces and comments that end with their line, or a token."""
_COMMENT_MARK = re.compile(r"/\*(?!\+)|\*/")
_NUMBER = re.compile(r"[0-9]+(?:[lsy]|(?:e[0-9]+)?(?:f|d|bd)?)", re.IGNORECASE)
"""Spark reads such a word as a number; another word may begin with digits."""
_QUOTES = frozenset("'\"\\`")
_ZONES = {
    "timestamp": (("without", "time", "zone"), ("with", "local", "time", "zone")),
    "time": (("without", "time", "zone"),),
}
_INTERVALS = (("year", "month"), ("day", "hour", "minute", "second"))
_NOT_IN_TABLES = ("geography", "geometry", "interval", "time", "void")
_ARGUMENTS = {
    **{"char": (1, 1), "varchar": (1, 1), "decimal": (0, 2), "time": (0, 1)},
    **{"timestamp": (0, 1), "timestamp_ntz": (0, 1), "geometry": (1, 1), "geography": (1, 1)},
}
"""How many arguments a type needs, and how many it takes at most; others take none."""
_LENGTH_MAX = 2**31 - 1
_NUMBERS = {
    **{"char": (0, _LENGTH_MAX), "varchar": (0, _LENGTH_MAX), "decimal": (0, 38), "time": (0, 9)},
    **{"timestamp": (6, 6), "timestamp_ntz": (6, 6)},
}
"""The least and the greatest number in the parentheses of a type."""


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
    try:
        found = reader.type("").fields if is_struct else reader.columns("", "")
    except RecursionError:
        raise ValueError("its types are nested too deep") from None
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
        self._tokens = list(_tokens(text))
        self._at = 0

    def peek(self, ahead: int) -> str:
        """A token that follows; empty after the last one."""
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def columns(self, path: str, end: str) -> tuple[Column, ...]:
        found = []
        while True:
            name = self._take()
            if not re.match(r"\w+$|`", name):
                raise ValueError(f"{path or 'the schema'}: a column is missing before {name!r}")
            if name[0] != "`" and (not name.isascii() or _NUMBER.fullmatch(name)):
                raise ValueError(f"{path or 'the schema'}: write the name {name} in backquotes")
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
        _check_arguments(path, word, name, arguments)
        if name == "interval":
            self._skip_interval(path)
        if self._skip_zone(path, word) == "without" and name == "timestamp":
            name = "timestamp_ntz"
        if name in ("string", "char", "varchar") and self.peek(0).lower() == "collate":
            self._skip_collation(path)
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

    def _skip_interval(self, path: str) -> None:
        """YEAR, DAY TO SECOND: units of one kind, the greater one first."""
        for units in _INTERVALS:
            if self.peek(0).lower() in units:
                greater = self._take().lower()
                if self.peek(0).lower() == "to":
                    self._take()
                    if self._take().lower() not in units[units.index(greater) + 1 :]:
                        raise ValueError(f"{path}: no smaller unit follows {greater.upper()} TO")
                return

    def _skip_collation(self, path: str) -> None:
        """COLLATE name; which names there are is not checked, as most are languages."""
        self._take()
        parts = [self._take()]
        while self.peek(0) == ".":
            self._take()
            parts.append(self._take())
        is_short = len(parts) == 1
        is_long = [one.lower() for one in parts[:-1]] == ["system", "builtin"]
        if not (is_short or is_long) or not re.match(r"\w+$|`", parts[-1]):
            raise ValueError(f"{path}: the name after COLLATE is missing, or has other parts")

    def _skip_zone(self, path: str, word: str) -> str:
        """The first word of WITHOUT TIME ZONE or WITH LOCAL TIME ZONE; empty if there is none."""
        first = self.peek(0).lower()
        # Only the words TIMESTAMP and TIME take one: TIMESTAMP_LTZ does not.
        phrases = _ZONES.get(word.lower(), ())
        if not phrases or first not in ("with", "without"):
            return ""
        for phrase in phrases:
            if all(self.peek(at).lower() == one for at, one in enumerate(phrase)):
                self._at += len(phrase)
                return first
        known = " or ".join(" ".join(phrase).upper() for phrase in phrases)
        raise ValueError(f"{path}: after {word}, write {known} or nothing")

    def _skip_options(self, path: str) -> None:
        """NOT NULL, COMMENT 'text'."""
        if self.peek(0).lower() == "not":
            self._take()
            if self._take().lower() != "null":
                raise ValueError(f"{path}: NULL is missing after NOT")
        if self.peek(0).lower() == "comment":
            self._take()
            if not self._skip_text():
                raise ValueError(f"{path}: the text of COMMENT is missing")
            while self._skip_text():
                pass

    def _skip_text(self) -> bool:
        """Skip one string; Spark takes several as one."""
        is_text = self.peek(0)[-1:] in ("'", '"') and len(self.peek(0)) > 1
        self._at += is_text
        return is_text

    def _take(self) -> str:
        self._at += 1
        return self.peek(-1)

    def _expect(self, token: str, path: str) -> None:
        found = self._take()
        if found != token:
            what = f"{found[:40]!r} follows" if found else "the schema ends"
            raise ValueError(f"{path}: {token} is missing: {what}")


def _check_arguments(path: str, word: str, name: str, arguments: tuple[str, ...]) -> None:
    least, most = _ARGUMENTS.get(name, (0, 0))
    if not least <= len(arguments) <= most:
        raise ValueError(f"{path}: {word} must have {most or 'no'} numbers in parentheses")
    if name in ("geometry", "geography") and arguments[0].lower() == "any":
        return
    for one in arguments:
        if not (one.isascii() and one.isdigit()):
            raise ValueError(f"{path}: {word}: {one[:40]!r} is not a number")
        low, high = _NUMBERS.get(name, (0, _LENGTH_MAX))
        # The length is judged first: Python refuses to convert very long numbers.
        if len(one.lstrip("0")) > len(str(high)) or not low <= int(one) <= high:
            must = f"{low}" if low == high else f"{low} to {high}"
            raise ValueError(f"{path}: {word}: the number {one[:40]} must be {must}")
    if name == "decimal" and len(arguments) == 2 and int(arguments[1]) > int(arguments[0]):
        raise ValueError(f"{path}: {word}: more digits follow the point than there are")


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        if text.startswith("/*", at) and not text.startswith("/*+", at):
            at = _comment_end(text, at)
            if not at:
                yield "/*"
                return
        elif match := _TOKEN.match(text, at):
            at = match.end()
            if match[1]:
                yield match[1]


def _comment_end(text: str, at: int) -> int:
    """Where the comment ends that begins here, which may contain others; 0 if it does not end."""
    depth = 0
    for mark in _COMMENT_MARK.finditer(text, at):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return mark.end()
    return 0
