"""System topics: everybody reads them, nobody but the bus and its administrator writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from edge_kit import frame, goms_value, line, properties
from http_kit import Http, http_bus

import polybus
from polybus.batch import Batch
from polybus.edges.node import Node
from polybus.errors import UsageError
from polybus.testing import ScriptedPeer, run_bus

SYSTEM = ["$alerts", "$audit", "$commits", "$events", "$metrics", "$stats"]


def alert(node: Node, value: bytes = b'{"alert":1}') -> None:
    node.bus.commit([Batch.of("$alerts", [value])])


def bearer(http: Http) -> dict[str, str]:
    token = Path(http.node.config.data, "admin.token").read_text().strip()
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("durability", ["interval", "memory"])
async def test_the_bus_makes_its_topics_and_keeps_them_out_of_plain_lists(
    durability: str, tmp_path: Path
) -> None:
    for _ in range(2):
        async with http_bus("news", data=str(tmp_path), durability=durability) as http:
            plain = (await http.client.get("/v1/topics")).json()["topics"]
            every = (await http.client.get("/v1/topics?system=true")).json()["topics"]
            assert [topic["name"] for topic in plain] == ["news"]
            assert [topic["name"] for topic in every] == [*SYSTEM, "news"]
            assert (await http.client.get("/v1/topics/$stats")).json()["name"] == "$stats"


async def test_system_topics_keep_a_week_and_a_gibibyte_unless_told_otherwise() -> None:
    async with run_bus() as node:
        settings = node.bus.log.settings("$alerts")
        assert (settings.retention_age_s, settings.retention_bytes) == (7 * 86_400, 1 << 30)
    async with run_bus(system={"retention-age-s": 60, "retention-bytes": 4096}) as node:
        settings = node.bus.log.settings("$alerts")
        assert (settings.retention_age_s, settings.retention_bytes) == (60, 4096)


async def test_a_goms_client_registers_to_a_system_topic_and_its_sends_there_are_refused() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(line("register", topics=["$alerts", "news"], ack=True))
        assert b"reg-ack" in await peer.read_line()
        alert(node, b"hot")
        expected = line("message", topics=["$alerts"], **goms_value(b"hot"))
        assert await peer.read_line() == expected.rstrip(b"\n") + b"\n"
        await peer.send(line("send", topics=["news", "$alerts"], data="x", ack=True))
        refused, acknowledged = await peer.read_line(), await peer.read_line()
        assert b"002001" in refused and b"$alerts" in refused
        assert b"send-ack" in acknowledged and b"$alerts" not in acknowledged
        assert node.bus.log.bounds("$alerts").stop == 1
        assert node.bus.log.bounds("news").stop == 1


@pytest.mark.parametrize(
    "publish",
    [frame("$alerts", b"x"), properties(("topic", b"$alerts"), ("content", b"x"))],
    ids=["frames", "properties"],
)
async def test_a_boson_client_that_publishes_to_a_system_topic_is_told(publish: bytes) -> None:
    async with run_bus() as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send(publish)
        peer.send_eof()
        assert b"topic.reserved" in await peer.read_to_end()
        assert node.bus.log.bounds("$alerts").stop == 0


@pytest.mark.parametrize("scheme", ["boson", "boson+properties", "goms", "http", "ws"])
async def test_every_protocol_reads_a_system_topic_from_its_past_on(scheme: str) -> None:
    async with run_bus("news") as node:
        alert(node, b'{"alert":1}')
        async with polybus.connect(f"{scheme}://127.0.0.1:{node.tcp_port}") as client:
            messages = client.subscribe("$alerts", start="earliest")
            first = await anext(messages)
            alert(node, b'{"alert":2}')
            second = await anext(messages)
        assert [(one.topic, one.value) for one in (first, second)] == [
            ("$alerts", b'{"alert":1}'),
            ("$alerts", b'{"alert":2}'),
        ]


async def test_everything_does_not_mean_the_systems_topics() -> None:
    async with run_bus("news") as node, ScriptedPeer(node.tcp_port) as peer:
        await peer.send_frame("$subscribe", b"* from=earliest")
        alert(node)
        await peer.send_frame("news", b"hello")
        assert await peer.read_frame() == ("news", b"hello")
        alert(node)
        await peer.send_frame("news", b"again")
        assert await peer.read_frame() == ("news", b"again")


async def test_nobody_creates_deletes_or_publishes_to_a_system_topic_over_http() -> None:
    async with http_bus("news") as http:
        client = http.client
        answers = [
            await client.post("/v1/topics/$alerts/messages", content=b"x"),
            await client.post("/v1/topics", json={"name": "$mine"}),
            await client.delete("/v1/topics/$alerts"),
            await client.delete("/v1/topics/$alerts", headers=bearer(http)),
        ]
        for answer in answers:
            assert answer.status_code == 403
            assert answer.json()["code"] == "topic.reserved"
        assert http.node.bus.log.bounds("$alerts").stop == 0


async def test_the_administrator_publishes_to_system_topics_with_the_token() -> None:
    async with http_bus() as http:
        answer = await http.client.post(
            "/v1/topics/$stats/messages", content=b"[1]", headers=bearer(http)
        )
        assert answer.status_code == 200
        assert answer.json()["offsets"] == [0]
        read = (await http.client.get("/v1/topics/$stats/messages")).json()["messages"]
        assert [message["value"] for message in read] == [[1]]
        wrong = {"authorization": "Bearer " + "x" * 43}
        answer = await http.client.post("/v1/topics/$stats/messages", content=b"", headers=wrong)
        assert answer.status_code == 401


async def test_a_session_follows_a_system_topic() -> None:
    async with http_bus() as http:
        key = await http.open_session("$alerts")
        alert(http.node, b'{"alert":7}')
        assert await http.packs(key) == {"1": [["$alerts", {"alert": 7}]]}


async def test_metrics_count_the_system_topics_too() -> None:
    async with http_bus() as http:
        alert(http.node)
        text = (await http.client.get("/metrics")).text
        assert 'polybus_messages_in_total{protocol="",topic="$alerts"} 1' in text


async def test_the_token_is_the_owners_alone_and_outlives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "admin.token"
    async with run_bus(data=str(tmp_path)):
        token = path.read_text()
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert len(token.strip()) >= 32
    async with run_bus(data=str(tmp_path)):
        assert path.read_text() == token


async def test_a_bus_replaces_a_damaged_token_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "admin.token"
    path.write_text("")
    async with run_bus(data=str(tmp_path)):
        assert len(path.read_text().strip()) >= 32
    assert "admin.token-file" in caplog.text and str(path) in caplog.text


async def test_the_bus_cannot_write_to_an_unknown_system_topic() -> None:
    async with run_bus("news") as node:
        with pytest.raises(UsageError, match=r"topic\.reserved"):
            node.bus.commit([Batch.of("news", [b""]), Batch.of("$nothing", [b""])])
        assert node.bus.log.bounds("news").stop == 0
