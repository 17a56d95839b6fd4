"""CloudEvents over HTTP in both modes, and traces, through the bus to other protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest
from edge_kit import line
from http_kit import Http, http_bus

from polybus.testing import ScriptedPeer

EVENT = "application/cloudevents+json"
EVENTS = "application/cloudevents-batch+json"
ORDER = {
    "specversion": "1.0",
    "id": "17",
    "source": "/shop",
    "type": "order.made",
    "subject": "Zürich",
    "traceparent": "00-aa-bb-01",
    "data": {"n": 1},
}
MESSAGES = "/v1/topics/news/messages"


async def send(http: Http, body: Any, kind: str = EVENT, status: int = 200) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await http.client.post(MESSAGES, content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text


async def one(http: Http, offset: int, accept: str) -> Any:
    return await http.client.get(f"{MESSAGES}/{offset}", headers={"accept": accept})


async def test_an_event_comes_back_as_it_came_in_either_mode() -> None:
    async with http_bus("news") as http:
        await send(http, ORDER)
        named = ("specversion", "id", "source", "type")
        binary = {f"ce-{name}": str(ORDER[name]) for name in named}
        binary |= {"ce-subject": "Z%C3%BCrich", "traceparent": "00-aa-bb-01"}
        kind = {"content-type": "application/json"}
        await http.client.post(MESSAGES, content=b'{"n":1}', headers={**binary, **kind})
        for offset in (0, 1):
            structured = (await one(http, offset, EVENT)).json()
            raw = await one(http, offset, "application/octet-stream")

            assert structured == {**ORDER, "datacontenttype": "application/json"}
            assert json.loads(raw.content) == {"n": 1}
            assert (raw.headers["ce-id"], raw.headers["ce-type"]) == ("17", "order.made")
            assert raw.headers["ce-subject"] == "Z%C3%BCrich"
            assert raw.headers["content-type"] == "application/octet-stream"


async def test_an_event_that_is_stored_as_a_blob_keeps_its_attributes() -> None:
    named = {f"ce-{name}": str(ORDER[name]) for name in ("specversion", "id", "source", "type")}
    async with http_bus("news", limits={"inline-bytes-max": 100}) as http:
        await http.client.post(MESSAGES, content=b"x" * 200, headers=named)
        await http.client.put("/v1/topics/news/blob", content=b"x", headers=named)
        for offset in (0, 1):
            found = (await http.client.get(f"{MESSAGES}/{offset}")).json()["message"]

            assert found["headers"] == {**named} and found["reference"]


async def test_a_batch_of_events_is_published_and_read() -> None:
    async with http_bus("news") as http:
        bytes_event = {**ORDER, "id": "2", "data_base64": "/w=="}
        del bytes_event["data"]
        text_event = {**ORDER, "id": "3", "datacontenttype": "text/plain", "data": "hello"}
        await send(http, [ORDER, bytes_event, text_event], EVENTS)
        await http.publish("news", b"no event")
        answer = await http.client.get(MESSAGES, headers={"accept": EVENTS})
        found = answer.json()

        assert [event["id"] for event in found[:3]] == ["17", "2", "3"]
        assert (found[1]["data_base64"], found[2]["data"]) == ("/w==", "hello")
        assert found[3]["type"] == "polybus.message" and found[3]["data"] == "no event"
        assert found[3]["source"] == "/v1/topics/news" and found[3]["id"].endswith(":3")
        assert answer.headers["polybus-next"] == "4"


async def test_attributes_and_traces_reach_other_protocols_as_headers() -> None:
    async with http_bus("news") as http, ScriptedPeer(http.node.tcp_port) as peer:
        await peer.send(line("register", topics=["news"], ack=True))
        await peer.read_line()
        await send(http, ORDER)
        trace = {"traceparent": "00-cc-dd-01", "tracestate": "a=b"}
        await http.client.post(MESSAGES, content=b"plain", headers=trace)
        event = json.loads(await peer.read_line())
        plain = json.loads(await peer.read_line())

        assert event["headers"]["ce-id"] == "17"
        assert event["headers"]["traceparent"] == "00-aa-bb-01"
        assert plain["headers"] == trace


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'"x"',
        {"specversion": "0.3", "id": "1", "source": "s", "type": "t"},
        {"specversion": "1.0", "id": "1", "source": "s"},
        {**ORDER, "extra": {"a": 1}},
        {**ORDER, "data_base64": "!"},
        b"[" * 100 + b"]" * 100,
        b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":[1e999]}',
        b'{"specversion":"1.0","id":"1","source":"s","type":"t","data":%s}' % (b"9" * 400),
    ],
)
async def test_what_is_no_event_is_refused(body: Any) -> None:
    async with http_bus("news") as http:
        await send(http, body, status=400)
        assert http.node.bus.log.bounds("news").stop == 0
