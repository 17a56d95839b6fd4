"""SQL that an engine lacks is rewritten, in the text, before the engine parses it.

`FROM silver VERSION AS OF 3` and `FROM silver TIMESTAMP AS OF '2026-01-31T12:00:00Z'` become
separate names, `silver@v3` or `silver@t2026-…`, under which that version of the table is
registered. `FOR`, `SYSTEM_VERSION` and `SYSTEM_TIME` of Spark's grammar are accepted, too.
`DESCRIBE HISTORY silver` becomes `SELECT * FROM "silver@history"`.

Paths into JSON are in the folder json_paths.
"""

import re
from collections.abc import Collection
from datetime import UTC, datetime

from polybus.errors import UsageError
from polybus.lake.sql.tokens import DOLLARS

MARK = "tables."
"""Before the name of a lake table, if a topic has that name, too."""
_COMMENTS = r"--[^\n]*|/\*.*?\*/"
_TEXTS = {
    '"': rf"\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|{DOLLARS}",
    "`": r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*"(?!\s+(?:FOR|VERSION|TIMESTAMP)\b)""",
}
"""By the quote that the engine has for names: in Spark a backslash escapes."""
_NAME = r'(?:[^\W\d][\w$]*|"(?:[^"]|"")+"|`(?:[^`]|``)+`)'
# After a version, these make an expression of it; `|>` of Spark does not.
_OPERATOR = r"""\s*(?!--|/\*|\|>)[^\s\w,;)\]}"`]+\s*[^\s,;)]* | \s+AT\s+TIME\s+ZONE\b"""
_AS_OF = {
    quote: re.compile(
        rf"""(?P<opaque>{texts}|{_COMMENTS})
       | (?P<name>{_NAME}(?:\.{_NAME})*)
         \s+ (?:FOR\s+)? (?:SYSTEM_)? (?P<kind>VERSION|TIMESTAMP|TIME) \s+ AS \s+ OF \s+
         (?P<at>\d+ | (?:TIMESTAMP\s*)?'[^']*' | [^\s,;)]+) (?P<more>{_OPERATOR})?
         (?P<alias>\s+ (?:AS\s+{_NAME} | {_NAME}))?
       | "(?:[^"]|"")*" | `(?:[^`]|``)*`""",
        re.VERBOSE | re.DOTALL | re.IGNORECASE,
    )
    for quote, texts in _TEXTS.items()
}
# What may follow a table in FROM and is not an alias.
_KEYWORDS = frozenset(
    """where join left right inner outer full cross natural anti semi asof positional on using group
    order having limit offset union except intersect minus qualify window lateral tablesample pivot
    unpivot sort cluster distribute select""".split()
)
_AT = re.compile(r"(?P<name>.+)@(?:v(?P<version>\d+)|t(?P<time>.+))", re.DOTALL)
_DESCRIBE = {
    quote: re.compile(
        rf"""(?P<opaque>{texts}|{_COMMENTS}) | "(?:[^"]|"")*" | `(?:[^`]|``)*`
       | \bDESC(?:RIBE)? \s+ (?P<kind>HISTORY|DETAIL) \s+ (?P<name>{_NAME}(?:\.{_NAME})*)""",
        re.VERBOSE | re.DOTALL | re.IGNORECASE,
    )
    for quote, texts in _TEXTS.items()
}
_DESCRIBED = re.compile(r"(?P<name>.+)@(?P<kind>history|detail)", re.DOTALL)
_DOTTED = {
    quote: re.compile(
        rf"""(?P<opaque>{texts}|{_COMMENTS}) | "(?:[^"]|"")*" | `(?:[^`]|``)*`
       | (?P<before>\b(?:FROM|JOIN)\s+)(?P<name>[^\W\d][\w$]*(?:\.[\w$]+)+)""",
        re.VERBOSE | re.DOTALL | re.IGNORECASE,
    )
    for quote, texts in _TEXTS.items()
}


