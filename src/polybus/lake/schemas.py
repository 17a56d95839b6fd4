"""How a table's columns grow: new ones come at the end, known ones keep their type."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from polybus.errors import UsageError


def merged_schema(
    table: str, known: pa.Schema | None, additions: Iterable[pa.Schema]
) -> pa.Schema | None:
    """The columns of a table that takes in files with these columns; None if there are none.

    Raises:
        UsageError: `lake.schema`, a column is there already with another type or spelling.
    """
    fields: dict[str, pa.Field] = {}
    if known is not None:
        fields = {field.name: field for field in known}
    spellings = {name.lower(): name for name in fields}
    seen_any = known is not None
    for schema in additions:
        seen_any = True
        for field in schema:
            spelling = spellings.setdefault(field.name.lower(), field.name)
            if spelling != field.name:
                text = f"table {table} has a column {spelling}, new rows have {field.name}"
                raise UsageError("lake.schema", text)
            there = fields.setdefault(field.name, field)
            if there.type != field.type:
                text = (
                    f"table {table}: column {field.name} is {there.type}, "
                    f"in the new rows it is {field.type}"
                )
                raise UsageError("lake.schema", text)
    return pa.schema(list(fields.values())) if seen_any else None
