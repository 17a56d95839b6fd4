"""A topic's schema from a file: JSON Schema (`.json`) or Avro (`.avsc`), as columns of Spark.

The messages are JSON in both cases. What a column cannot express (patterns, ranges, alternatives)
is not checked: a value of several types is VARIANT, which is any JSON, and inside of arrays and
objects text. A property that is required and cannot be null becomes NOT NULL. `enum` and `const`
have the type of their values, and the parts of `allOf` are taken together, also for a property that
several of them describe.

A logical type of Avro counts where JSON has a notation for it that Spark converts: `decimal` is
DECIMAL up to 38 digits, and the times that Avro writes as numbers stay numbers, because Spark
would take them for seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from polybus.errors import ConfigError

DEPTH_MAX = 32
DECIMAL_DIGITS_MAX = 38
_ANY = "VARIANT"
_NULL = {"type": "null"}
_SIMPLE = {"string": "STRING", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}
_FORMATS = {"date-time": "TIMESTAMP", "date": "DATE"}
_AVRO = {
    "boolean": "BOOLEAN",
    "int": "INT",
    "long": "BIGINT",
    "float": "FLOAT",
    "double": "DOUBLE",
    "string": "STRING",
    "bytes": "STRING",
    "enum": "STRING",
    "fixed": "STRING",
}


def columns_in(content: bytes, where: str) -> str:
    """The columns of a schema, in Spark's notation.

    Raises:
        ConfigError: `config.schema`, it is not the schema of an object.
    """
    try:
        schema = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config.schema", f"{where}: not JSON: {error}") from error
    is_avro = isinstance(schema, dict) and schema.get("type") == "record"
    try:
        if is_avro:
            found = _avro_columns(schema, _AvroNames(), "", 0)
        else:
            found = _json_columns(schema, schema, 0)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        text = f"{where}: cannot be understood as JSON Schema or Avro: {error}"
        raise ConfigError("config.schema", text) from error
    if not found:
        text = "must describe an object with properties (JSON Schema), or a record (Avro)"
        raise ConfigError("config.schema", f"{where}: {text}")
    return ", ".join(found)


def _named(name: str, kind: str, *, is_required: bool = False) -> str:
    if not name or not set(name).isdisjoint("'\"\\`"):
        raise ValueError(f"the name {name!r} is empty or has a quote")
    return f"`{name}` {kind}{' NOT NULL' if is_required else ''}"


def _inside(kind: str) -> str:
    """A type inside of another one, where a table cannot have VARIANT."""
    return "STRING" if kind == _ANY else kind


# JSON Schema.


def _json_columns(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> list[str]:
    schema = _whole(schema, root, depth)
    required = set(schema.get("required", ()))
    found = []
    for name, one in schema.get("properties", {}).items():
        kind, is_nullable = _json_type(one, root, depth + 1)
        is_required = name in required and not is_nullable
        found.append(_named(name, kind, is_required=is_required))
    return found


def _json_type(schema: Any, root: Mapping[str, Any], depth: int) -> tuple[str, bool]:
    """The type of a property, and whether it may be null."""
    if depth > DEPTH_MAX:
        raise ValueError(f"it is nested more than {DEPTH_MAX} deep, or refers to itself")
    schema = _whole(schema, root, depth)
    if not isinstance(schema, dict):
        return _ANY, True
    for word in ("anyOf", "oneOf"):
        if word in schema:
            others = [one for one in schema[word] if one != _NULL]
            found = [_json_type(one, root, depth + 1) for one in others]
            is_nullable = _NULL in schema[word] or any(null for _, null in found)
            return _common([kind for kind, _ in found], is_nullable)
    types = schema.get("type", "object" if "properties" in schema else _types_of_values(schema))
    types = [types] if isinstance(types, str) else list(types)
    kinds = [_json_simple(one, schema, root, depth) for one in types if one != "null"]
    return _common(kinds, "null" in types or not types)


def _types_of_values(schema: Mapping[str, Any]) -> list[str]:
    """The types of the values that `enum` and `const` allow."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return list(dict.fromkeys(_VALUES[type(value)] for value in values))


