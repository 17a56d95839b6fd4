"""Single messages, their bytes in every protocol, and what settings hide of them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from base64 import b64decode
from typing import Any

import pyarrow as pa
import pytest
from edge_kit import frame, goms_value, line, properties
from http_kit import Http, http_bus
from websockets.asyncio.client import connect

from polybus.batch import Batch
from polybus.edges.http.live.page import LivePeer
from polybus.log.layout import admin_token_path

NDJSON = {"content-type": "application/x-ndjson"}
ARROW = "application/vnd.apache.arrow.stream"
MASKS = [{"topics": "ord*", "fields": ["$.card", "$.lines.price", "header:auth", "key"]}]
ORDER = {"card": "4111", "name": "Ann", "lines": [{"price": 3, "id": 1}, {"price": 4}]}


async def wire_of(http: Http, offset: int) -> dict[str, Any]:
    answer = await http.client.get(f"/v1/topics/news/messages/{offset}/wire")
    forms = {form["protocol"]: form for form in answer.json()["forms"]}
    for form in forms.values():
        data, at = b64decode(form["base64"]), 0
        for field in form["fields"]:
            assert field["offset"] == at, "fields are in order and leave nothing out"
            at += field["length"]
        assert at == len(data) > 0
    return {name: b64decode(form["base64"]) for name, form in forms.items()} | {"forms": forms}


@pytest.mark.parametrize("value", [b"hello", b'{"a": 1}', b"\xff\x00", b"", b"x" * 70_000, b'"\\'])
async def test_the_bytes_of_each_protocol_are_those_on_the_wire(value: bytes) -> None:
    async with http_bus("news") as http:
        await http.publish("news", value)
        epoch = http.node.bus.log.bounds("news").epoch
        found = await wire_of(http, 0)

        assert found["goms"] == line("message", topics=["news"], **goms_value(value))
        assert found["boson-frames"] == frame("news", value)
        at = f"{epoch}:0".encode()
        assert found["boson-properties"] == properties(
            ("hbfo", at), ("topic", b"news"), ("content", value)
        )
        assert found["queue"] == len(value).to_bytes(4, "big") + value
        pack = found["msgstream"][found["msgstream"].index(b"{") :]
        assert json.loads(pack)["1"][0][0] == "news"


async def test_fields_have_names_and_values() -> None:
    async with http_bus("news") as http:
        text = json.dumps({"text": "hi", "headers": {"trace": "t1"}})
        await http.client.post("/v1/topics/news/messages", content=text, headers=NDJSON)
        forms = (await wire_of(http, 0))["forms"]

        fields = {one["name"]: one["value"] for one in forms["boson-frames"]["fields"]}
        assert fields["length of the content"] == "2" and fields["topic"] == "news"
        assert ("trace", "t1") in [
            (one["name"], one["value"]) for one in forms["boson-properties"]["fields"]
        ]
        assert ("data", '"hi"') in [(one["name"], one["value"]) for one in forms["goms"]["fields"]]


async def test_one_message_has_its_sender_size_and_raw_value() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"one", b"\xff")
        found = (await http.client.get("/v1/topics/news/messages/1")).json()
        raw = await http.client.get(
            "/v1/topics/news/messages/0", headers={"accept": "application/octet-stream"}
        )

        assert (found["message"]["size"], found["message"]["base64"]) == (1, "/w==")
        assert found["message"]["sender"].startswith("127.0.0.1:")
        assert (raw.content, raw.headers["content-type"]) == (b"one", "application/octet-stream")
        for offset in ("2", "-1", "x", "9" * 30):
            answer = await http.client.get(f"/v1/topics/news/messages/{offset}")
            assert (answer.status_code, answer.json()["code"]) == (404, "message.unknown")
        stale = await http.client.get(f"/v1/topics/news/messages/0?epoch={found['epoch'] + 1}")
        assert (stale.status_code, stale.json()["code"]) == (409, "topic.recreated")
        http.node.bus.commit([Batch.of("news", [b"x" * 300_000])])
        large = await http.client.get("/v1/topics/news/messages/2/wire")
        assert large.json()["code"] == "message.too-large"


async def test_masked_fields_are_hidden_on_every_way_to_read_but_not_from_administrators() -> None:
    async with http_bus("orders", http={"masks": MASKS}) as http:
        text = {"value": ORDER, "key": "k1", "headers": {"auth": "s3cret", "h": "v"}}
        lines = json.dumps(text) + '\n{"text":"4111 not JSON"}'
        await http.client.post("/v1/topics/orders/messages", content=lines, headers=NDJSON)
        base = "/v1/topics/orders/messages"
        arrow = {"accept": ARROW}
        answers = [
            await http.client.get(base),
            await http.client.get(f"{base}/0"),
            await http.client.get(f"{base}/0", headers={"accept": "application/octet-stream"}),
            await http.client.get(f"{base}/1", headers={"accept": "application/octet-stream"}),
            await http.client.get(base, headers=arrow),
        ]
        secrets = (b"4111", b"s3cret", b"k1")
        for answer in answers:
            assert not any(one in answer.content for one in secrets)
        forms = (await http.client.get(f"{base}/0/wire")).json()["forms"]
        for form in forms:
            assert not any(one in b64decode(form["base64"]) for one in secrets)
        message = answers[1].json()["message"]
        assert message["masked"] and message["value"]["name"] == "Ann"
        assert message["value"]["lines"] == [{"price": "•••", "id": 1}, {"price": "•••"}]
        assert message["headers"] == {"auth": "•••", "h": "v"}
        token = admin_token_path(http.node.data).read_text().strip()
        seen = await http.client.get(base, headers={"authorization": f"Bearer {token}"})
        assert seen.json()["messages"][0]["value"] == ORDER
        rows = pa.ipc.open_stream(io.BytesIO(answers[4].content)).read_all()
        assert rows.num_rows == 2 and rows.column("key").to_pylist()[0] == "•••".encode()


@pytest.mark.slow
async def test_a_large_payload_of_a_masked_topic_cannot_be_found_by_its_id() -> None:
    limits = {"inline-bytes-max": 1024}
    masks = [*MASKS, {"topics": "parcels", "fields": ["key"]}]
    async with http_bus("orders", "parcels", http={"masks": masks}, limits=limits) as http:
        large = json.dumps({**ORDER, "more": "x" * 2000}).encode()
        for topic in ("orders", "parcels"):
            await http.publish(topic, large)
        id_of = hashlib.sha256(large).hexdigest()
        base, one = "/v1/topics/orders/messages", "/v1/topics/orders/messages/0"
        answers = [
            await http.client.get(base),
            await http.client.get(one),
            await http.client.get("/v1/topics/orders/search"),
            await http.client.get("/v1/topics/orders/export?format=jsonl"),
            await http.client.get(f"{base}?columns=value", headers={"accept": ARROW}),
            await http.client.post("/v1/sql", json={"query": "SELECT text(value) FROM orders"}),
        ]
        kinds = ("application/octet-stream", "application/cloudevents+json")
        answers += [await http.client.get(one, headers={"accept": kind}) for kind in kinds]
        for answer in answers:
            assert answer.status_code == 200, answer.text
            assert id_of.encode() not in answer.content
        for form in (await http.client.get(f"{one}/wire")).json()["forms"]:
            assert id_of.encode() not in b64decode(form["base64"])
        (message,) = answers[0].json()["messages"]
        assert (message["text"], message["size"]) == ("•••", len(large))
        (parcel,) = (await http.client.get("/v1/topics/parcels/messages")).json()["messages"]
        assert parcel["reference"]["id"] == id_of


def has_subscribed(http: Http) -> bool:
    peers = http.node.http.websockets
    return any(isinstance(one, LivePeer) and bool(one.subscriptions) for one in peers)


async def test_the_tail_hides_what_is_masked() -> None:
    async with http_bus("orders", http={"masks": MASKS}) as http:
        url = f"ws://127.0.0.1:{http.node.tcp_port}/v1/live"
        async with connect(url) as websocket:
            request = {"op": "subscribe", "id": 1, "channel": "tail", "topic": "orders"}
            await websocket.send(json.dumps(request))
            await http.until(lambda: has_subscribed(http))
            await http.publish("orders", json.dumps(ORDER).encode())
            heard = await asyncio.wait_for(websocket.recv(), 20)

            assert "4111" not in heard and "Ann" in heard


async def test_an_arrow_stream_has_as_much_of_each_value_as_was_asked_for() -> None:
    """A page lists 100,000 messages however large they are."""
    async with http_bus("news") as http:
        await http.publish("news", b"x" * 300_000, b"small", b"")
        query = "columns=offset,value&cut-bytes=10"
        answer = await http.client.get(
            f"/v1/topics/news/messages?{query}", headers={"accept": ARROW}
        )
        rows = pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()

        assert rows.to_pylist() == [
            {"offset": 0, "value": b"x" * 10, "size": 300_000},
            {"offset": 1, "value": b"small", "size": 5},
            {"offset": 2, "value": b"", "size": 0},
        ]
