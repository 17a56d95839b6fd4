"""/asyncapi.json has the structure that AsyncAPI 3 asks for, whatever the connectors speak."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from http_kit import http_bus

from polybus.config import Connector
from polybus.edges.http.asyncapi import describe_streams

# The fields of each object in the specification; those that must be there, with a star.
INFO = "title* version* description termsOfService contact license tags externalDocs"
SERVER = (
    "host* protocol* protocolVersion pathname description title summary variables security tags"
    " externalDocs bindings"
)
CHANNEL = "address messages title summary description servers parameters tags externalDocs bindings"
PARAMETER = "enum default description examples location"
MESSAGE = (
    "headers payload correlationId contentType name title summary description tags externalDocs"
    " bindings examples traits"
)
OPERATION = (
    "action* channel* title summary description security tags externalDocs bindings traits"
    " messages reply"
)
ROOT = "asyncapi* id info* servers defaultContentType channels operations components"
NAME = re.compile(r"[A-Za-z0-9_\-]+")
EVERYTHING = [
    Connector(),
    Connector(protocol="udp", speaks="goms"),
    Connector(port=1, speaks="queue", topic="jobs"),
]


def check_fields(found: dict[str, Any], fields: str) -> None:
    known = {one.rstrip("*") for one in fields.split()}
    needed = {one.rstrip("*") for one in fields.split() if one.endswith("*")}
    assert needed <= set(found) <= known


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            assert set(value) == {"$ref"}
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def resolved(document: Any, reference: str) -> Any:
    assert reference.startswith("#/")
    for step in reference.removeprefix("#/").split("/"):
        document = document[step.replace("~1", "/").replace("~0", "~")]
    return document


def check(document: dict[str, Any]) -> None:
    check_fields(document, ROOT)
    assert re.fullmatch(r"3\.\d+\.\d+", document["asyncapi"])
    check_fields(document["info"], INFO)
    for kind in ("servers", "channels", "operations"):
        assert all(NAME.fullmatch(name) for name in document[kind])
    for server in document["servers"].values():
        check_fields(server, SERVER)
        assert "://" not in server["host"]
    for channel in document["channels"].values():
        check_fields(channel, CHANNEL)
        named = set(re.findall(r"\{(\w+)\}", channel["address"]))
        assert named == set(channel.get("parameters", {}))
        for parameter in channel.get("parameters", {}).values():
            check_fields(parameter, PARAMETER)
        for message in channel["messages"].values():
            check_fields(message, MESSAGE)
    for operation in document["operations"].values():
        check_fields(operation, OPERATION)
        assert operation["action"] in ("send", "receive")
        # Messages must be those of the operation's channel, named there.
        place = f"{operation['channel']['$ref']}/messages/"
        assert operation["messages"]
        assert all(one["$ref"].startswith(place) for one in operation["messages"])
    found = list(references(document))
    assert found and all(isinstance(resolved(document, one), dict) for one in found)


@pytest.mark.parametrize("connectors", [EVERYTHING, EVERYTHING[2:]], ids=["all", "queue"])
def test_the_document_follows_the_rules_of_asyncapi(connectors: list[Connector]) -> None:
    document = describe_streams(connectors, ["figures"])
    check(document)
    spoken = {one for connector in connectors for one in connector.protocols}
    assert spoken <= set(document["channels"]) <= spoken | {"live"}


async def test_a_bus_describes_its_streams_beside_its_calls() -> None:
    async with http_bus() as http:
        document = (await http.client.get("/asyncapi.json")).json()
    check(document)
    expected = {"goms", "boson-frames", "boson-properties", "http", "live"}
    assert expected <= set(document["channels"])
    assert {"deliver-goms", "publish-goms", "deliver-http", "live"} <= set(document["operations"])
