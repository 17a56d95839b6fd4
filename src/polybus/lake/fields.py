"""The columns of a lake table, as Delta and Spark write them: one JSON object per column.

Arrow, Spark and Parquet disagree on the names and the nullability inside of lists and maps. So all
columns are nullable here, at every level, and columns are compared in this form only.

A JSON column is text with a mark: Spark shows it as VARIANT, DuckDB as JSON, all others as text
(docs/decisions/0018-delta-tables.md).
"""

import json
from collections.abc import Collection, Iterable
from typing import Any

import pyarrow as pa
from deltalake import Schema

from polybus.errors import UsageError

Field = dict[str, Any]
TableFields = tuple[Field, ...]
JSON_MARK = {"polybus.type": "json"}


def fields_of(table: str, schema: pa.Schema) -> TableFields:
    """The columns of an Arrow schema. Raises UsageError `lake.schema` if Delta has no such type."""
    plain = pa.schema(
        [
            field.with_metadata(JSON_MARK) if _has_mark(field) else field.remove_metadata()
            for field in schema
        ]
    )
    try:
        return parsed_fields(Schema.from_arrow(plain).to_json())
    except Exception as error:
        raise UsageError("lake.schema", f"table {table}: {error}") from error


def parsed_fields(schema: str) -> TableFields:
    """The columns in a schema of Delta or of Spark, which is JSON; VARIANT becomes JSON text."""
    return tuple(_plain(field) for field in json.loads(schema)["fields"])


def marked_as_json(fields: TableFields, names: Collection[str]) -> TableFields:
    """The columns, some of them as JSON."""
    return tuple(
        field | {"metadata": JSON_MARK} if field["name"] in names else field for field in fields
    )


def checked_fields(table: str, fields: TableFields) -> TableFields:
    """Check the columns. Raises UsageError `lake.schema` if Delta has no such type."""
    text = schema_string(fields)
    if '"variant"' in text:
        raise UsageError("lake.schema", f"table {table}: VARIANT inside of another type: {text}")
    try:
        Schema.from_json(text)
    except Exception as error:
        raise UsageError("lake.schema", f"table {table}: {error}") from error
    return fields


def schema_string(fields: TableFields) -> str:
    return json.dumps({"type": "struct", "fields": list(fields)})


def arrow_schema(fields: TableFields) -> pa.Schema:
    schema = pa.schema(Schema.from_json(schema_string(fields)).to_arrow())
    return pa.schema([field.remove_metadata() for field in schema])


def is_json(field: Field) -> bool:
    return bool(field["metadata"] == JSON_MARK)


def merged_fields(table: str, known: TableFields, additions: Iterable[TableFields]) -> TableFields:
    """The columns of a table after files with these columns are added.

    New columns come at the end; known ones keep their type.

    Raises:
        UsageError: `lake.schema`, the table has the column with another type or spelling.
    """
    merged = {field["name"]: field for field in known}
    spellings = {name.lower(): name for name in merged}
    for fields in additions:
        for field in fields:
            name = field["name"]
            spelling = spellings.setdefault(name.lower(), name)
            if spelling != name:
                text = f"table {table}: new rows spell the column {spelling} as {name}; rename it"
                raise UsageError("lake.schema", text)
            there = merged.setdefault(name, field)
            if there != field:
                text = (
                    f"table {table}: column {name} is {type_name(field)} in the new rows, "
                    f"not {type_name(there)}; cast it"
                )
                raise UsageError("lake.schema", text)
    return tuple(merged.values())


def _has_mark(field: Any) -> bool:
    return (field.metadata or {}).get(b"polybus.type") == b"json"


def _plain(field: Field) -> Field:
    kind = field["type"]
    mark = JSON_MARK if kind == "variant" or field.get("metadata") == JSON_MARK else {}
    kind = "string" if kind == "variant" else _nullable(kind)
    return {"name": field["name"], "type": kind, "nullable": True, "metadata": mark}


def _nullable(kind: Any) -> Any:
    if isinstance(kind, str):
        return kind
    match kind["type"]:
        case "struct":
            inner = [_plain(one) | {"type": _nullable(one["type"])} for one in kind["fields"]]
            return {"type": "struct", "fields": inner}
        case "array":
            element = _nullable(kind["elementType"])
            return {"type": "array", "elementType": element, "containsNull": True}
        case "map":
            names = ("keyType", "valueType")
            types = {name: _nullable(kind[name]) for name in names}
            return {"type": "map", **types, "valueContainsNull": True}
    return kind


def type_name(field: Field) -> str:
    if is_json(field):
        return "JSON"
    kind = field["type"]
    return kind if isinstance(kind, str) else json.dumps(kind)
