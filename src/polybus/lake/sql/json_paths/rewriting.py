"""Paths into JSON in an SQL statement, the same on DuckDB and on Spark.

`payload:order.id` is Spark's, and DuckDB takes it for an alias. `payload->'order'->>'id'` is
DuckDB's. Both are rewritten to the engine's own syntax (dialects.py). A path of the first form
follows the colon without a space; with a space it is an alias of DuckDB.

A path without a cast is JSON, which neither engine compares, groups or sorts: DuckDB uses the
JSON's text, and Spark refuses. So a path that is not just a column of the result gets the type that
its context needs (`use_of` in uses.py).
"""

from dataclasses import replace

from polybus.lake.sql.json_paths.dialects import Dialect, DuckDB, JsonPath, Spark
from polybus.lake.sql.json_paths.uses import Use, select_paths, use_of
from polybus.lake.sql.tokens import Tokens, operand_start

Edit = tuple[int, int, str]
# DuckDB's functions for the arrows, and whether their result is text.
_CALLED = {
    "json_extract": False,
    "json_extract_path": False,
    "json_extract_string": True,
    "json_extract_path_text": True,
}


def for_duckdb(sql: str) -> str:
    """The statement for DuckDB, which needs MACROS."""
    return rewritten(sql, DuckDB())


def for_spark(sql: str, *, is_parsed: bool = False) -> str:
    """The statement for Spark; with `is_parsed`, paths begin at text or bytes, not at VARIANT."""
    return rewritten(sql, Spark(is_parsed=is_parsed))


def rewritten(sql: str, dialect: Dialect) -> str:
    """The statement with its paths in the engine's syntax."""
    tokens = Tokens(sql, is_spark=dialect.is_spark)
    found = _paths_in(tokens)
    paths = [path for path in found if _is_outermost(path, found)]
    edits: list[Edit] = []
    for path in paths:
        use = use_of(tokens, path.first, path.stop, is_spark=dialect.is_spark)
        use = Use.TEXT if path.is_text else use
        start, end = tokens[path.first].start, tokens[path.stop - 1].end
        edits.append((start, end, _expression(tokens, path, use, dialect)))
        if use is Use.BEST:
            called = tokens[path.first - 2]
            edits.append((called.start, called.end, f"{called.low}_by"))
    edits += _sorted_columns(tokens, [path for path in paths if not path.is_text], dialect)
    if dialect.is_spark:
        edits += _literals(tokens)
    # A later edit of the same place replaces an earlier one.
    for start, (end, text) in sorted({one[0]: one[1:] for one in edits}.items(), reverse=True):
        sql = sql[:start] + text + sql[end:]
    return sql


def _sorted_columns(tokens: Tokens, paths: list[JsonPath], dialect: Dialect) -> list[Edit]:
    """ORDER BY with the name or the number of a column that is a path."""
    edits: list[Edit] = []
    by_place = {path.first: path for path in paths}
    for column in select_paths(tokens, {first: path.stop for first, path in by_place.items()}):
        path = by_place[column.first]
        key = _expression(tokens, path, Use.ORDER, dialect)
        if dialect.is_spark and column.alias:
            key = dialect.named(column.alias)
        elif dialect.is_spark and column.query.is_distinct:
            # Spark sorts distinct rows only by their columns.
            name = f"`{path.steps[-1] if path.steps else 'value'}`"
            start, end = tokens[path.first].start, tokens[path.stop - 1].end
            value = _expression(tokens, path, Use.TEXT, dialect)
            edits.append((start, end, f"{value} AS {name}"))
            key = dialect.named(name)
        edits += [(tokens[at].start, tokens[at].end, key) for at in column.sorted_at]
        if dialect.is_spark and column.query.is_distinct:
            text = _written(tokens, path)
            edits += [
                (tokens[one.first].start, tokens[one.stop - 1].end, key)
                for one in paths
                if tokens.query[one.first] is column.query
                and tokens.clause[one.first] == "order"
                and _written(tokens, one) == text
            ]
    return edits


def _written(tokens: Tokens, path: JsonPath) -> str:
    return tokens.sql[tokens[path.first].start : tokens[path.stop - 1].end]


def _expression(tokens: Tokens, path: JsonPath, use: Use, dialect: Dialect) -> str:
    first, last = path.base or (path.first, path.chain - 1)
    base = tokens.sql[tokens[first].start : tokens[last].end]
    written = tokens.sql[tokens[path.chain].start : tokens[path.stop - 1].end]
    return dialect.path(rewritten(base, dialect), path, written, use)


def _is_outermost(path: JsonPath, paths: list[JsonPath]) -> bool:
    """Whether it is not inside the base of another path, which is rewritten recursively."""
    return not any(other.first <= path.first and path.stop <= other.chain for other in paths)


def _paths_in(tokens: Tokens) -> list[JsonPath]:
    found: list[JsonPath] = []
    index = 0
    while index < len(tokens):
        path = _path_at(tokens, index)
        if path is not None:
            found.append(path)
        index = path.stop if path is not None else index + 1
    return found


