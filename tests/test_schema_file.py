"""Schemas from files: JSON Schema and Avro become columns, and say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polybus import config_file
from polybus.errors import ConfigError
from polybus.schema_file import columns_in

JSON_SCHEMA = {
    "$defs": {"money": {"type": "number"}, "place": {"properties": {"city": {"type": "string"}}}},
    "type": "object",
    "required": ["id", "at", "maybe"],
    "properties": {
        "id": {"type": "integer"},
        "at": {"type": "string", "format": "date-time"},
        "day": {"type": "string", "format": "date"},
        "price": {"$ref": "#/$defs/money"},
        "maybe": {"type": ["boolean", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "bag": {"type": "array"},
        "to": {"$ref": "#/$defs/place"},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "number": {"oneOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]},
        "first name": {"enum": ["a", "b"]},
        "anything": {"type": "object"},
    },
}
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "n", "type": ["null", "int"], "default": None},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["a"]}},
        {"name": "again", "type": "Kind", "default": "a"},
        {"name": "lines", "type": {"type": "array", "items": {
            "type": "record", "name": "Line", "fields": [
                {"name": "sku", "type": "string"}, {"name": "x", "type": ["int", "string"]}]}}},
        {"name": "more", "type": {"type": "map", "values": "double"}},
        {"name": "time", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}  # fmt: skip


def columns(schema: Any) -> list[str]:
    return columns_in(json.dumps(schema).encode(), "here").replace("`", "").split(", ")


def test_json_schema_becomes_columns() -> None:
    assert columns(JSON_SCHEMA) == [
        "id BIGINT NOT NULL",
        "at TIMESTAMP NOT NULL",
        "day DATE",
        "price DOUBLE",
        "maybe BOOLEAN",
        "tags ARRAY<STRING>",
        "bag ARRAY<STRING>",
        "to STRUCT<city STRING>",
        *("counts MAP<STRING", "BIGINT>"),
        "either VARIANT",
        "number DOUBLE",
        "first name STRING",
        "anything VARIANT",
    ]


def test_parts_and_values_of_json_schema_have_types() -> None:
    base = {"required": ["id"], "properties": {"id": {"type": "integer"}}}
    schema = {
        "$defs": {"base": base},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"kind": {"const": "order"}}}],
        "required": ["level"],
        "properties": {
            "level": {"enum": [1, 2]},
            "maybe": {"enum": ["a", None]},
            "mixed": {"enum": ["a", 1]},
            "to": {"allOf": [base, {"properties": {"city": {"type": "string"}}}]},
            "price": {"allOf": [{"type": "number"}, {"minimum": 0}]},
        },
    }
    assert columns(schema) == [
        *("id BIGINT NOT NULL", "kind STRING", "level BIGINT NOT NULL", "maybe STRING"),
        *("mixed VARIANT", "to STRUCT<id BIGINT", "city STRING>", "price DOUBLE"),
    ]


def test_parts_of_json_schema_may_be_true_and_describe_the_same_property() -> None:
    integer, positive = {"type": "integer"}, {"minimum": 1}
    schema = {
        "$defs": {"any": True},
        "allOf": [
            True,
            {"$ref": "#/$defs/any"},
            {
                "required": ["id"],
                "properties": {"id": integer, "to": {"properties": {"a": integer}}},
            },
            {"properties": {"id": positive, "to": {"properties": {"b": integer}}}},
        ],
        "properties": {"id": True, "any": {"$ref": "#/$defs/any"}, "only": {"allOf": [True]}},
    }
    assert columns(schema) == [
        *("id BIGINT NOT NULL", "to STRUCT<a BIGINT", "b BIGINT>"),
        *("any VARIANT", "only VARIANT"),
    ]


@pytest.mark.parametrize(
    ("precision", "scale", "kind"),
    [
        (38, 38, "DECIMAL(38, 38)"),
        (39, 2, "STRING"),
        (4, 5, "STRING"),
        (0, 0, "STRING"),
        (None, 0, "STRING"),
    ],
)
def test_a_decimal_of_avro_that_spark_cannot_hold_is_text(
    precision: int | None, scale: int, kind: str
) -> None:
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
    record = {"type": "record", "name": "r", "fields": [{"name": "a", "type": decimal}]}
    assert ", ".join(columns(record)) == f"a {kind} NOT NULL"


def test_names_of_avro_have_namespaces() -> None:
    inner = {"type": "record", "name": "In", "fields": [{"name": "x", "type": "int"}]}
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    fields: dict[str, Any] = {
        "a": inner,
        "b": "a.b.In",
        "c": ["null", "In"],
        "d": {**inner, "name": "Other", "namespace": "c"},
        "e": "c.Other",
        "n": ["int", "long"],
        "f": ["null", "float", "long"],
        "money": decimal,
    }
    record: dict[str, Any] = {"type": "record", "name": "Order", "namespace": "a.b"}
    record |= {"fields": [{"name": name, "type": kind} for name, kind in fields.items()]}
    struct = "STRUCT<x INT>"
    assert columns(record) == [
        *(f"a {struct} NOT NULL", f"b {struct} NOT NULL", f"c {struct}", f"d {struct} NOT NULL"),
        *(f"e {struct} NOT NULL", "n BIGINT NOT NULL", "f DOUBLE"),
        *("money DECIMAL(9", "2) NOT NULL"),
    ]


def test_avro_becomes_columns() -> None:
    assert columns(AVRO) == [
        "id BIGINT NOT NULL",
        "n INT",
        "kind STRING NOT NULL",
        "again STRING",
        *("lines ARRAY<STRUCT<sku STRING", "x STRING>> NOT NULL"),
        *("more MAP<STRING", "DOUBLE> NOT NULL"),
        "time BIGINT NOT NULL",
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not JSON"),
        (b"[]", "cannot be understood"),
        (b'{"type": "string"}', "must describe an object"),
        (b'{"properties": {"a": {"type": "strange"}}}', "strange"),
        (b'{"properties": {"a`b": {}}}', "quote"),
        (b'{"properties": {"a": {"$ref": "other.json"}}}', "outside of the file"),
        (b'{"properties": {"a": {"$ref": "#/properties/a"}}}', "refers to itself"),
        (b'{"properties": {"a": {"properties": {"b": {"$ref": "#"}}}}}', "refers to itself"),
        (b'{"type": "record", "fields": [{"name": "a", "type": "Unknown"}]}', "Unknown"),
        (
            b'{"type": "record", "name": "r", "fields": [{"name": "a", "type": ["null", "r"]}]}',
            "the record r contains itself",
        ),
    ],
)
def test_a_file_that_is_no_schema_of_objects_is_refused(content: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.schema: here: .*{problem}"):
        columns_in(content, "here")


def test_a_topic_names_its_file_relative_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text('{"properties": {"id": {"type": "integer"}}}')
    path = tmp_path / "bus.toml"
    path.write_text('[[topics]]\nname = "orders"\nschema-file = "order.json"\n')
    [topic] = config_file.load(path, {}).topic_list()
    assert topic.schema == "`id` BIGINT"
    path.write_text('[[topics]]\nname = "orders"\nschema-file = "missing.json"\n')
    with pytest.raises(ConfigError, match=r"config\.file: .*topics: orders: schema-file: cannot"):
        config_file.load(path, {})
    path.write_text('[[topics]]\nname = "o"\nschema = "id INT"\nschema-file = "order.json"\n')
    with pytest.raises(ConfigError, match="not both"):
        config_file.load(path, {})
