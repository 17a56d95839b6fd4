"""A tokeniser for SQL statements with brackets and clauses: enough to know a token's context.

The text is not parsed: two engines with different grammars read it afterwards, and their error
messages are better than ours would be.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

_REST = r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/) | (?P<name>[^\W\d][\w$]*)
    | (?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    | (?P<mark>->>|->|::|:=|<=>|<=|>=|<>|!=|==|\|\||.)"""
DOLLARS = r"(?<![\w$])\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$"
"""Text of DuckDB between dollars, in which nothing is escaped: `$$it's$$`, `$tag$…$tag$`."""
_DUCKDB = rf"""(?P<text>[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|{DOLLARS})
    | (?P<quoted>"(?:[^"]|"")*"|`(?:[^`]|``)*`) | """
# In Spark double quotes are around text, and a backslash escapes.
_SPARK = r"""(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*") | (?P<quoted>`(?:[^`]|``)*`) | """
_TOKEN = {
    is_spark: re.compile(quotes + _REST, re.VERBOSE | re.DOTALL)
    for is_spark, quotes in ((False, _DUCKDB), (True, _SPARK))
}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
# Keywords that can precede an expression, and are not names of columns or functions.
KEYWORDS = frozenset(
    """all and any as asc between by case cross desc distinct else end except exists filter from
    full group having ilike in inner intersect is join lateral left like limit natural not
    null nulls offset on or order outer over partition qualify right rlike select then union
    using values when where window with""".split()
)
_CLAUSES = {
    "select": "select",
    "from": "from",
    "where": "where",
    "group": "group",
    "having": "having",
    "order": "order",
    "sort": "order",
    "partition": "partition",
    "distribute": "partition",
    "cluster": "partition",
    "limit": "limit",
    "qualify": "where",
    "window": "window",
    "on": "on",
}
_NEED_BY = ("group", "order", "sort", "partition", "distribute", "cluster")


@dataclass(slots=True)
class SqlToken:
    """A word or a symbol. `low` is its text, in lower case if it is a bare word."""

    kind: str
    text: str
    start: int
    end: int
    low: str


@dataclass(slots=True, eq=False)
class Query:
    """One SELECT.

    Attributes:
        first, stop: its list of columns.
        is_grouped: it has GROUP BY or DISTINCT.
        is_combined: it is part of a UNION, EXCEPT or INTERSECT that compares rows.
        is_sorted_plainly: DuckDB takes only columns in ORDER BY after GROUP BY ALL.
    """

    first: int
    stop: int = 0
    is_distinct: bool = False
    is_grouped: bool = False
    is_combined: bool = False
    is_sorted_plainly: bool = False


@dataclass(slots=True)
class Level:
    """The content of a pair of brackets, or the whole statement (`opened` is then -1)."""

    opened: int
    clause: str = ""
    queries: list[Query] = field(default_factory=list)