def _path_at(tokens: Tokens, index: int) -> JsonPath | None:
    """The path whose chain begins at a token."""
    if tokens[index].low in _CALLED and tokens[index + 1].low == "(":
        return _called(tokens, index)
    if not (_is_colon(tokens, index) or _is_arrow(tokens, index)):
        return None
    first = _base(tokens, index - 1)
    if first is None or _is_key_of_struct(tokens, first, index):
        return None
    path = JsonPath(first, index, index, ())
    while True:
        at = path.stop
        if _is_colon(tokens, at) or at > index and _is_path_mark(tokens, at):
            path = replace(_with_colon(tokens, path), is_colon=tokens[index].low == ":")
        elif _is_arrow(tokens, at) and not path.verbatim:
            taken = _with_arrow(tokens, path)
            if taken is None:
                return None
            path = taken
        else:
            break
    # `n:count(*)` is an alias of DuckDB.
    is_alias = path.is_colon and tokens[path.stop].low == "("
    return None if is_alias else path


def _called(tokens: Tokens, index: int) -> JsonPath | None:
    """The path of a call with a literal; other calls are left to the engine."""
    closed = tokens.closing.get(index + 1, index)
    parts = tokens.items(index + 2, closed)
    if len(parts) != 2 or parts[1][1] - parts[1][0] != 1 or not is_key(tokens, parts[1][0]):
        return None
    path = JsonPath(index, closed, closed + 1, (), base=(parts[0][0], parts[0][1] - 1))
    return _with_key(tokens, path, parts[1][0], is_text=_CALLED[tokens[index].low])


def _is_colon(tokens: Tokens, index: int) -> bool:
    if not _is_path_mark(tokens, index):
        return False
    opener = tokens.opener[index]
    if tokens[opener].low == "[" and opener >= 0 and not tokens.is_list(opener):
        return False  # a slice
    return tokens.is_name(index - 1) or tokens[index - 1].low in (")", "]")


def _is_path_mark(tokens: Tokens, index: int) -> bool:
    following = tokens[index + 1]
    is_step = following.kind in ("name", "quoted") or following.low == "["
    touches = tokens.touch(index) and tokens.touch(index + 1)
    return tokens[index].low == ":" and touches and is_step


def _is_arrow(tokens: Tokens, index: int) -> bool:
    return tokens[index].low in ("->", "->>") and is_key(tokens, index + 1)


def is_key(tokens: Tokens, index: int) -> bool:
    """Whether a token is a key or an index; text with escapes, E'…', is left to the engine."""
    token = tokens[index]
    return token.kind == "text" and token.text[0] not in "eE" or token.text.isdigit()


def _base(tokens: Tokens, last: int) -> int | None:
    """Where the base of a path begins; None after `lambda`, whose colon ends its parameters."""
    first = operand_start(tokens, last)
    return None if first is None or tokens[first - 1].low == "lambda" else first


def _is_key_of_struct(tokens: Tokens, first: int, colon: int) -> bool:
    opener = tokens.opener[colon]
    is_inside = opener >= 0 and tokens[opener].low == "{"
    return is_inside and tokens[first - 1].low in ("{", ",")


def _with_colon(tokens: Tokens, path: JsonPath) -> JsonPath:
    steps, index = [*path.steps], path.stop + 1
    while True:
        token = tokens[index]
        if token.low == "[":
            closed = tokens.closing.get(index, index)
            inner = tokens[index + 1]
            if closed != index + 2 or inner.kind not in ("text", "number", "quoted"):
                break
            steps.append(int(inner.text) if inner.text.isdigit() else bare(inner.text))
            index = closed + 1
        elif token.kind in ("name", "quoted"):
            steps.append(bare(token.text))
            index += 1
        else:
            break
        if tokens[index].low == "." and tokens.touch(index) and tokens.touch(index + 1):
            index += 1
        elif not (tokens[index].low == "[" and tokens.touch(index)):
            break
    return replace(path, steps=tuple(steps), stop=index)


def _with_arrow(tokens: Tokens, path: JsonPath) -> JsonPath | None:
    """The path with one more arrow; None leaves the expression to DuckDB."""
    is_text = tokens[path.stop].low == "->>"
    after = replace(path, stop=path.stop + 2)
    return _with_key(tokens, after, path.stop + 1, is_text=is_text)


def _with_key(tokens: Tokens, path: JsonPath, index: int, *, is_text: bool) -> JsonPath | None:
    key, after = tokens[index], replace(path, is_text=is_text)
    if key.kind == "number":
        return replace(after, steps=(*path.steps, int(key.text)))
    name = bare(key.text)
    if name.startswith(("$.", "$[")) or name in ("$", ""):
        return replace(after, verbatim=name[1:])
    if name.startswith("/") or '"' in name:
        return None  # a pointer
    return replace(after, steps=(*path.steps, name))


def _literals(tokens: Tokens) -> list[Edit]:
    """Lists and structs of DuckDB as calls for Spark."""
    edits = []
    for opened, closed in tokens.closing.items():
        mark = tokens[opened]
        if mark.low == "[" and tokens.is_list(opened):
            called = "array("
        elif mark.low == "{":
            called = "named_struct("
            for first, _ in tokens.items(opened + 1, closed):
                key, colon = tokens[first], tokens[first + 1]
                edits += [(colon.start, colon.end, ",")] if colon.low == ":" else []
                edits += [(key.start, key.end, f"'{bare(key.text)}'")] if key.kind != "text" else []
        else:
            continue
        edits += [(mark.start, mark.end, called), (tokens[closed].start, tokens[closed].end, ")")]
    return edits


def bare(name: str) -> str:
    """A name or text without its quotes."""
    mark = name[0]
    if mark == "$":
        tag = name.index("$", 1) + 1
        return name[tag:-tag]
    return name[1:-1].replace(mark * 2, mark) if mark in "'\"`" else name
