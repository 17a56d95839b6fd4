"""Who is connected, which sessions wait, how messages flow; and ending a peer."""

from __future__ import annotations

from typing import Any

import pytest
from accounts_http_kit import accounts_bus
from edge_kit import frame, line
from http_kit import Http, http_bus, recv

from polybus.batch import Batch
from polybus.edges.http.api import graph as graph_api
from polybus.testing import ScriptedPeer


async def connections(http: Http) -> dict[str, dict[str, Any]]:
    answer = (await http.client.get("/v1/connections")).json()
    assert answer["total"] == len(answer["connections"])
    return {one["protocol"]: one for one in answer["connections"]}


async def test_every_peer_is_listed_and_can_be_ended() -> None:
    async with http_bus("news") as http, ScriptedPeer(http.node.tcp_port) as goms:
        async with ScriptedPeer(http.node.tcp_port) as boson:
            await goms.send(line("register", topics=["news"], ack=True))
            await goms.read_line()
            await boson.send(frame("$subscribe", b"news"))
            await http.until(lambda: len(http.node.bus.topic("news").subscribers) == 2)
            found = await connections(http)

            assert set(found) == {"http", "goms", "boson-frames"}
            assert found["goms"]["subscriptions"] == 1 and found["goms"]["topics"] == ["news"]
            assert found["goms"]["account"] == "default" and found["goms"]["transport"] == "tcp"
            assert found["goms"]["age-s"] >= 0
            shown = (await http.client.get(f"/v1/connections/{found['goms']['id']}")).json()
            assert shown | {"age-s": 0} == found["goms"] | {"age-s": 0}
            ended = await http.client.delete(f"/v1/connections/{found['goms']['id']}")
            assert ended.status_code == 204
            assert await goms.read_to_end() == b""
            again = await http.client.delete(f"/v1/connections/{found['goms']['id']}")
            assert (again.status_code, again.json()["code"]) == (404, "connection.unknown")
            gone = await http.client.get(f"/v1/connections/{found['goms']['id']}")
            assert (gone.status_code, gone.json()["code"]) == (404, "connection.unknown")
            audit = (await http.client.get("/v1/topics/$audit/messages")).json()["messages"]
            assert audit[-1]["value"]["action"] == "connection-end"
            assert audit[-1]["value"]["target"] == found["goms"]["peer"]


async def test_whoever_ends_his_own_connection_gets_the_answer_first() -> None:
    async with http_bus("news") as http:
        own = (await connections(http))["http"]["id"]
        ended = await http.client.delete(f"/v1/connections/{own}")
        assert (ended.status_code, ended.headers["connection"]) == (204, "close")
        assert (await connections(http))["http"]["id"] != own


async def test_an_account_sees_and_ends_its_own_peers_and_sessions_only() -> None:
    async with accounts_bus() as bus:
        shop, other, admin = await bus.of("shop"), await bus.of("other"), await bus.admin()
        await shop.open_session("news")
        own = (await shop.client.get("/v1/sessions")).json()["sessions"]
        async with ScriptedPeer(bus.node.tcp_port) as peer:
            await peer.send(line("login", user="shop", password="two"))
            await peer.read_line()
            seen = (await shop.client.get("/v1/connections")).json()["connections"]
            all_seen = (await admin.client.get("/v1/connections")).json()["connections"]
            (mine,) = [one for one in seen if one["protocol"] == "goms"]

            assert own[0]["topics"] == ["news"]
            assert (await other.client.get("/v1/sessions")).json()["total"] == 0
            assert mine["id"] in [one["id"] for one in all_seen]
            for path in (f"/v1/connections/{mine['id']}", f"/v1/session/{own[0]['id']}"):
                assert (await other.client.delete(path)).status_code == 404
                assert (await other.client.get(path)).status_code == 404
                assert (await shop.client.get(path)).status_code == 200
            assert (await shop.client.delete(f"/v1/connections/{mine['id']}")).status_code == 204
        assert (await admin.client.delete(f"/v1/session/{own[0]['id']}")).status_code == 204
        assert (await shop.client.get("/v1/sessions")).json()["total"] == 0