class Tokens:
    """A statement in tokens. An index outside of it is the token `end` of the statement."""

    def __init__(self, sql: str, *, is_spark: bool) -> None:
        self.sql = sql
        self.all = [
            SqlToken(
                str(found.lastgroup),
                found[0],
                found.start(),
                found.end(),
                found[0].lower() if found.lastgroup == "name" else found[0],
            )
            for found in _TOKEN[is_spark].finditer(sql)
            if found.lastgroup != "space"
        ]
        self.closing: dict[int, int] = {}
        self.opening: dict[int, int] = {}
        self.opener: list[int] = []
        self.clause: list[str] = []
        self.query: list[Query | None] = []
        self._read()

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, index: int) -> SqlToken:
        if 0 <= index < len(self.all):
            return self.all[index]
        return SqlToken("end", "", len(self.sql), len(self.sql), "")

    def is_name(self, index: int) -> bool:
        """Whether a token names a column, a table or a function."""
        token = self[index]
        return token.kind == "quoted" or token.kind == "name" and token.low not in KEYWORDS

    def touch(self, index: int) -> bool:
        """Whether a token follows the one before it without a space."""
        return 0 < index < len(self.all) and self.all[index - 1].end == self.all[index].start

    def is_list(self, index: int) -> bool:
        """Whether a bracket begins a list, not an index or a slice of the previous expression."""
        before = self[index - 1]
        is_path = before.low == ":" and self[index - 2].kind != "text"
        return not (self.is_name(index - 1) or before.low in (")", "]") or is_path)

    def items(self, first: int, stop: int) -> list[tuple[int, int]]:
        """The parts between commas, outside of brackets, as ranges of indices."""
        found, start, index = [], first, first
        while index < stop:
            if self[index].low == ",":
                found.append((start, index))
                start = index + 1
            index = self.closing.get(index, index) + 1
        return [*found, (start, stop)]

    def _read(self) -> None:
        levels = [Level(-1)]
        for index, token in enumerate(self.all):
            level = levels[-1]
            if token.low in _PAIRS.values() and len(levels) > 1:
                opened = levels.pop().opened
                self._end_list(level, index)
                self.closing[opened], self.opening[index] = index, opened
                level = levels[-1]
            elif token.kind == "name":
                self._enter(level, index)
            self.opener.append(level.opened)
            self.clause.append(level.clause)
            self.query.append(level.queries[-1] if level.queries else None)
            if token.low in _PAIRS:
                levels.append(Level(index))
        for level in levels:
            self._end_list(level, len(self.all))

    def _enter(self, level: Level, index: int) -> None:
        word = self.all[index].low
        if word in ("union", "except", "intersect", "minus") and level.queries:
            self._end_list(level, index)
            is_whole = self[index + 1].low != "all"
            level.queries[-1].is_combined |= is_whole
            level.clause = "union" if is_whole else ""
            return
        if word not in _CLAUSES or word in _NEED_BY and self[index + 1].low != "by":
            return
        if word == "from" and self[index - 1].low == "distinct":
            return  # IS DISTINCT FROM
        if word == "select":
            query = Query(index + 1, is_combined=level.clause == "union")
            query.is_grouped = query.is_distinct = self[index + 1].low == "distinct"
            level.queries.append(query)
        else:
            self._end_list(level, index)
            if word == "group" and level.queries:
                level.queries[-1].is_grouped = True
                level.queries[-1].is_sorted_plainly = self[index + 2].low == "all"
        level.clause = _CLAUSES[word]

    def _end_list(self, level: Level, index: int) -> None:
        if level.queries and not level.queries[-1].stop:
            level.queries[-1].stop = index


def operand_start(tokens: Tokens, last: int) -> int | None:
    """Where the expression begins that ends with a token: a name, a call, brackets."""
    index = last
    if tokens[index].low in (")", "]"):
        opened = tokens.opening.get(index)
        if opened is None:
            return None
        is_index = tokens[index].low == "]" and not tokens.is_list(opened)
        is_call = tokens[index].low == ")" and tokens.is_name(opened - 1)
        if not (is_index or is_call):
            return opened
        return operand_start(tokens, opened - 1)
    if tokens[index].kind not in ("name", "quoted", "text"):
        return None
    if tokens[index].low == "end":
        return case_start(tokens, index - 1)
    if tokens[index - 1].low == "." and index >= 2:
        return operand_start(tokens, index - 2)
    if tokens[index - 1].low == "::" and index >= 2:
        return operand_start(tokens, index - 2)
    return index


def case_start(tokens: Tokens, index: int) -> int:
    """The CASE around a token; -1 if there is none."""
    depth = 0
    while index >= 0:
        word = tokens[index].low
        depth += (word == "end") - (word == "case")
        if depth < 0:
            break
        index -= 1
    return index


def literal_kind(tokens: Tokens, index: int, *, step: int = 1) -> str:
    """Whether a literal is `text`, `number` or `boolean`; an empty text if it is anything else."""
    token = tokens[index]
    if step > 0 and token.low in ("-", "+"):
        token = tokens[index + 1]
    if token.low in ("true", "false"):
        return "boolean"
    return token.kind if token.kind in ("text", "number") else ""


def any_literal(tokens: Tokens, ranges: Collection[tuple[int, int]]) -> str:
    """The kind of the first of these parts that is a literal as a whole."""
    for first, stop in ranges:
        size = stop - first - (tokens[first].low in ("-", "+"))
        if size == 1 and (kind := literal_kind(tokens, first)):
            return kind
    return ""
