"""The fields of a schema that a topic declares, as text of Spark SQL."""

from pyspark.sql.types import StructType

from polybus.errors import UsageError
from polybus.schema_ddl import COLUMNS_MAX


def literal(text: str) -> str:
    """An SQL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def field_of(name: str, kind: str) -> str:
    """A field of a JSON value; null if it is missing or not of the type."""
    path = literal(f"$['{name}']")
    return f"TRY_VARIANT_GET(payload, {path}, {literal(kind)})"


def schema_fields(topic: str, schema: str) -> list[tuple[str, str, bool]]:
    """Name, type and whether it is required, for each column of a declared schema.

    Raises:
        UsageError: `pipeline.schema`.
    """
    where = f"topics: {topic}: schema {schema[:200]!r}"
    try:
        parsed = StructType.fromDDL(schema)
    except Exception as error:
        text = f"{where} is not a list of Spark columns: {str(error).splitlines()[0]}"
        raise UsageError("pipeline.schema", text) from error
    fields = [(one.name, one.dataType.simpleString(), not one.nullable) for one in parsed.fields]
    if len(fields) > COLUMNS_MAX:
        raise UsageError("pipeline.schema", f"{where} has more than {COLUMNS_MAX} columns")
    for name, _, _ in fields:
        if not set(name).isdisjoint("'\"\\`"):
            raise UsageError("pipeline.schema", f"{where}: the name {name} contains a quote")
    return fields
