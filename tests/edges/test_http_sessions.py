"""Sessions through the API: what they follow, what they keep, what they tell when they cannot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from http_kit import http_bus, recv

from polybus.services.sessions import feeds
from polybus.services.sessions.inboxes import Inboxes
from polybus.testing import ScriptedPeer


async def test_a_session_is_201_with_a_key_nobody_can_guess() -> None:
    async with http_bus("news") as http:
        first = await http.open_session("news")
        second = await http.open_session("news")

        assert first != second
        assert re.fullmatch(r"[\w-]{22,}", first)


async def test_no_command_line_takes_a_key_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter(["-a" * 16, "--" * 16, "a-" * 16])
    monkeypatch.setattr("secrets.token_urlsafe", lambda size: next(made))
    async with http_bus("news") as http:
        assert await http.open_session("news") == "a-" * 16


async def test_a_key_is_in_no_log_line_and_not_on_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with http_bus("news", data=str(tmp_path)) as http:
        key = await http.open_session("news")
        await http.packs(key, "x")
        async with http.websocket(key) as websocket:
            await websocket.send(b"binary")
            await websocket.wait_closed()
        await http.client.post(f"/v1/sessions/{key}/packs", content=b"not json")
        await http.client.get(f"/msgstream?sessionKey={key}&transport=nix")
    own = [line.getMessage() for line in caplog.records if line.name.startswith("polybus")]
    assert not [line for line in own if key in line]
    assert key.encode() not in (tmp_path / "state.db").read_bytes()
    assert (tmp_path / "state.db").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"topics": ["nix"]}, 404, "topic.unknown"),
        ({"topics": ["news"], "from": "tomorrow"}, 400, "position.invalid"),
        ({"topics": "news"}, 400, "http.body-invalid"),
        ({"ttl-s": 0}, 400, "http.body-invalid"),
        ({"ttl-s": -1}, 400, "http.body-invalid"),
        ({"ttl": 5}, 400, "http.body-invalid"),
        ({"topics": ["news"] * 1025}, 400, "request.too-many-topics"),
        ([], 400, "http.body-invalid"),
    ],
)
async def test_a_session_that_cannot_be_is_a_problem(body: Any, status: int, code: str) -> None:
    async with http_bus("news") as http:
        answer = await http.client.post("/v1/sessions", json=body)

        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == code
        assert len(http.node.services.inboxes) == 0


async def test_there_is_a_limit_to_sessions() -> None:
    async with http_bus(msgstream={"sessions-max": 1}) as http:
        await http.open_session()
        answer = await http.client.post("/v1/sessions", json={})

        assert answer.json()["code"] == "session.too-many"


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/topics"), ("POST", "/packs"), ("DELETE", "")],
)
async def test_an_unknown_key_is_404(method: str, path: str) -> None:
    async with http_bus() as http:
        answer = await http.client.request(method, f"/v1/sessions/nobody{path}", content=b"[]")

        assert (answer.status_code, answer.json()["code"]) == (404, "session.unknown")


async def test_messages_of_every_protocol_reach_a_session() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("NEWS")
        async with ScriptedPeer(http.node.tcp_port) as peer:
            await peer.send_frame("news", b"by boson")
            await http.until(lambda: http.node.bus.log.bounds("news").stop == 1)
        async with ScriptedPeer(http.node.tcp_port) as peer:
            await peer.send_json({"messagetype": "register", "topics": ["news"]})
            await peer.send_json({"messagetype": "send", "topics": ["news"], "data": "by goms"})
            await http.until(lambda: http.node.bus.log.bounds("news").stop == 2)
        await http.publish("news", b"by http")

        assert await http.packs(key) == {
            "1": [["news", "by boson"]],
            "2": [["news", "by goms"]],
            "3": [["news", "by http"]],
        }


async def test_direct_packs_and_topics_share_one_sequence_in_the_order_they_came() -> None:
    async with http_bus("a", "b") as http:
        key = await http.open_session("a", "b")
        await http.publish("a", b"1")
        await http.post(key, ["direct", 2])
        await http.publish("b", b"3")
        await http.publish("a", b"4")

        assert await http.packs(key) == {
            "1": [["a", 1]],
            "2": [["direct", 2]],
            "3": [["b", 3]],
            "4": [["a", 4]],
        }


async def test_topics_can_be_replaced() -> None:
    async with http_bus("a", "b") as http:
        key = await http.open_session("a")
        answer = await http.client.put(f"/v1/sessions/{key}/topics", json={"topics": ["b"]})
        assert answer.status_code == 200
        await http.publish("a", b"no more")
        await http.publish("b", b"now")

        assert await http.packs(key) == {"1": [["b", "now"]]}


async def test_a_topic_that_is_kept_loses_nothing_when_topics_are_replaced() -> None:
    async with http_bus("a", "b") as http:
        key = await http.open_session("a")
        await http.publish("a", b"1")
        await http.client.put(f"/v1/sessions/{key}/topics", json={"topics": ["a", "b"]})
        await http.publish("a", b"2")

        assert await http.packs(key) == {"1": [["a", 1]], "2": [["a", 2]]}


async def test_a_broadcast_reaches_every_session() -> None:
    async with http_bus() as http:
        keys = [await http.open_session() for _ in range(3)]
        poll = await http.hanging_poll(keys[0])

        answer = await http.client.post("/v1/broadcast", json=[["all", {"hands": True}]])

        assert (answer.status_code, answer.json()) == (202, {"sessions": 3})
        assert (await poll).json() == {"1": [["all", {"hands": True}]]}
        for key in keys:
            assert await http.packs(key) == {"1": [["all", {"hands": True}]]}


async def test_a_session_may_begin_in_the_past() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1", b"2", b"3")
        epoch = http.node.bus.log.bounds("news").epoch
        all_of_it = await http.open_session("news", **{"from": "earliest"})
        some = await http.open_session("news", **{"from": f"{epoch}:2"})
        await http.publish("news", b"4")

        assert values(await http.packs(all_of_it)) == [1, 2, 3, 4]
        assert values(await http.packs(some)) == [3, 4]


async def test_a_session_that_begins_at_a_position_of_a_deleted_topic_is_told() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1", b"2", b"3")
        epoch = http.node.bus.log.bounds("news").epoch
        key = await http.open_session("news", **{"from": f"{epoch - 1}:7"})

        packs = await http.packs(key)

        gone = {"topic": "news", "position": f"{epoch - 1}:7", "count": 0}
        assert packs.pop("0") == [["session.overflow", gone]]
        assert values(packs) == [1, 2, 3]
        assert "0" not in await http.packs(key), "once"


@pytest.mark.slow
async def test_a_long_past_comes_piece_by_piece_as_it_is_confirmed() -> None:
    async with http_bus("news") as http:
        body = b"".join(b'{"value":%d}\n' % number for number in range(50_000))
        body = body.replace(b"}\n", b',"headers":{"h":"%b"}}\n' % (b"x" * 10))
        sent = await http.client.post(
            "/v1/topics/news/messages",
            content=body,
            headers={"content-type": "application/x-ndjson"},
        )
        assert sent.status_code == 200
        key = await http.open_session("news", **{"from": "earliest"})
        got: list[Any] = []
        async with http.websocket(key) as websocket:
            while len(got) < 50_000:
                packs = await recv(websocket)
                got += values(packs)
                await websocket.send(",".join(packs))
        assert got == list(range(50_000))


def values(packs: dict[str, Any]) -> list[Any]:
    return [message[1] for pack in packs.values() for message in pack]


# The bound


async def test_a_session_that_is_full_is_told_what_it_lost_and_goes_on() -> None:
    async with http_bus("news", msgstream={"session-packs-max": 5}) as http:
        key = await http.open_session("news")
        await http.publish("news", *[b"%d" % number for number in range(8)])
        epoch = http.node.bus.log.bounds("news").epoch

        packs = await http.packs(key)

        lost = {"topic": "news", "position": f"{epoch}:0", "count": 3}
        assert packs.pop("0") == [["session.overflow", lost]]
        assert values(packs) == [3, 4, 5, 6, 7]
        await http.publish("news", b"8")
        later = await http.packs(key, ",".join(packs))
        assert values(later) == [8]
        assert int(next(iter(later))) == int(list(packs)[-1]) + 1


async def test_a_session_is_bounded_in_bytes_too() -> None:
    async with http_bus("news", msgstream={"session-bytes-max": 250}) as http:
        key = await http.open_session("news")
        await http.publish("news", *[b"%d" % number * 100 for number in range(1, 5)])

        packs = await http.packs(key)

        assert packs.pop("0")[0][1]["count"] == 2
        assert [str(value)[0] for value in values(packs)] == ["3", "4"]


async def test_direct_packs_are_bounded_and_what_is_lost_is_told() -> None:
    async with http_bus(msgstream={"session-packs-max": 3}) as http:
        key = await http.open_session()
        for number in range(5):
            await http.post(key, ["n", number])

        packs = await http.packs(key)

        assert packs.pop("0") == [
            ["session.overflow", {"topic": None, "position": None, "count": 2}]
        ]
        assert values(packs) == [2, 3, 4]


async def test_a_client_that_never_confirms_goes_on_getting_packs() -> None:
    async with http_bus("news", msgstream={"session-packs-max": 3}) as http:
        key = await http.open_session("news")
        async with http.websocket(key) as websocket:
            got: list[Any] = []
            for number in range(10):
                await http.publish("news", b"%d" % number)
                while len(got) <= number:
                    packs = await recv(websocket)
                    packs.pop("0", None)
                    got += values(packs)
            assert got == list(range(10))
        assert len([pack for pack in (await http.packs(key)).values() if pack]) <= 4


async def test_a_deleted_topic_is_told_and_does_not_stop_the_session() -> None:
    async with http_bus("a", "b") as http:
        key = await http.open_session("a", "b")
        await http.publish("a", b"1")
        assert (await http.client.delete("/v1/topics/a")).status_code == 204
        await http.publish("b", b"2")

        packs = await http.packs(key)

        assert packs["0"][0][0] == "session.overflow"
        assert packs["0"][0][1]["topic"] == "a"
        assert packs["2"] == [["topic.deleted", {"topic": "a"}]]
        assert values({"3": packs["3"]}) == [2]


async def test_a_topic_may_be_deleted_while_a_session_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("a") as http:
        await http.publish("a", b"1")
        key = await http.open_session("a", **{"from": "earliest"})
        log, bus = http.node.bus.log, http.node.bus
        loop, read = asyncio.get_running_loop(), log.read

        async def delete() -> None:
            if bus.has_topic("a"):
                bus.delete_topic("a")

        def read_late(*given: Any, **named: Any) -> Any:
            asyncio.run_coroutine_threadsafe(delete(), loop).result()
            return read(*given, **named)

        monkeypatch.setattr(log, "read", read_late)
        packs = await http.packs(key)
        assert [["topic.deleted", {"topic": "a"}]] in packs.values()


async def test_many_sessions_share_one_payload_in_memory_and_on_disk(tmp_path: Path) -> None:
    async with http_bus("news", data=str(tmp_path)) as http:
        inboxes: Inboxes = http.node.services.inboxes
        keys = [await inboxes.create(["news"], None, "latest") for _ in range(200)]
        await http.publish("news", b"x" * 100_000)

        packs = [await http.packs(key) for key in keys[:20]]

        assert all(values(one) == ["x" * 100_000] for one in packs)
        sessions = list(inboxes.sessions())
        contents = {id(content) for one in sessions for _, content in one.unconfirmed(0, 1 << 30)}
        assert len(contents) == 1
    assert (tmp_path / "state.db").stat().st_size < 1_000_000


# Restarts


async def test_sessions_packs_and_confirmations_survive_a_restart(tmp_path: Path) -> None:
    async with http_bus("news", data=str(tmp_path)) as http:
        key = await http.open_session("news")
        await http.publish("news", b"1", b"2")
        await http.post(key, ["direct", 3])
        assert len(await http.packs(key)) == 3
        await http.packs(key, "1")
        await http.publish("news", b"4")
    async with http_bus("news", data=str(tmp_path)) as http:
        await http.publish("news", b"5")
        packs = await http.packs(key)
        assert {name: pack for name, pack in packs.items() if name in "23"} == {
            "2": [["news", 2]],
            "3": [["direct", 3]],
        }
        assert list(packs)[:3] == ["2", "3", "4"]
        assert values(packs) == [2, 3, 4, 5]
        await http.packs(key, ",".join(packs))
    async with http_bus("news", data=str(tmp_path)) as http:
        assert await http.packs(key) == {}
        await http.publish("news", b"6")
        following = await http.packs(key)
        assert list(following) == [str(int(list(packs)[-1]) + 1)]


async def test_what_is_confirmed_leaves_the_disk(tmp_path: Path) -> None:
    async with http_bus(data=str(tmp_path)) as http:
        key = await http.open_session()
        for number in range(5):
            await http.post(key, ["n", number])
        packs = await http.packs(key)
        await http.packs(key, ",".join(packs))
    with sqlite3.connect(tmp_path / "state.db") as db:
        assert db.execute("SELECT count(*) FROM packs").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM direct").fetchone() == (0,)
    db.close()


async def test_an_ended_session_leaves_the_disk(tmp_path: Path) -> None:
    async with http_bus(data=str(tmp_path)) as http:
        key = await http.open_session()
        await http.post(key, ["n"])
        await http.client.delete(f"/v1/sessions/{key}")
    with sqlite3.connect(tmp_path / "state.db") as db:
        for table in ("sessions", "packs"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    db.close()


async def test_many_sessions_are_woken_by_one_publish() -> None:
    async with http_bus("news") as http:
        keys = [await http.open_session("news") for _ in range(30)]
        sockets = [await http.websocket(key) for key in keys]
        await asyncio.sleep(0.05)
        await http.publish("news", b"1")
        assert [await recv(one) for one in sockets] == [{"1": [["news", 1]]}] * 30
        for one in sockets:
            await one.close()


async def test_many_sessions_are_woken_a_few_at_a_time_and_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "WAKES_PER_TURN", 2)
    async with http_bus("news", "more") as http, contextlib.AsyncExitStack() as stack:
        websockets = [
            await stack.enter_async_context(http.websocket(await http.open_session("news", "more")))
            for _ in range(5)
        ]

        await http.publish("news", b"1")
        await http.publish("more", b"2")

        for websocket in websockets:
            packs: dict[str, Any] = {}
            while len(packs) < 2:
                packs |= await recv(websocket)
            assert packs == {"1": [["news", 1]], "2": [["more", 2]]}


async def test_hanging_polls_are_counted() -> None:
    async with http_bus("news") as http:
        poll = await http.hanging_poll(await http.open_session("news"))

        assert "\npolybus_polls 1\n" in (await http.client.get("/metrics")).text

        await http.publish("news", b"1")
        assert (await poll).json() == {"1": [["news", 1]]}
        assert "\npolybus_polls 0\n" in (await http.client.get("/metrics")).text


async def test_a_deleted_topic_is_told_in_a_pack_of_its_own() -> None:
    async with http_bus("news", "sport") as http:
        key = await http.open_session("news", "sport")
        poll = await http.hanging_poll(key)

        assert (await http.client.delete("/v1/topics/news")).status_code == 204
        told = (await asyncio.wait_for(poll, 10)).json()
        await http.publish("sport", b"1")

        assert [["topic.deleted", {"topic": "news"}]] in told.values()
        after = await http.packs(key, ",".join(told))
        assert list(after.values()) == [[["sport", 1]]]
