"""Which change of a topic's schema its typed table accepts: those that readers can follow.

A column may be added, and a type may become wider; then all rows get the wider type. Anything else
is refused: a removed column, or one with another type, breaks the queries of readers. Whether a
column is NOT NULL decides only which messages go to quarantine, so that may change.
"""

import re
from typing import Any

from polybus.errors import UsageError
from polybus.lake.fields import Field, TableFields, is_json, type_name

_WIDER = {
    "byte": ("short", "integer", "long", "double"),
    "short": ("integer", "long", "double"),
    "integer": ("long", "double"),
    "float": ("double",),
}
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def evolved(table: str, known: TableFields, wanted: TableFields) -> TableFields:
    """The columns of a table after a change of its schema, the new ones last.

    Raises:
        UsageError: `pipeline.schema-change` if readers could not follow it.
    """
    new = {field["name"].lower(): field for field in wanted}
    found: list[Field] = []
    for field in known:
        name = field["name"]
        other = new.pop(name.lower(), None)
        if other is None:
            advice = f"declare it as {name} {type_name(field)}, which messages may lack"
            raise refused(table, f"column {name} is missing: {advice}")
        if other["name"] != name:
            raise refused(table, f"column {name} is now spelled {other['name']}")
        if other != field and not is_wider(field, other):
            change = f"column {name} is {type_name(field)}, now {type_name(other)}"
            raise refused(
                table, f"{change}: declare it as before, and add a new column with the other type"
            )
        found.append(other)
    return (*found, *new.values())


def is_wider(field: Field, other: Field) -> bool:
    """Whether a type holds all values of another one."""
    before: Any = field["type"]
    after: Any = other["type"]
    if is_json(field) or is_json(other) or not (isinstance(before, str) and isinstance(after, str)):
        return False
    one, two = _DECIMAL.fullmatch(before), _DECIMAL.fullmatch(after)
    if one and two:
        (digits, scale), (more, finer) = map(int, one.groups()), map(int, two.groups())
        return finer >= scale and more - finer >= digits - scale
    return after in _WIDER.get(before, ())


def refused(table: str, problem: str) -> UsageError:
    text = f"table {table}: {problem}; or make the table again: polybus tables drop {table}"
    return UsageError("pipeline.schema-change", text)
