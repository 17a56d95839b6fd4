"""Declared columns: the views `silver.<topic>` for DuckDB, and the settings of typed tables.

A declared schema is Spark's list of columns (`id BIGINT NOT NULL, tags ARRAY<STRING>`). DuckDB has
other names for types. A value that cannot be converted is null, as in Spark.
"""

from pathlib import Path

from polybus.errors import UsageError
from polybus.lake import settings as pipeline_settings
from polybus.lake.table import open_table
from polybus.schema_ddl import ColumnType, columns_of

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
_TYPES = {
    "string": "VARCHAR",
    "varchar": "VARCHAR",
    "char": "VARCHAR",
    "variant": "JSON",
    "bigint": "BIGINT",
    "int": "INTEGER",
    "smallint": "SMALLINT",
    "tinyint": "TINYINT",
    "double": "DOUBLE",
    "float": "FLOAT",
    "boolean": "BOOLEAN",
    "date": "DATE",
    "timestamp": "TIMESTAMPTZ",
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
        columns = [(one.name, _duck_type(one.type)) for one in columns_of(schema)]
    except (ValueError, KeyError) as error:
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


def _duck_type(kind: ColumnType) -> str:
    """DuckDB's name of a type. Raises KeyError."""
    match kind.name:
        case "array":
            return f"{_duck_type(kind.inside[0])}[]"
        case "map":
            return f"MAP({', '.join(map(_duck_type, kind.inside))})"
        case "struct":
            fields = [f"{_quoted(one.name)} {_duck_type(one.type)}" for one in kind.fields]
            return f"STRUCT({', '.join(fields)})"
        case "decimal":
            return f"DECIMAL({', '.join(kind.arguments or ('10', '0'))})"
    return _TYPES[kind.name]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