_VALUES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _whole(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    """The schema without references and `allOf`: it has the properties of all parts.

    A schema may be `true`, which allows anything and adds nothing.
    """
    if depth > DEPTH_MAX:
        raise ValueError(f"it is nested more than {DEPTH_MAX} deep, or refers to itself")
    schema = _resolved(schema, root)
    if not isinstance(schema, dict) or "allOf" not in schema:
        return schema
    rest = {name: value for name, value in schema.items() if name != "allOf"}
    merged: dict[str, Any] = {}
    for part in [*schema["allOf"], rest]:
        part = _whole(part, root, depth + 1)
        if not isinstance(part, dict):
            continue
        properties = dict(merged.get("properties", {}))
        for name, one in part.get("properties", {}).items():
            properties[name] = {"allOf": [properties[name], one]} if name in properties else one
        required = [*merged.get("required", ()), *part.get("required", ())]
        merged |= part
        merged |= {"properties": properties} if properties else {}
        merged |= {"required": required} if required else {}
    return merged


def _json_simple(kind: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    match kind:
        case "string":
            return _FORMATS.get(schema.get("format", ""), "STRING")
        case "array":
            items = _json_type(schema.get("items"), root, depth + 1)[0]
            return f"ARRAY<{_inside(items)}>"
        case "object" if schema.get("properties"):
            return f"STRUCT<{_struct(_json_columns(schema, root, depth))}>"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            values = _json_type(schema["additionalProperties"], root, depth + 1)[0]
            return f"MAP<STRING, {_inside(values)}>"
        case "object":
            return _ANY
    return _SIMPLE[kind]


def _struct(columns: list[str]) -> str:
    """Columns as fields of a struct, all of which may be missing."""
    plain = [column.removesuffix(" NOT NULL") for column in columns]
    return ", ".join(
        f"{one.removesuffix(_ANY)}STRING" if one.endswith(_ANY) else one for one in plain
    )


def _common(kinds: list[str], is_nullable: bool) -> tuple[str, bool]:
    """One type for values of several."""
    unique = set(kinds)
    for wide in (("BIGINT", "INT"), ("DOUBLE", "FLOAT"), ("DOUBLE", "FLOAT", "BIGINT", "INT")):
        if len(unique) > 1 and unique <= set(wide):
            return wide[0], is_nullable
    return (unique.pop() if len(unique) == 1 else _ANY), is_nullable


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a reference within the file names."""
    for _ in range(DEPTH_MAX):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        path = schema["$ref"]
        if path != "#" and not path.startswith("#/"):
            raise ValueError(f"$ref {path!r} is outside of the file")
        found: Any = root
        for part in path.split("/")[1:]:
            found = found[part.replace("~1", "/").replace("~0", "~")]
        schema = found
    raise ValueError("a $ref refers to itself")


# Avro.


@dataclass
class _AvroNames:
    """The named types so far, by their full names; those that are not yet complete are `open`."""

    known: dict[str, str] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)

    def find(self, name: str, space: str) -> str:
        """The type of a name, as it is written inside of a namespace."""
        for full in [name] if "." in name else [f"{space}.{name}".lstrip("."), name]:
            if full in self.open:
                raise ValueError(f"the record {full} contains itself, which no column can")
            if full in self.known:
                return self.known[full]
        if name not in _AVRO:
            raise ValueError(f"the type {name!r} is not defined before it is used")
        return _AVRO[name]


def _full_name(schema: Mapping[str, Any], space: str) -> tuple[str, str]:
    """The full name of a named type, and the namespace of what is inside of it."""
    name = schema["name"]
    if "." in name:
        return name, name.rpartition(".")[0]
    space = schema.get("namespace", space)
    return f"{space}.{name}".lstrip("."), space


def _avro_columns(
    record: Mapping[str, Any], names: _AvroNames, space: str, depth: int
) -> list[str]:
    full, space = _full_name(record, space) if "name" in record else ("", space)
    names.open.add(full)
    found = []
    for one in record["fields"]:
        kind, is_nullable = _avro_type(one["type"], names, space, depth + 1)
        is_required = not is_nullable and "default" not in one
        found.append(_named(one["name"], kind, is_required=is_required))
    names.open.discard(full)
    return found


def _avro_type(schema: Any, names: _AvroNames, space: str, depth: int) -> tuple[str, bool]:
    """The type of a field, and whether it may be null."""
    if depth > DEPTH_MAX:
        raise ValueError(f"it is nested more than {DEPTH_MAX} deep")
    if isinstance(schema, list):
        kinds = [_avro_type(one, names, space, depth + 1)[0] for one in schema if one != "null"]
        return _common(kinds, "null" in schema)
    if isinstance(schema, str):
        return (_ANY, True) if schema == "null" else (names.find(schema, space), False)
    kind = schema["type"]
    if not isinstance(kind, str):
        return _avro_type(kind, names, space, depth + 1)
    match kind:
        case "record" | "error":
            found = f"STRUCT<{_struct(_avro_columns(schema, names, space, depth))}>"
        case "array":
            found = f"ARRAY<{_inside(_avro_type(schema['items'], names, space, depth + 1)[0])}>"
        case "map":
            values = _avro_type(schema["values"], names, space, depth + 1)[0]
            found = f"MAP<STRING, {_inside(values)}>"
        case _:
            found = _decimal(schema) or names.find(kind, space)
    if "name" in schema:
        names.known[_full_name(schema, space)[0]] = found
    return found, False


def _decimal(schema: Mapping[str, Any]) -> str | None:
    """The type of a decimal that Spark can hold; Avro ignores a logical type that is not valid."""
    precision, scale = schema.get("precision"), schema.get("scale", 0)
    if (
        schema.get("logicalType") != "decimal"
        or type(precision) is not int
        or type(scale) is not int
    ):
        return None
    is_held = 1 <= precision <= DECIMAL_DIGITS_MAX and 0 <= scale <= precision
    return f"DECIMAL({precision}, {scale})" if is_held else None
