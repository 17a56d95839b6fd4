"""How DuckDB and Spark write a path into JSON."""

import re
from dataclasses import dataclass

from polybus.lake.sql.json_paths.uses import Use
from polybus.lake.sql.tokens import Tokens

ALIAS_HINT = (
    "\nBefore the colon of a path is a column with JSON, text or bytes: payload:name. An alias of "
    "DuckDB has a space after its colon: name: expression"
)
CAST_HINT = (
    "\nJSON has no type to compare, group or sort by: give it one, as in payload:name::string"
)
Step = str | int


@dataclass(frozen=True, slots=True)
class JsonPath:
    """A path: its tokens from `first` to before `stop`; its base ends before `chain`."""

    first: int
    chain: int
    stop: int
    steps: tuple[Step, ...]
    verbatim: str = ""
    """A literal JSONPath of the statement, after the steps."""
    is_text: bool = False
    is_colon: bool = False
    base: tuple[int, int] | None = None
    """The first and the last token of the base, if the path is a call."""


@dataclass(frozen=True, slots=True)
class DuckDB:
    """Calls of macros, which lake/duck.py makes: `MACROS`."""

    is_spark: bool = False

    def path(self, base: str, path: JsonPath, written: str, use: Use) -> str:
        steps = (f"[{one}]" if isinstance(one, int) else f'."{one}"' for one in path.steps)
        at = ("$" + "".join(steps) + path.verbatim).replace("'", "''")
        if use is Use.JSON:
            return f"json_part({base}, '{at}')"
        text = f"json_part_text({base}, '{at}')"
        match use:
            case Use.NUMBER | Use.BOOLEAN:
                return f"TRY_CAST({text} AS {_TYPES[use]})"
            case Use.ORDER:
                return f"json_part_order({text})"
            case Use.BEST:
                return f"{text}, json_part_order({text})"
        return text

    def named(self, name: str) -> str:
        return f"json_part_order({name})"


@dataclass(frozen=True, slots=True)
class Spark:
    """Spark's own paths into VARIANT; with `is_parsed`, the bases are text or bytes."""

    is_spark: bool = True
    is_parsed: bool = False

    def path(self, base: str, path: JsonPath, written: str, use: Use) -> str:
        if self.is_parsed:
            base = f"try_parse_json(try_validate_utf8(CAST({base} AS STRING)))"
        variant = base + (written if path.is_colon and "->" not in written else self._chain(path))
        match use:
            case Use.JSON:
                return variant
            case Use.ELEMENT:
                return f"to_json({variant})"
        text = self._text(base, path, variant)
        match use:
            case Use.NUMBER | Use.BOOLEAN:
                return f"try_cast({text} AS {_TYPES[use]})"
            case Use.ORDER:
                return self.named(text)
            case Use.BEST:
                return f"{text}, {self.named(text)}"
        return text

    def named(self, name: str) -> str:
        number = f"coalesce(try_cast({name}::string AS DOUBLE), double('infinity'))"
        return f"IF({name}::string IS NULL, NULL, struct({number}, {name}::string))"

    def _text(self, base: str, path: JsonPath, variant: str) -> str:
        # After GROUP BY, Spark knows this call again, but not its own path.
        steps = "".join(f"[{one}]" if isinstance(one, int) else f'["{one}"]' for one in path.steps)
        at = f"${steps}{path.verbatim}"
        is_plain = "\\" not in at and "'" not in at and at.count('"') == 2 * steps.count('["')
        return f"variant_get({base}, '{at}', 'string')" if is_plain else f"{variant}::string"

    def _chain(self, path: JsonPath) -> str:
        steps = "".join(f"[{one}]" if isinstance(one, int) else f"['{one}']" for one in path.steps)
        # A path begins after the colon, without a dot.
        more = path.verbatim if steps else path.verbatim.removeprefix(".")
        return f":{steps}{more}" if steps or more else ""


Dialect = DuckDB | Spark
_TYPES = {Use.NUMBER: "DOUBLE", Use.BOOLEAN: "BOOLEAN"}
# Bytes that are not UTF-8 and text that is not JSON are null: values come from any client. The
# macros of casts.py come first.
MACROS = """
CREATE MACRO json_part(value, path) AS json_extract(try_cast_json(value), path);
CREATE MACRO json_part_text(value, path) AS json_extract_string(try_cast_json(value), path);
CREATE MACRO json_part_order(value) AS CASE WHEN value IS NOT NULL
  THEN row(coalesce(try_cast(value AS DOUBLE), 'infinity'::DOUBLE), value) END;
"""
_CALLED = re.compile(
    r"""(?:(?:TRY_)?CAST\()?json_part(?:_text)?\((?P<base>.+),
        \ '\$(?P<path>(?:\."[^"]*"|\.\w+|\[\d+\])+)'\)(?:\ AS\ [\w(), ]+\))?""",
    re.VERBOSE | re.IGNORECASE,
)


_CASTS = {
    f"{cast}_{name}": (cast.upper(), kind)
    for cast in ("cast", "try_cast")
    for name, kind in (("text", "VARCHAR"), ("json", "JSON"))
}


def _with_casts(name: str) -> str:
    """The name, with calls of macros (casts.py) as the casts that were written."""
    tokens = Tokens(name, is_spark=False)
    edits = []
    for index, token in enumerate(tokens.all):
        closed = tokens.closing.get(index + 1)
        if token.low in _CASTS and closed is not None:
            cast, kind = _CASTS[token.low]
            edits += [(token.start, token.end, cast)]
            edits += [(tokens[closed].start, tokens[closed].start, f" AS {kind}")]
    for start, end, text in sorted(edits, reverse=True):
        name = name[:start] + text + name[end:]
    return name


def shown_names(names: list[str]) -> list[str]:
    """The names of DuckDB's columns, with paths as they are written: `payload:order.id`.

    A second column of the same path gets a number, as DuckDB numbers columns: `payload:id_1`.
    """
    found: list[str] = []
    for given in names:
        name = given
        call = _CALLED.fullmatch(name)
        if call is not None:
            path = call["path"].replace('."', ".").replace('"', "").removeprefix(".")
            name = f"{_with_casts(call['base']).replace(chr(34), '')}:{path}"
        name = written = _with_casts(name)
        number = 0
        while name != given and name in {*found, *names}:
            number += 1
            name = f"{written}_{number}"
        found.append(name)
    return found
