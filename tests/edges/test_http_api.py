"""The HTTP API: topics, publishing, reading, health, figures, its own description."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest
from http_kit import http_bus
from websockets.asyncio.client import connect

from polybus.bus.topic import Topic
from polybus.edges.http.api import messages as messages_api
from polybus.edges.http.routes import OPERATIONS
from polybus.log.files import FileLog
from polybus.log.journal.message import rows_of
from polybus.testing import ScriptedPeer, run_bus

NDJSON = {"content-type": "application/x-ndjson"}
ARROW = {"accept": "application/vnd.apache.arrow.stream"}


async def test_a_topic_is_created_once_shown_listed_and_removed() -> None:
    async with http_bus() as http:
        created = await http.client.post("/v1/topics", json={"name": "News"})
        again = await http.client.post("/v1/topics", json={"name": "news"})
        shown = await http.client.get("/v1/topics/NEWS")
        listed = await http.client.get("/v1/topics")
        removed = await http.client.delete("/v1/topics/news")
        gone = await http.client.get("/v1/topics/news")

        assert (created.status_code, created.json()["name"]) == (201, "news")
        assert (again.status_code, again.json()["code"]) == (409, "topic.exists")
        assert (shown.json()["start"], shown.json()["stop"]) == (0, 0)
        assert [one["name"] for one in listed.json()["topics"]] == ["news"]
        assert (removed.status_code, gone.status_code) == (204, 404)


@pytest.mark.parametrize(
    ("name", "status"), [("", 400), ("$errors", 403), ("a\nb", 400), ("x" * 256, 400), (5, 400)]
)
async def test_an_impossible_topic_is_refused(name: Any, status: int) -> None:
    async with http_bus() as http:
        answer = await http.client.post("/v1/topics", json={"name": name})

        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["nix", "..", "%2e%2e", "%00", "a%2fb", "$nix", "%ff", "x" * 300])
async def test_what_is_no_topic_is_one_and_the_same_404(name: str) -> None:
    async with http_bus() as http:
        answer = await http.client.get(f"/v1/topics/{name}/messages")

        assert answer.status_code == 404


async def test_a_topic_s_name_may_have_slashes_and_percent_signs() -> None:
    async with http_bus("a/b", "100%2fb") as http:
        for path, name in [("a%2Fb", "a/b"), ("A%2fB", "a/b"), ("100%252fb", "100%2fb")]:
            sent = await http.client.post(f"/v1/topics/{path}/messages", content=b"1")
            shown = (await http.client.get(f"/v1/topics/{path}")).json()
            read = (await http.client.get(f"/v1/topics/{path}/messages")).json()

            assert (sent.status_code, sent.json()["topic"]) == (200, name)
            assert shown["name"] == read["topic"] == name
        assert (await http.client.put("/v1/consumers/x%2Fy", json={})).status_code == 204
        (consumer,) = (await http.client.get("/v1/consumers")).json()["consumers"]
        assert consumer["group"] == "x/y"
        assert (await http.client.delete("/v1/topics/a%2Fb")).status_code == 204


async def test_a_damaged_topic_does_not_hide_the_others() -> None:
    async with http_bus("news", "olds") as http:
        log = http.node.bus.log
        assert isinstance(log, FileLog)
        log._topics["olds"].freeze("topic 'olds': it is broken")
        listed = (await http.client.get("/v1/topics")).json()["topics"]

        assert [(one["name"], "damaged" in one) for one in listed] == [
            ("news", False),
            ("olds", True),
        ]
        assert (await http.client.get("/v1/topics/olds")).status_code == 503


async def test_one_body_is_one_message_and_is_answered_with_its_offset() -> None:
    async with http_bus("news") as http:
        first = await http.client.post("/v1/topics/news/messages", content=b"hello")
        second = await http.client.post(
            "/v1/topics/news/messages?receipt=memory", content=b'{"x": 1}'
        )

        epoch = http.node.bus.log.bounds("news").epoch
        assert first.json() == {"topic": "news", "epoch": epoch, "offsets": [0]}
        assert second.json()["offsets"] == [1]


async def test_a_receipt_is_given_after_fsync_only() -> None:
    async with http_bus("news") as http:
        log = http.node.bus.log
        await http.client.post("/v1/topics/news/messages", content=b"hello")
        assert log.durable >= 1


async def test_a_publish_waits_for_one_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    async with http_bus("news") as http:
        bus = http.node.bus
        settle, waiting = bus.settle, []

        def noted(durable: int) -> None:
            waiting.append(bus.receipts_waiting)
            settle(durable)

        monkeypatch.setattr(bus, "settle", noted)
        await http.client.post("/v1/topics/news/messages", content=b"hello")

        assert max(waiting) == 1
        assert bus.receipts_waiting == 0


async def test_lines_of_json_are_many_messages() -> None:
    async with http_bus("news") as http:
        lines = (
            b'{"value": {"a": [1, 2]}, "key": "k", "headers":'
            b' {"h": "v", "b": {"base64": "/w=="}}}\n'
            b'\n{"base64": "/wA="}\r\n{"value": "text"}\n{"value": null}'
        )
        answer = await http.client.post("/v1/topics/news/messages", content=lines, headers=NDJSON)
        read = (await http.client.get("/v1/topics/news/messages")).json()

        assert answer.json()["offsets"] == [0, 1, 2, 3]
        first, second, third, fourth = read["messages"]
        assert first["value"] == {"a": [1, 2]}
        assert (first["key"], first["headers"]) == ("k", {"h": "v", "b": {"base64": "/w=="}})
        assert second["base64"] == "/wA=" and "value" not in second
        assert third["value"] == "text"
        assert fourth["value"] is None
        assert read["next"] == 4


async def test_messages_in_memory_are_read_as_those_on_disk_and_not_through_arrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("news") as http:
        line = b'{"value": [1], "key": {"base64": "/w=="}, "headers": {"h": "v"}}'
        await http.client.post("/v1/topics/news/messages", content=line, headers=NDJSON)
        await http.publish("news", b"text", b"\xff")
        batches = http.node.bus.log.read("news", 0)
        stored = [one.slice(0, len(one)) for one in batches]
        for one in stored:
            one.stored = rows_of(one)
        monkeypatch.setattr(messages_api, "rows_of", None)

        read = (await http.client.get("/v1/topics/news/messages")).json()["messages"]

        assert len(batches) == 3 and all(one.stored is None for one in batches)
        expected = [message for one in stored for message in messages_api.stored_messages(one)]
        assert read == msgspec.json.decode(msgspec.json.encode(expected))


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"x", b"[]", b"{}", b'{"value":1,"base64":""}', b'{"base64":"!"}', b'{"v":1}'),
        *(b'{"value":1}\n{', b'{"value":"\xff"}', b'{"value":' + b"[" * 100_000),
        b'{"value":1,"headers":{"h":1}}',
        *(b'{"value":[1e999]}', b'{"value":%s}' % (b"9" * 400)),
    ],
)
async def test_a_bad_line_refuses_them_all(line: bytes) -> None:
    async with http_bus("news") as http:
        answer = await http.client.post("/v1/topics/news/messages", content=line, headers=NDJSON)

        assert (answer.status_code, answer.json()["code"]) == (400, "http.body-invalid")
        assert http.node.bus.log.bounds("news").stop == 0


async def test_a_topic_is_read_by_offset_and_limit() -> None:
    async with http_bus("news") as http:
        await http.publish("news", *[b"%d" % number for number in range(5)])

        page = (await http.client.get("/v1/topics/news/messages?offset=1&limit=2")).json()
        rest = (await http.client.get(f"/v1/topics/news/messages?offset={page['next']}")).json()

        assert [one["value"] for one in page["messages"]] == [1, 2]
        assert [one["offset"] for one in rest["messages"]] == [3, 4]
        assert page["messages"][0]["protocol"] == "http"


async def test_an_answer_with_large_messages_is_cut_and_says_where_to_read_on() -> None:
    """However many messages a reader asks for, the answer is a few MiB in memory."""
    async with http_bus("news") as http:
        for _ in range(12):
            await http.publish("news", b"x" * (1 << 20))
        read: list[int] = []
        following = 0
        while following < 12:
            path = f"/v1/topics/news/messages?offset={following}&limit=1000"
            answer = await http.client.get(path)
            assert len(answer.content) < 7 << 20
            read += [one["offset"] for one in answer.json()["messages"]]
            following = answer.json()["next"]
        assert read == list(range(12))


async def test_a_topic_is_read_by_time() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1")
        between = datetime.now(UTC)
        await asyncio.sleep(0.01)
        await http.publish("news", b"2")
        tomorrow = between + timedelta(days=1)

        after = await http.client.get(
            "/v1/topics/news/messages", params={"time": between.isoformat()}
        )
        later = await http.client.get(
            "/v1/topics/news/messages", params={"time": tomorrow.isoformat()}
        )

        assert [one["value"] for one in after.json()["messages"]] == [2]
        assert later.json()["messages"] == []
        assert datetime.fromisoformat(after.json()["messages"][0]["timestamp"]) > between


async def test_a_read_waits_for_a_message() -> None:
    async with http_bus("news") as http:
        url = "/v1/topics/news/messages?from=latest&wait-s=5"
        waiting = asyncio.create_task(http.client.get(url))
        await http.until(lambda: http.node.http.waiters)
        await http.publish("news", b"1")

        assert [one["value"] for one in (await waiting).json()["messages"]] == [1]


@pytest.mark.parametrize(
    "query",
    [
        *("offset=-1", "offset=x", "offset=99999999999999999999", "limit=0", "limit=1000001"),
        *("wait-s=-1", "wait-s=nan", "time=yesterday", "from=x", "nix=1", "offset=1&offset=2"),
        "offset=1&from=earliest",
    ],
)
async def test_a_bad_query_is_400(query: str) -> None:
    async with http_bus("news") as http:
        answer = await http.client.get(f"/v1/topics/news/messages?{query}")

        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/problem+json"


async def test_an_offset_beyond_the_end_is_416() -> None:
    async with http_bus("news") as http:
        answer = await http.client.get("/v1/topics/news/messages?offset=1")

        assert (answer.status_code, answer.json()["code"]) == (416, "log.offset-unknown")


async def test_a_topic_is_read_as_an_arrow_stream() -> None:
    async with http_bus("news") as http:
        body = b"".join(b'{"value":%d}\n' % number for number in range(3000))
        await http.client.post("/v1/topics/news/messages", content=body, headers=NDJSON)
        await http.publish("news", b"last")

        answer = await http.client.get("/v1/topics/news/messages?offset=10", headers=ARROW)

        assert answer.headers["content-type"] == ARROW["accept"]
        table = pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()
        assert table.column("offset").to_pylist() == list(range(10, 3001))
        assert table.column("value").to_pylist()[-2:] == [b"2999", b"last"]
        assert {"account", "topic", "timestamp", "key", "headers"} < set(table.column_names)


async def test_an_arrow_stream_is_not_built_in_memory() -> None:
    async with http_bus("news") as http:
        for _ in range(8):
            await http.publish("news", b"x" * (1 << 20))
        async with http.client.stream("GET", "/v1/topics/news/messages", headers=ARROW) as answer:
            assert "content-length" not in answer.headers
            sizes = [len(piece) async for piece in answer.aiter_raw()]
        assert len(sizes) > 4 and sum(sizes) > 8 << 20


async def test_health_is_red_while_the_log_takes_no_writes() -> None:
    from polybus.errors import StorageError

    async with http_bus() as http:
        assert (await http.client.get("/healthz")).status_code == 200
        assert (await http.client.get("/readyz")).status_code == 200
        http.node.context.durability.error = StorageError("log.full", "no space")
        assert (await http.client.get("/healthz")).status_code == 503
        assert (await http.client.get("/readyz")).text == "log.full: no space\n"


async def test_the_topic_list_counts_messages_in_and_out_and_names_their_protocols() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        await http.publish("news", b"1", b"2")
        await http.packs(key)

        (topic,) = (await http.client.get("/v1/topics")).json()["topics"]

        assert (topic["messages-in"], topic["messages-out"]) == (2, 2)
        assert topic["published-on"] == ["http"]


async def test_metrics_count_messages_and_bytes_by_protocol_and_topic() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        await http.publish("news", b"1234", b"56")
        await http.packs(key)
        await http.client.get("/v1/topics/nix")

        answer = await http.client.get("/metrics")
        figures = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")

        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert figures['polybus_messages_in_total{protocol="http",topic="news"}'] == "2"
        assert figures['polybus_bytes_in_total{protocol="http",topic="news"}'] == "6"
        assert figures['polybus_messages_out_total{protocol="msgstream",topic="news"}'] == "2"
        assert figures["polybus_sessions"] == "1"
        assert float(figures["polybus_fsync_seconds_total"]) > 0
        assert int(figures["polybus_receipts_total"]) == 2


async def test_the_description_names_every_path_and_its_answers() -> None:
    async with http_bus() as http:
        description = (await http.client.get("/openapi.json")).json()

        assert description["openapi"] == "3.1.0"
        assert {
            *("/v1/sessions", "/v1/sessions/{key}", "/v1/sessions/{key}/topics"),
            *("/v1/sessions/{key}/packs", "/v1/broadcast", "/v1/topics", "/v1/topics/{topic}"),
            *("/v1/topics/{topic}/messages", "/healthz", "/readyz", "/metrics"),
            *("/v1/consumers", "/v1/consumers/{group}", "/v1/commits", "/v1/commits/{producer}"),
            *("/v1/staging/{producer}/{file}", "/v1/accounts", "/v1/accounts/{account}"),
            *("/v1/accounts/{account}/password", "/v1/accounts/{account}/grants"),
            *("/v1/accounts/{account}/tokens", "/v1/accounts/{account}/tokens/{id}", "/v1/signup"),
            *("/v1/tokens", "/v1/tokens/{id}"),
            *("/v1/topics/{topic}/blob", "/v1/blobs/{id}"),
        } <= set(description["paths"])
        assert set(description["paths"]) == {operation.path for operation in OPERATIONS}
        fetch = description["paths"]["/v1/topics/{topic}/messages"]["get"]
        assert {one["name"] for one in fetch["parameters"]} == {
            *("topic", "offset", "time", "from", "limit", "stop", "epoch", "columns", "wait-s"),
            "cut-bytes",
        }
        references = set(_references(description))
        assert references <= set(description["components"]["schemas"])


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"].rpartition("/")[2]] if "$ref" in node else []
        return own + [one for value in node.values() for one in _references(value)]
    if isinstance(node, list):
        return [one for value in node for one in _references(value)]
    return []


async def test_an_unknown_path_is_a_problem() -> None:
    async with http_bus() as http:
        answer = await http.client.get("/v2")

        assert answer.status_code == 404
        assert json.loads(answer.content)["code"] == "http.not-found"


async def test_http_and_websockets_work_inside_tls() -> None:
    folder = Path(__file__).parent.parent / "client" / "tls"
    tls = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    trust = ssl.create_default_context(cafile=folder / "cert.pem")
    trust.check_hostname = False
    connector = {"protocol": "tcp", "port": 0, "tls": tls}
    limits = {"inline-bytes-max": 4 << 20}
    async with run_bus("news", connectors=[connector], limits=limits) as node:
        base = f"127.0.0.1:{node.tcp_port}"
        async with httpx.AsyncClient(base_url=f"https://{base}", verify=trust) as client:
            opened = await client.post("/v1/sessions", json={"topics": ["news"]})
            url = f"wss://{base}/msgstream?sessionKey={opened.json()['sessionKey']}"
            async with connect(url, ssl=trust, max_size=None) as websocket:
                await client.post("/v1/topics/news/messages", content=b"x" * (2 << 20))
                pack = json.loads(await websocket.recv())["1"]
            assert pack == [["news", "x" * (2 << 20)]]


@pytest.mark.slow
async def test_a_list_of_a_hundred_thousand_topics_holds_up_nobody() -> None:
    count = 100_000
    async with run_bus("news") as node:
        bus, log = node.bus, node.bus.log
        assert isinstance(log, FileLog)
        for number in range(count - 1):
            # Neither in order nor in files: it is the list that is slow, not the creation.
            name = f"topic-{number * 7919 % count:05}"
            log._topics[name] = log._topics["news"]
            log._notes[name] = log._notes["news"]
            bus._topics[name] = Topic(name)
            node.accounts._registry.topic_created(name)
        async with ScriptedPeer(node.tcp_port, timeout_s=30) as peer:
            await peer.send(
                b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            reading = asyncio.create_task(peer.read_to_end())
            worst_s, whole_s = await held_s(reading)
            _, _, body = (await reading).partition(b"\r\n\r\n")
        listed = [one["name"] for one in json.loads(body)["topics"]]

        assert listed == sorted(bus._topics)
        # In one go it would be nearly all of it.
        assert worst_s < whole_s / 2


async def held_s(task: asyncio.Task[Any]) -> tuple[float, float]:
    """The longest that others waited for the loop until the task was done, and how long it took."""
    loop = asyncio.get_running_loop()
    first = loop.time()
    worst_s = 0.0
    while not task.done():
        began = loop.time()
        await asyncio.sleep(0)
        worst_s = max(worst_s, loop.time() - began)
    return worst_s, loop.time() - first
