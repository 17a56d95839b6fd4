"""OpenAPI: the API's description, generated from its operations."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec

from polybus.edges.http.calls import JSON, TEXT, Operation
from polybus.edges.http.problems import Problem

REF = "#/components/schemas/{name}"
PROBLEM = "application/problem+json"
FAILURES = {
    400: "The request is malformed",
    403: "The topic is reserved for the system",
    404: "It does not exist",
    405: "The path has other methods",
    409: "It conflicts with what exists or is under way",
    413: "The body is too large",
    415: "The content type is not accepted",
    416: "The offset is outside of what the topic holds",
    503: "The bus is stopping, or cannot store",
    507: "Too much is staged",
}
ALWAYS = (405, 413, 415, 503)


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    types = [Problem]
    for operation in operations:
        types += [one for one in (operation.answer, operation.body) if one is not None]
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
    answers: list[tuple[int, str, Any]] = [
        (status, PROBLEM, Problem) for status in sorted({*operation.fails, *ALWAYS})
    ]
    answers.append((operation.status, operation.produces, operation.answer))
    if operation.produces == TEXT and 503 in operation.fails:
        answers.append((503, TEXT, str))
    words = re.findall(r"[a-z0-9]+", operation.path)
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": (operation.run.__doc__ or "").rstrip("."),
        "parameters": _parameters(operation),
        "responses": {
            str(status): _answer(status, media, schemas.get(str(kind)))
            for status, media, kind in answers
        },
    }
    if operation.body is not None:
        schema = schemas[str(operation.body)]
        # A body of another type is a string; one of any type has no schema.
        others: dict[str, Any] = {JSON: schema, "*/*": {}}
        content: dict[str, Any] = {
            media: {"schema": others.get(media, {"type": "string"})} for media in operation.media
        }
        # A body that need not be JSON may be empty: an empty message.
        described["requestBody"] = {"required": JSON in operation.media, "content": content}
    return described


def _answer(status: int, media: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    text = FAILURES.get(status, HTTPStatus(status).phrase)
    if schema is None:
        return {"description": text}
    return {"description": text, "content": {media: {"schema": schema}}}


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
