"""SQL that an engine lacks, rewritten in the text before the engine parses it.

`FROM silver VERSION AS OF 3` and `FROM silver TIMESTAMP AS OF '2026-01-31T12:00:00Z'` become a name
of their own, `silver@v3` or `silver@t2026-…`, under which that version of the table is
registered.

`payload:order.id` is Spark's path into JSON. DuckDB takes it for an alias, so it becomes a call of
`json_extract` after a dot, which binds as tightly. Before a cast (`payload:price::double`) the text
is extracted. A path follows the colon without a space; with a space it is an alias of DuckDB.
"""

import re
from collections.abc import Collection
from datetime import UTC, datetime

from polybus.errors import UsageError

_OPAQUE = r"'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/"
_NAME = r'(?:[^\W\d][\w$]*|"(?:[^"]|"")+"|`(?:[^`]|``)+`)'
_AS_OF = re.compile(
    rf"""(?P<opaque>{_OPAQUE})
       | (?P<name>{_NAME}(?:\.{_NAME})*)
         \s+ (?P<kind>VERSION|TIMESTAMP) \s+ AS \s+ OF \s+
         (?P<at>\d+ | (?:TIMESTAMP\s*)?'[^']*')
         (?P<alias>\s+ (?:AS\s+{_NAME} | {_NAME}))?
       | "(?:[^"]|"")*" | `(?:[^`]|``)*`""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
# What may follow a table in FROM and is not an alias.
_KEYWORDS = frozenset(
    """where join left right inner outer full cross natural anti semi asof positional on using group
    order having limit offset union except intersect minus qualify window lateral tablesample pivot
    unpivot sort cluster distribute select""".split()
)
_AT = re.compile(r"(?P<name>.+)@(?:v(?P<version>\d+)|t(?P<time>.+))", re.DOTALL)
_DOTTED = re.compile(
    rf"""(?P<opaque>{_OPAQUE}) | "(?:[^"]|"")*" | `(?:[^`]|``)*`
       | (?P<before>\b(?:FROM|JOIN)\s+)(?P<name>[^\W\d][\w$]*(?:\.[\w$]+)+)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_STEP = r"\[\s*(?:\d+|'(?:[^']|'')*'|\"[^\"]*\")\s*\]"
_PATH = re.compile(
    rf"""(?P<opaque>{_OPAQUE})
       | (?<=[\w)"`]):(?P<path>(?>(?:{_NAME}|{_STEP})(?:\.{_NAME}|{_STEP})*))(?!\s*\()(?P<cast>::)?
       | (?P<arrow>->>?\s*)'(?P<key>\$(?![.\[']|$)[^']*)'
       | (?P<open>[\[{{])|(?P<close>[\]}}]) | "(?:[^"]|"")*" | `(?:[^`]|``)*`""",
    re.VERBOSE | re.DOTALL,
)
_STEPS = re.compile(rf"{_NAME}|\d+|'(?:[^']|'')*'")


def with_versions_named(sql: str, quote: str) -> str:
    """The statement with a name for each version of a table; `quote` is that of the engine."""

    def named(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0]
        table = ".".join(map(_bare, re.findall(_NAME, found["name"])))
        at = found["at"].rpartition("TIMESTAMP")[2].strip().strip("'")
        mark = "v" if found["kind"].upper() == "VERSION" else "t"
        alias = found["alias"] or ""
        is_alias = alias and alias.strip().lower() not in _KEYWORDS
        short = _quoted(_bare(re.findall(_NAME, found["name"])[-1]), quote)
        return f"{_quoted(f'{table}@{mark}{at}', quote)}{'' if is_alias else f' AS {short}'}{alias}"

    return _AS_OF.sub(named, sql)


def with_dots_quoted(sql: str, known: Collection[str]) -> str:
    """The statement for Spark, with names of topics and tables that have dots in backticks."""

    def quoted(found: re.Match[str]) -> str:
        name = found["name"]
        is_known = name is not None and name.lower() in known
        return f"{found['before']}`{name.lower()}`" if is_known else found[0]

    return _DOTTED.sub(quoted, sql)


def version_in(name: str) -> tuple[str, int | datetime | None]:
    """The table and its version in a name of `with_versions_named`.

    Raises:
        UsageError: `sql.invalid`, the time is none.
    """
    found = _AT.fullmatch(name)
    if found is None:
        return name, None
    if found["version"] is not None:
        return found["name"], int(found["version"])
    return found["name"], time_in(found["time"])


def time_in(text: str) -> datetime:
    """A time in ISO 8601, in UTC if it has no zone. Raises UsageError `sql.invalid`."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        text = f"TIMESTAMP AS OF {text!r}: write a time as '2026-01-31T12:00:00Z'"
        raise UsageError("sql.invalid", text) from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def with_paths_called(sql: str) -> str:
    """The statement with JSON paths as DuckDB has them."""
    depth = 0

    def called(found: re.Match[str]) -> str:
        nonlocal depth
        depth += bool(found["open"]) - bool(found["close"])
        if found["arrow"]:
            # DuckDB takes a key with a dollar sign for a path.
            return f"""{found["arrow"]}'$."{found["key"]}"'"""
        # In a slice or a struct, `a:b` is not a path.
        if found["path"] is None or depth > 0:
            return found[0]
        steps = (_step(one) for one in _STEPS.findall(found["path"]))
        path = "$" + "".join(steps).replace("'", "''")
        if found["cast"]:
            return f".json_extract_string('{path}')::"
        return f".json_extract('{path}')"

    return _PATH.sub(called, sql)


def _step(text: str) -> str:
    return f"[{text}]" if text.isdigit() else f'."{_bare(text)}"'


def _bare(name: str) -> str:
    """A name or text without its quotes."""
    mark = name[0]
    return name[1:-1].replace(mark * 2, mark) if mark in "'\"`" else name


def _quoted(name: str, quote: str) -> str:
    return quote + name.replace(quote, quote * 2) + quote
