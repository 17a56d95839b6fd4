"""Declared columns: the views `silver.<topic>` for DuckDB, and the settings of typed tables.

A declared schema is Spark's list of columns (`id BIGINT NOT NULL, tags ARRAY<STRING>`). DuckDB has
other names for types. A value that cannot be converted is null, as in Spark.
"""

import re
from pathlib import Path

from polybus.errors import UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.table import open_table

PREFIX = "silver."
TABLE_PREFIX = "silver_"
MESSAGE_COLUMNS = (
    *("epoch", "offset", "timestamp", "event_time", "late", "protocol", "sender", "key"),
    *("message_id", "properties"),
)
ABOUT = "_message"
"""The struct with these columns, in views and tables; no field of a schema can have this name."""
SCHEMA = "polybus.schema"
SCHEMA_VERSION = "polybus.schema-version"
MISSED = "polybus.missed"
"""Settings of a table `silver_<topic>`; MISSED is the first batch that it missed, or empty."""
_TOKENS = re.compile(r"`(?:[^`]|``)*`|'(?:[^'\\]|\\.|'')*'|\w+|[<>(),:]")
_TYPES = {
    "string": "VARCHAR",
    "varchar": "VARCHAR",
    "char": "VARCHAR",
    "variant": "JSON",
    "bigint": "BIGINT",
    "long": "BIGINT",
    "int": "INTEGER",
    "integer": "INTEGER",
    "smallint": "SMALLINT",
    "short": "SMALLINT",
    "tinyint": "TINYINT",
    "byte": "TINYINT",
    "double": "DOUBLE",
    "float": "FLOAT",
    "real": "FLOAT",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "timestamp": "TIMESTAMPTZ",
    "timestamp_ltz": "TIMESTAMPTZ",
    "timestamp_ntz": "TIMESTAMP",
    "binary": "BLOB",
}


def view_schema(data: Path, view: str) -> tuple[str, str] | None:
    """The topic of a view `silver.<topic>` and the columns of the view; None if there is none.

    The columns are those of the table `silver_<topic>`, which keeps its schema if a new one is
    refused.
    """
    for topic in pipeline_settings.read(data).topics:
        if topic.schema is not None and view.lower() == PREFIX + topic.name:
            table = open_table(data, TABLE_PREFIX + topic.name)
            return topic.name, table.settings.get(SCHEMA, topic.schema)
    return None


def view_names(data: Path) -> list[str]:
    """The views `silver.<topic>` of topics with a schema."""
    if not open_table(data, "silver").exists:
        return []
    return [PREFIX + one.name for one in pipeline_settings.read(data).topics if one.schema]


def typed_select(topic: str, schema: str) -> str:
    """The columns of a view over `silver`, for SELECT.

    Raises:
        UsageError: `pipeline.schema`, the schema is invalid, or has a type that DuckDB lacks.
    """
    try:
        columns = _Ddl(schema).columns()
    except (IndexError, KeyError) as error:
        text = f"topics: {topic}: schema {schema[:200]!r}: DuckDB cannot read it at {error}"
        raise UsageError("pipeline.schema", text) from error
    about = ", ".join(f'"{name}" := "{name}"' for name in MESSAGE_COLUMNS)
    parts = [f"{_value(name, kind)} AS {_quoted(name)}" for name, kind in columns]
    return ", ".join([*parts, f"struct_pack({about}) AS {ABOUT}"])


def _value(name: str, kind: str) -> str:
    path = _text(f'$."{name}"')
    if kind in ("JSON", "VARCHAR"):
        return f"(payload {'->' if kind == 'JSON' else '->>'} {path})"
    arrow = "->" if kind[-1] in ")]" and not kind.startswith("DECIMAL") else "->>"
    return f"TRY_CAST((payload {arrow} {path}) AS {kind})"


class _Ddl:
    """Spark's columns as DuckDB's. Raises KeyError or IndexError where it does not understand."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKENS.findall(text)
        self._at = 0

    def columns(self, end: str = "") -> list[tuple[str, str]]:
        found = []
        while True:
            name = self._take().strip("`")
            if self._next == ":":
                self._take()
            found.append((name, self._type()))
            self._skip_options()
            if self._next == end:
                return found
            self._expect(",")

    def _type(self) -> str:
        word = self._take().lower()
        match word:
            case "array":
                self._expect("<")
                inner = self._type()
                self._expect(">")
                return f"{inner}[]"
            case "map":
                self._expect("<")
                key = self._type()
                self._expect(",")
                value = self._type()
                self._expect(">")
                return f"MAP({key}, {value})"
            case "struct":
                self._expect("<")
                fields = self.columns(">")
                self._expect(">")
                return f"STRUCT({', '.join(f'{_quoted(name)} {kind}' for name, kind in fields)})"
            case "decimal" | "dec" | "numeric":
                digits = self._arguments() or ["10", "0"]
                return f"DECIMAL({', '.join(digits)})"
        self._arguments()  # The length of a VARCHAR.
        return _TYPES[word]

    def _arguments(self) -> list[str]:
        found = []
        if self._next == "(":
            while (token := self._take()) != ")":
                found += [token] if token.isdigit() else []
        return found

    def _skip_options(self) -> None:
        """NOT NULL, COMMENT 'text'."""
        while self._next.lower() in ("not", "null", "comment") or self._next.startswith("'"):
            self._take()

    @property
    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        self._at += 1
        return str(self._tokens[self._at - 1])

    def _expect(self, token: str) -> None:
        if (found := self._take()) != token:
            raise KeyError(found)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
