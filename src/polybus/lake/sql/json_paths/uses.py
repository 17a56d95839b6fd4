"""The type that a path into JSON needs, by its context in the statement.

| place | type |
|---|---|
| beside a number (`=`, `IN`, `BETWEEN`, ...), in arithmetic, in `sum` | number |
| beside `true` or `false`, or a condition by itself | boolean |
| beside anything else, in `THEN` and `ELSE`, in a function, in `GROUP BY` | text |
| a column of `ORDER BY` | numbers by their value, then text; after `GROUP BY ALL` text |
| a column of a result whose rows are grouped, distinct or compared | text |
| anywhere else | JSON |

A value that is not of the type is null. `min` and `max` take the order of `ORDER BY`.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from polybus.lake.sql.tokens import Query, Tokens, any_literal, case_start, literal_kind

_COMPARISONS = frozenset(("=", "==", "<>", "!=", "<", "<=", ">", ">=", "<=>"))
_ARITHMETIC = frozenset(("+", "-", "*", "/", "%"))
_TEXTUAL = frozenset(("||", "like", "ilike", "rlike", "regexp", "similar", "glob", "~", "collate"))
_NUMERIC = frozenset(
    """sum avg mean abs round floor ceil ceiling sqrt power ln log exp median stddev stddev_pop
    stddev_samp variance var_pop var_samp sign""".split()
)
_MIXED = frozenset("coalesce ifnull nvl nullif greatest least if iff".split())
_LISTS = frozenset(("array", "list_value"))
_STRUCTS = frozenset(("struct", "named_struct", "struct_pack", "row"))
_BOOLEAN_AFTER = frozenset(("where", "and", "or", "not", "on", "having", "qualify", "when"))
_ITEM_AFTER = frozenset(("select", "distinct", "by", ","))


class Use(Enum):
    """How a path is used."""

    JSON = auto()
    ELEMENT = auto()
    """JSON in a list or a struct, which Spark cannot return."""
    TEXT = auto()
    NUMBER = auto()
    BOOLEAN = auto()
    ORDER = auto()
    BEST = auto()
    """The argument of `min` or `max`."""


_OF_LITERAL = {"number": Use.NUMBER, "boolean": Use.BOOLEAN, "text": Use.TEXT, "": Use.TEXT}


@dataclass(slots=True)
class SelectPath:
    """A column of a result that is a path, and where ORDER BY names it or its number."""

    first: int
    query: Query
    alias: str
    sorted_at: list[int] = field(default_factory=list)


def use_of(tokens: Tokens, first: int, stop: int, *, is_spark: bool) -> Use:
    """How the path from token `first` to before `stop` is used."""
    if tokens[stop].low == "::":
        return Use.JSON if is_spark else Use.TEXT
    left, right = first - 1, stop
    while tokens[left].low == "(" and tokens[right].low == ")" and not _is_call(tokens, left):
        left, right = left - 1, right + 1
    for found in (
        _as_operand(tokens, left, right),
        _in_case(tokens, left, right),
        _in_clause(tokens, left, right),
        _in_brackets(tokens, left, right, is_spark=is_spark),
    ):
        if found is not None:
            return found
    return Use.BOOLEAN if tokens[left].low in _BOOLEAN_AFTER else Use.JSON


def _is_call(tokens: Tokens, index: int) -> bool:
    return tokens.is_name(index - 1) or tokens[index - 1].low in ("in", "over", "filter")


def _as_operand(tokens: Tokens, left: int, right: int) -> Use | None:
    before, after = tokens[left].low, tokens[right].low
    if after == "not":
        right += 1
        after = tokens[right].low
    if after == "is":
        return _after_is(tokens, right)
    if after in _TEXTUAL or before in _TEXTUAL:
        return Use.TEXT
    if after in _ARITHMETIC or before in _ARITHMETIC:
        return Use.NUMBER
    if after in _COMPARISONS or after == "between":
        return _OF_LITERAL[literal_kind(tokens, right + 1)]
    if after == "in":
        return _OF_LITERAL[literal_kind(tokens, right + 2)]
    if before in _COMPARISONS or before == "between":
        return _OF_LITERAL[literal_kind(tokens, left - 1, step=-1)]
    if before == "and" and (at := _between_of(tokens, left)) is not None:
        return _OF_LITERAL[literal_kind(tokens, at - 1, step=-1)]
    return None


def _after_is(tokens: Tokens, index: int) -> Use:
    index += 1 + (tokens[index + 1].low == "not")
    word = tokens[index].low
    if word == "distinct":
        return _OF_LITERAL[literal_kind(tokens, index + 2)]
    return Use.BOOLEAN if word in ("true", "false") else Use.JSON


def _between_of(tokens: Tokens, index: int) -> int | None:
    """The BETWEEN that an AND belongs to."""
    opener = tokens.opener[index]
    for at in range(index - 1, opener, -1):
        if tokens.opener[at] == opener:
            if tokens[at].low == "between":
                return at
            if tokens[at].low in ("and", "or", "where", "on", "when", "select", ","):
                return None
    return None


def _in_case(tokens: Tokens, left: int, right: int) -> Use | None:
    word = tokens[left].low
    if word == "case":
        return _OF_LITERAL[literal_kind(tokens, right + 1)]
    if word not in ("then", "else", "when"):
        return None
    start, results = _case_around(tokens, left)
    if word == "when":
        is_condition = tokens[start + 1].low == "when"
        return None if is_condition else _OF_LITERAL[literal_kind(tokens, start + 1)]
    return _OF_LITERAL[any_literal(tokens, [(at, at + 1) for at in results])]


def _case_around(tokens: Tokens, index: int) -> tuple[int, list[int]]:
    """The CASE of a THEN or an ELSE, and where its results begin."""
    start = case_start(tokens, index)
    results, depth = [], 0
    for at in range(start, len(tokens)):
        word = tokens[at].low
        depth += (word == "case") - (word == "end")
        if depth == 1 and word in ("then", "else"):
            results.append(at + 1)
        if depth == 0:
            break
    return start, results


def _in_clause(tokens: Tokens, left: int, right: int) -> Use | None:
    if left < 0 or tokens[left].low not in _ITEM_AFTER:
        return None
    clause, query = tokens.clause[left], tokens.query[left]
    match clause:
        case "group" | "partition":
            return Use.TEXT
        case "order":
            is_plain = query is not None and query.is_sorted_plainly
            return Use.TEXT if is_plain else Use.ORDER
        case "select":
            is_whole = query is not None and (query.is_grouped or query.is_combined)
            return Use.TEXT if is_whole or _is_compared(tokens, left) else Use.JSON
    return None


def _is_compared(tokens: Tokens, index: int) -> bool:
    """Whether a query is an operand of a comparison: `x IN (SELECT …)`, `x = (SELECT …)`."""
    opened = tokens.opener[index]
    before = tokens[opened - 1].low if opened > 0 else ""
    return before == "in" or before in _COMPARISONS


def _in_brackets(tokens: Tokens, left: int, right: int, *, is_spark: bool) -> Use | None:
    opened = tokens.opener[left + 1]
    if opened < 0 or left < opened:
        return None
    if tokens[opened].low == "{":
        return Use.ELEMENT if is_spark else Use.JSON
    parts = tokens.items(opened + 1, tokens.closing.get(opened, opened + 1))
    if tokens[opened].low == "[":
        return _as_element(any_literal(tokens, parts), is_spark=is_spark)
    if tokens[opened - 1].low == "in":
        return _OF_LITERAL[literal_kind(tokens, opened - 2, step=-1)]
    is_argument = tokens[left].low in ("(", ",", "distinct") and tokens.is_name(opened - 1)
    return _as_argument(tokens, opened, left, is_spark=is_spark) if is_argument else None


def _as_element(literal: str, *, is_spark: bool) -> Use:
    none = Use.ELEMENT if is_spark else Use.JSON
    return _OF_LITERAL[literal] if literal else none


def _as_argument(tokens: Tokens, opened: int, left: int, *, is_spark: bool) -> Use | None:
    name = tokens[opened - 1].low
    parts = tokens.items(opened + 1, tokens.closing.get(opened, opened + 1))
    if name in _NUMERIC:
        return Use.NUMBER
    if name in ("min", "max") and len(parts) == 1 and left == opened:
        return Use.BEST
    if name in ("cast", "try_cast"):
        return Use.JSON if is_spark else Use.TEXT
    if name in _MIXED:
        return _OF_LITERAL[any_literal(tokens, parts)]
    if name == "count":
        return Use.TEXT if tokens[left].low == "distinct" else Use.JSON
    if name in _LISTS:
        return _as_element(any_literal(tokens, parts), is_spark=is_spark)
    if name in _STRUCTS:
        return _as_element("", is_spark=is_spark)
    # Spark's functions take VARIANT as text where they can.
    is_given = is_spark or name == "typeof" or "json" in name or "variant" in name
    return Use.JSON if is_given else Use.TEXT


def select_paths(tokens: Tokens, paths: dict[int, int]) -> list[SelectPath]:
    """The columns of results that are paths, each a path's start by its end, and their sorting."""
    found = []
    queries = {id(query): query for query in tokens.query if query is not None}
    for query in queries.values():
        items = tokens.items(query.first + (tokens[query.first].low == "distinct"), query.stop)
        for number, (first, stop) in enumerate(items, start=1):
            if first not in paths or query.is_combined or query.is_sorted_plainly:
                continue
            rest = range(paths[first] + (tokens[paths[first]].low == "as"), stop)
            if len(rest) <= 1:
                alias = tokens[rest[0]].text if rest else ""
                places = _sorted_at(tokens, query, alias, number)
                found.append(SelectPath(first, query, alias, places))
    return found


def _sorted_at(tokens: Tokens, query: Query, alias: str, number: int) -> list[int]:
    wanted = {str(number), alias.lower()} - {""}
    return [
        index
        for index in range(query.stop, len(tokens))
        if tokens.query[index] is query
        and tokens.clause[index] == "order"
        and tokens[index - 1].low in ("by", ",")
        and tokens[index].text.lower() in wanted
        and tokens[index + 1].low in ("", ",", ")", ";", "asc", "desc", "nulls", "limit", "offset")
    ]
