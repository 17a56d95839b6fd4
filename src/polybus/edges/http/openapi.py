"""The API's description, made from the operations that run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from polybus.edges.http.calls import JSON, Operation
from polybus.edges.http.problems import Problem

REF = "#/components/schemas/{name}"
PROBLEM = "application/problem+json"
OTHERS = {
    405: "The path knows other methods",
    413: "The body is too large",
    415: "The body is of another type",
    503: "The bus is stopping, or cannot store",
}


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = [Problem]
    for operation in operations:
        types += [one.type for one in operation.answers.values() if one.type is not None]
        types += [operation.body] if operation.body is not None else []
    unique = list({str(one): one for one in types}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template=REF)
    by_type = dict(zip(map(str, unique), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        entry = paths.setdefault(operation.path, {})
        entry[operation.method.lower()] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polybus", "version": version("polybus")},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    words = re.findall(r"[a-z0-9]+", operation.path)
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {
            str(status): _answer(one.text, one.media, one.type, schemas)
            for status, one in operation.answers.items()
        },
    }
    for status, text in OTHERS.items():
        if str(status) not in described["responses"]:
            described["responses"][str(status)] = _answer(text, PROBLEM, Problem, schemas)
    if operation.body is not None:
        schema = schemas[str(operation.body)]
        # Of what is no JSON, nothing more can be said; of `*/*`, nothing at all.
        others: dict[str, Any] = {JSON: schema, "*/*": {}}
        content: dict[str, Any] = {
            media: {"schema": others.get(media, {"type": "string"})} for media in operation.media
        }
        # An empty body is an empty message; it is no JSON.
        described["requestBody"] = {"required": JSON in operation.media, "content": content}
    return described


def _answer(text: str, media: str, kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if kind is None:
        return {"description": text}
    return {"description": text, "content": {media: {"schema": schemas[str(kind)]}}}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]
    if operation.query is not None:
        schema = msgspec.json.schema(operation.query)
        properties = schema["$defs"][operation.query.__name__]["properties"]
        parameters += [
            {"name": name, "in": "query", "required": False, "schema": one}
            for name, one in properties.items()
        ]
    return parameters