def with_versions_named(sql: str, quote: str) -> str:
    """The statement with a name for each version of a table; `quote` is that of the engine.

    Raises:
        UsageError: `sql.invalid` if the version is not a number, or the time not a literal.
    """

    def named(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0]
        table, short = _table_in(found["name"])
        at = _at(found["kind"].upper(), found["at"] + (found["more"] or ""))
        alias = found["alias"] or ""
        is_alias = alias and alias.strip().lower() not in _KEYWORDS
        alias = alias if is_alias else f" AS {_quoted(short, quote)}{alias}"
        return f"{_quoted(f'{table}@{at}', quote)}{alias}"

    return _AS_OF[quote].sub(named, sql)


def with_descriptions_named(sql: str, quote: str) -> str:
    """The statement with `DESCRIBE HISTORY` and `DESCRIBE DETAIL` as queries of such names."""

    def named(found: re.Match[str]) -> str:
        if found["kind"] is None:
            return found[0]
        name = f"{_table_in(found['name'])[0]}@{found['kind'].lower()}"
        return f"SELECT * FROM {_quoted(name, quote)}"

    return _DESCRIBE[quote].sub(named, sql)


def _table_in(name: str) -> tuple[str, str]:
    """The lake table of a name as it is written, and the name's last part.

    Only lake tables have versions, so this is never a topic of the same name.
    """
    parts = [_bare(part) for part in re.findall(_NAME, name)]
    is_marked = len(parts) > 1 and parts[0].lower() == "tables"
    return ".".join(parts[1:] if is_marked else parts), parts[-1]


def _at(kind: str, written: str) -> str:
    """A version or a time, in the notation of these names."""
    literal = written[len("TIMESTAMP") :].strip() if written[0] in "tT" else written
    value = literal.strip("'")
    if kind == "VERSION" and not value.isdecimal():
        raise UsageError("sql.invalid", f"VERSION AS OF {written}: write a number, as in 12")
    if kind != "VERSION" and not re.fullmatch("'[^']*'", literal):
        text = f"TIMESTAMP AS OF {written}: write a time in quotes, as '2026-01-31T12:00:00Z'"
        raise UsageError("sql.invalid", text)
    return f"v{int(value)}" if kind == "VERSION" else f"t{value}"


def with_dots_quoted(sql: str, known: Collection[str], quote: str = "`", dots_min: int = 1) -> str:
    """The statement, with known names of at least `dots_min` dots in the quotes of an engine."""

    def quoted(found: re.Match[str]) -> str:
        name = found["name"]
        is_known = name is not None and name.count(".") >= dots_min and name.lower() in known
        return f"{found['before']}{_quoted(name.lower(), quote)}" if is_known else found[0]

    return _DOTTED[quote].sub(quoted, sql)


def version_in(name: str) -> tuple[str, int | datetime | None]:
    """The table and its version in a name of `with_versions_named`.

    Raises:
        UsageError: `sql.invalid`, the time cannot be parsed.
    """
    found = _AT.fullmatch(name)
    if found is None:
        return name, None
    if found["version"] is not None:
        return found["name"], int(found["version"])
    return found["name"], time_in(found["time"])


def description_in(name: str) -> tuple[str, str]:
    """The table, and `history`, `detail` or nothing, in a name of `with_descriptions_named`."""
    found = _DESCRIBED.fullmatch(name)
    return (name, "") if found is None else (found["name"], found["kind"])


def time_in(text: str) -> datetime:
    """A time in ISO 8601, in UTC if it has no zone. Raises UsageError `sql.invalid`."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        text = f"TIMESTAMP AS OF {text!r}: write a time as '2026-01-31T12:00:00Z'"
        raise UsageError("sql.invalid", text) from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _bare(name: str) -> str:
    """A name or text without its quotes."""
    mark = name[0]
    return name[1:-1].replace(mark * 2, mark) if mark in "'\"`" else name


def _quoted(name: str, quote: str) -> str:
    return quote + name.replace(quote, quote * 2) + quote
