"""The tables that a SQL statement names and the columns it may need, from DuckDB's parser.

Names are not bound, so a statement can be examined before its tables are registered.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from polybus.lake.sql.tokens import DOLLARS

_TOKENS = re.compile(
    rf"""\b[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | {DOLLARS}
      | "(?:[^"]|"")*" | `(?:[^`]|``)*` | --[^\n]* | /\*.*?\*/
      | (?P<offset>\boffset\b)(?P<next>\s*)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_EXPLAIN = re.compile(r"\A\s*explain(\s+analyze)?\s+", re.IGNORECASE)


class Named(NamedTuple):
    """The names in a statement.

    Attributes:
        tables: each table's name in its parts, as written: `orders.eu` has two, `"orders.eu"` one.
        words: every name in the statement, in lower case; other columns are not needed.
        everything: the statement may need columns without naming them (`*`, `SELECT t FROM t`).
    """

    tables: list[tuple[str, ...]]
    words: frozenset[str]
    everything: bool


def with_offset_quoted(sql: str) -> str:
    """The statement with the column `offset` in quotes, because OFFSET is a keyword of DuckDB.

    The OFFSET clause is followed by a number; a column never is.
    """

    def quoted(found: re.Match[str]) -> str:
        if found["offset"] is None:
            return found[0]
        at = found.start()
        if at and sql[at - 1] in ".$@":
            return found[0]
        following = sql[found.end() : found.end() + 2]
        is_cast = following == "::"
        is_clause = following[:1].isdigit() or following[:1] in ("?", "$", ":", "(")
        return found[0] if is_clause and not is_cast else f'"{found["offset"]}"{found["next"]}'

    return _TOKENS.sub(quoted, sql)


def without_explain(sql: str) -> str:
    """The statement without a leading EXPLAIN."""
    return _EXPLAIN.sub("", sql, count=1)


def named_in(tree: Any) -> Named:
    """The names in the tree of `json_serialize_sql`."""
    values = list(_values(tree))
    nodes = [one for one in values if isinstance(one, dict)]
    words = frozenset(one.lower() for one in values if isinstance(one, str))
    local = {
        str(entry["key"]).lower()
        for node in nodes
        for entry in (node.get("cte_map") or {}).get("map", [])
        if "key" in entry
    }
    tables = []
    aliases = set()
    for node in nodes:
        if node.get("type") == "BASE_TABLE":
            parts = (node.get("catalog_name"), node.get("schema_name"), node.get("table_name"))
            path = tuple(str(part) for part in parts if part)
            if not (len(path) == 1 and path[0].lower() in local):
                tables.append(path)
            aliases |= {path[-1].lower(), str(node.get("alias") or path[-1]).lower()}
    references = {
        str(node["column_names"][-1]).lower()
        for node in nodes
        if node.get("class") == "COLUMN_REF" and node.get("column_names")
    }
    everything = bool(references & aliases) or any(
        node.get("class") == "STAR" or node.get("ref_type") == "NATURAL" for node in nodes
    )
    return Named(list(dict.fromkeys(tables)), words, everything)


def _values(tree: Any) -> Iterator[Any]:
    """The tree and everything in it."""
    pending = [tree]
    while pending:
        one = pending.pop()
        yield one
        if isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
