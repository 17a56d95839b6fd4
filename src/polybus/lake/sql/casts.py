"""Casts of bytes to text or JSON, for DuckDB: they give the text, as in Spark.

DuckDB writes bytes as text with escapes, `{\\x22id\\x22:7}`, which is not JSON: a path into
it would be null, without an error. Whether an operand is bytes is only known when DuckDB binds the
statement. So each cast to text or JSON becomes a call of a macro, which acts like `text` and `json`
for bytes, and like the cast for anything else. Macros of the same names wrap DuckDB's JSON
functions, so that they accept bytes too.

No macro has overloads: DuckDB chooses one before it knows the types of aggregates, windows,
`unnest` and aliases. `typeof` is known when the statement is bound, and DuckDB then drops the
branches for other types.
"""

from polybus.lake.sql.tokens import Tokens, operand_start

_CALLS = {
    **dict.fromkeys(("varchar", "string", "text", "char", "bpchar"), "text"),
    "json": "json",
}
# Functions of DuckDB for JSON, by the number of their arguments.
_FUNCTIONS = {
    "json_array_length": (1, 2),
    "json_contains": (2,),
    "json_exists": (2,),
    "json_extract_path": (2,),
    "json_extract_path_text": (2,),
    "json_keys": (1, 2),
    "json_pretty": (1,),
    "json_structure": (1,),
    "json_type": (1, 2),
    "json_value": (2,),
}
# The arrow operators of DuckDB call these by name, so no macro may have these names.
_ALIASES = {"json_extract": "json_extract_path", "json_extract_string": "json_extract_path_text"}
_AS = {"text": "VARCHAR", "json": "JSON"}


def with_casts_called(sql: str) -> str:
    """The statement with its casts to text and to JSON as calls of CAST_MACROS."""
    tokens = Tokens(sql, is_spark=False)
    before: dict[int, str] = {}
    cut: dict[int, tuple[int, str]] = {}
    for index, token in enumerate(tokens.all):
        if token.low == "::" and (called := _called(tokens, index + 1)):
            first = operand_start(tokens, index - 1)
            if first is not None and _is_plain(tokens, first):
                start = tokens[first].start
                before[start] = f"cast_{called}({before.get(start, '')}"
                cut[token.start] = (tokens[index + 1].end, ")")
        elif token.low in ("cast", "try_cast") and tokens[index + 1].low == "(":
            closed = tokens.closing.get(index + 1, 0)
            called = _called(tokens, closed - 1)
            if called and tokens[closed - 2].low == "as":
                cut[token.start] = (token.end, f"{token.low}_{called}")
                cut[tokens[closed - 2].start] = (tokens[closed - 1].end, "")
        elif token.low in _ALIASES and tokens[index + 1].low == "(":
            cut[token.start] = (token.end, _ALIASES[token.low])
    parts, at = [], 0
    for start in sorted({*before, *cut}):
        parts += [sql[at:start], before.get(start, "")]
        at, text = cut.get(start, (start, ""))
        parts.append(text)
    return "".join([*parts, sql[at:]])


def _called(tokens: Tokens, index: int) -> str | None:
    """The suffix of the macros for a type; None for all but plain text and JSON."""
    is_whole = tokens[index + 1].low not in ("(", "[")
    return _CALLS.get(tokens[index].low) if is_whole else None


def _is_plain(tokens: Tokens, first: int) -> bool:
    """Whether an operand begins there, and not just its last part: `OVER (…)`, `DATE '…'`.

    A path into JSON already gives text.
    """
    token, previous = tokens[first], tokens[first - 1]
    is_end = (
        first < 0 or token.kind == "name" and not (tokens.is_name(first) or token.low == "case")
    )
    is_end |= previous.kind in ("text", "number", "quoted") or previous.low in (")", "]", ".", ":")
    is_end |= previous.kind == "name" and (tokens.is_name(first - 1) or previous.low in _BEFORE)
    return not is_end and not token.low.startswith("json_part")


_BEFORE = ("filter", "over", "in", "exists", "any", "all", "as", "null", "is")


def _macros() -> str:
    is_bytes = "typeof(value) = 'BLOB'"
    # DuckDB refuses an aggregate inside of `try`, and `max(value)::text` is one.
    text = "list_transform([try_cast(value AS BLOB)], lambda one: try(decode(one)))[1]"
    made = [
        f"CREATE MACRO {cast}_{name}(value) AS CASE WHEN {is_bytes} "
        f"THEN try_cast({text} AS {kind}) ELSE {cast}(value AS {kind}) END;"
        for name, kind in _AS.items()
        for cast in ("cast", "try_cast")
    ]
    made.append(
        f"CREATE MACRO json_valid(value) AS CASE WHEN {is_bytes} "
        f"THEN system.main.json_valid({text}) ELSE system.main.json_valid(value) END;"
    )
    for name, counts in _FUNCTIONS.items():
        forms = (", path" if count == 2 else "" for count in counts)
        calls = (f"(value{more}) AS system.main.{name}(cast_json(value){more})" for more in forms)
        made.append(f"CREATE MACRO {name}{', '.join(calls)};")
    return "\n".join(made)


CAST_MACROS = _macros()