async def test_a_session_shows_what_waits_and_delivers_it_again() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        async with http.websocket(key) as websocket:
            await http.publish("news", b"1", b"2", b"3")
            packs: dict[str, Any] = {}
            while len(packs) < 3:
                packs |= await recv(websocket)
            await websocket.send("1")
            (session,) = http.node.services.inboxes.sessions()
            await http.until(lambda: session.pack_count == 2)
            name = (await http.client.get("/v1/sessions")).json()["sessions"][0]["id"]
            shown = (await http.client.get(f"/v1/session/{name}")).json()
            again = await http.client.post(f"/v1/session/{name}/redeliver")
            await websocket.wait_closed()

            assert key != name and shown["connected"]
            assert (shown["packs-waiting"], shown["last-shown"]) == (2, 3)
            assert shown["last-confirmed"] == 1
            assert again.status_code == 202 and websocket.close_code == 1001
        async with http.websocket(key) as websocket:
            assert list(await recv(websocket)) == ["2", "3"]


async def test_the_graph_leads_from_producers_to_consumers() -> None:
    async with http_bus("news") as http, ScriptedPeer(http.node.tcp_port) as peer:
        key = await http.open_session("news")
        await peer.send(frame("$subscribe", b"news") + frame("news", b"1") * 3)
        await http.publish("news", b"1")
        epoch = http.node.bus.log.bounds("news").epoch
        report = {"positions": {"news": {"epoch": epoch, "offset": 1}}, "rows-per-s": 5}
        await http.client.put("/v1/consumers/etl", json=report)
        await http.until(lambda: http.node.bus.log.bounds("news").stop == 4)
        http.node.http.figures.sample()
        graph = (await http.client.get("/v1/graph")).json()
        nodes = {one["id"]: one for one in graph["nodes"]}
        edges = {(one["from"], one["to"]): one["messages-per-s"] for one in graph["edges"]}

        session = next(one for one in nodes if one.startswith("session:"))
        assert nodes["producer:boson-frames:127.0.0.1"]["label"] == "127.0.0.1"
        boson = edges[("producer:boson-frames:127.0.0.1", "topic:news")]
        assert boson > edges[("producer:http:127.0.0.1", "topic:news")] > 0
        assert edges[("topic:news", "subscription:boson-frames:news")] > 0
        assert edges[("topic:news", session)] > 0
        assert edges[("topic:news", "flow:etl")] == 5 and nodes["flow:etl"]["lag"] == 3
        assert key not in str(graph)


async def test_a_consumer_of_several_topics_reads_of_each_as_much_as_arrives() -> None:
    async with http_bus("busy", "quiet") as http:
        # At one moment, so that no sample is between them.
        http.node.bus.commit([Batch.of("busy", [b"1", b"2", b"3"]), Batch.of("quiet", [b"1"])])
        bounds = http.node.bus.log.bounds
        at = {one: {"epoch": bounds(one).epoch, "offset": 1} for one in ("busy", "quiet")}
        await http.client.put("/v1/consumers/etl", json={"positions": at, "rows-per-s": 8})
        http.node.http.figures.sample()
        graph = (await http.client.get("/v1/graph")).json()

        edges = [one for one in graph["edges"] if one["to"] == "flow:etl"]
        assert [(one["from"], one["messages-per-s"], one["sampled"]) for one in edges] == [
            ("topic:busy", pytest.approx(6, abs=0.05), True),
            ("topic:quiet", pytest.approx(2, abs=0.05), True),
        ]


async def test_sessions_beyond_the_limit_of_the_graph_are_one_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_api, "SESSIONS_MAX", 2)
    async with http_bus("news", "olds") as http:
        for topics in (["news"], ["news", "olds"], ["olds"], ["news", "olds"], ["olds"]):
            await http.open_session(*topics)
        graph = (await http.client.get("/v1/graph")).json()
        sessions = {one["id"]: one for one in graph["nodes"] if one["kind"] == "session"}
        edges = [one["to"] for one in graph["edges"]]

        assert len(sessions) == 3 and sessions["session:*"]["count"] == 3
        assert len(edges) == 5 and edges.count("session:*") == 2


async def test_lag_is_told_in_messages_and_seconds() -> None:
    async with http_bus("news", "idle") as http:
        await http.publish("news", b"1", b"2")
        bounds = http.node.bus.log.bounds
        at = {
            "news": {"epoch": bounds("news").epoch, "offset": 1},
            "idle": {"epoch": bounds("idle").epoch, "offset": 0},
        }
        await http.client.put("/v1/consumers/etl", json={"positions": at})
        (found,) = (await http.client.get("/v1/consumers")).json()["consumers"]
        idle, news = found["topics"]

        assert (idle["lag"], idle["lag-s"]) == (0, 0.0)
        assert news["lag"] == 1 and 0 <= news["lag-s"] == found["lag-s"]
