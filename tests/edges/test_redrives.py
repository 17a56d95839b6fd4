"""Dead letters over HTTP: listed with their reasons, and published again, once, by whom."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest
from http_kit import Http, http_bus
from quarantine_kit import quarantine
from websockets.asyncio.client import connect


async def finished(http: Http, name: str) -> dict[str, Any]:
    """A replay when it has ended."""
    url = f"ws://127.0.0.1:{http.node.tcp_port}/v1/live"
    async with connect(url) as page:
        await page.send(
            json.dumps({"op": "subscribe", "id": 1, "channel": "replay", "replay": name})
        )
        while True:
            heard = json.loads(await page.recv())
            if heard["data"]["state"] not in ("planned", "running"):
                return dict(heard["data"])


async def replay(http: Http, **body: Any) -> Any:
    answer = await http.client.post("/v1/replays", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
async def test_dead_letters_are_listed_counted_and_published_again_once() -> None:
    async with http_bus("news", "olds") as http:
        empty = (await http.client.get("/v1/dead-letters")).json()
        assert empty == {"letters": [], "total": 0, "next": None, "by": []}
        quarantine(http.node.data, "news", [b"one", b"\xff", b"three"], "not JSON")
        quarantine(http.node.data, "olds", [b"four"], "too late", first=7)
        found = (await http.client.get("/v1/dead-letters?limit=3")).json()
        some = (await http.client.get("/v1/dead-letters?reason=late")).json()
        texts = (await http.client.get("/v1/dead-letters?text=THR")).json()
        [whole] = (await http.client.get("/v1/dead-letters?id=news:1:1&whole=true")).json()[
            "letters"
        ]
        assert (await http.client.get("/v1/dead-letters/news:1:1")).json() == whole
        unknown = await http.client.get("/v1/dead-letters/news:1:9")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "letter.unknown")
        refused = await http.client.get("/v1/dead-letters?whole=true")
        assert (whole["id"], refused.json()["code"]) == ("news:1:1", "http.query")
        planned = await replay(http, **{"dry-run": True})
        by_text = await replay(http, text="ThRee", **{"dry-run": True})
        again = (await http.client.get(f"/v1/replays/{planned['id']}")).json()
        listed = (await http.client.get("/v1/replays")).json()
        assert again == planned and listed == {"replays": []}

        assert found["total"] == 4 and found["next"] == 3
        assert [one["id"] for one in found["letters"]] == ["olds:1:7", "news:1:2", "news:1:1"]
        assert found["letters"][2]["base64"] == "/w==" and found["letters"][0]["text"] == "four"
        assert found["letters"][0]["sender"] == "10.0.0.5:999"
        assert [one["id"] for one in some["letters"]] == ["olds:1:7"]
        assert [one["id"] for one in texts["letters"]] == ["news:1:2"] and texts["total"] == 1
        assert (planned["messages"], planned["topics"]) == (4, {"news": 3, "olds": 1})
        assert (by_text["messages"], by_text["topics"]) == (1, {"news": 1})
        assert http.node.bus.log.bounds("news").stop == 0

        one = await replay(http, letters=["news:1:1"])
        assert (await finished(http, one["id"]))["state"] == "done"
        rest = await replay(http, topic="news", text="e", rate=1000)
        ended = await finished(http, rest["id"])
        assert (ended["published"], ended["messages"], ended["state"]) == (2, 2, "done")
        read = (await http.client.get("/v1/topics/news/messages")).json()["messages"]
        assert [one["headers"]["replayed-from"] for one in read] == [
            "news:1:1",
            "news:1:0",
            "news:1:2",
        ]
        left = (await http.client.get("/v1/dead-letters")).json()
        assert left["total"] == 1 and left["by"] == [
            {"topic": "olds", "reason": "too late", "count": 1}
        ]
        assert [bool(one["replayed"]) for one in left["letters"]] == [False, True, True, True]
        listed = (await http.client.get("/v1/replays")).json()["replays"]
        assert [one["id"] for one in listed] == [rest["id"], one["id"]]
        audit = (await http.client.get("/v1/topics/$audit/messages")).json()["messages"]
        actions = [(m["value"]["action"], m["value"]["account"]) for m in audit]
        assert actions == [("replay-start", "default"), ("replay-end", "default")] * 2


async def test_every_topic_of_a_replay_needs_the_right_however_many_there_are() -> None:
    async with http_bus("news") as http:
        reasons = [f"why {number}" for number in range(101)]
        quarantine(http.node.data, "news", [b"x"] * 202, reasons * 2)
        quarantine(http.node.data, "$events", [b"y"], "reserved")
        refused = await http.client.post("/v1/replays", json={"dry-run": True})

        assert (refused.status_code, refused.json()["code"]) == (403, "auth.denied")
        assert "$events" in refused.json()["detail"]


@pytest.mark.slow
async def test_a_replay_is_stopped_and_another_does_not_begin_meanwhile() -> None:
    async with http_bus("news") as http:
        quarantine(http.node.data, "news", [b"x"] * 50, "why")
        slow = await replay(http, rate=1)
        await http.until(lambda: http.node.bus.log.bounds("news").stop > 0)
        again = await http.client.post("/v1/replays", json={})
        stopped, twice = [await http.client.delete(f"/v1/replays/{slow['id']}") for _ in range(2)]
        ended = await finished(http, slow["id"])

        assert (again.status_code, again.json()["code"]) == (409, "replay.running")
        assert stopped.status_code == twice.status_code == 204 and ended["state"] == "stopped"
        await http.until(lambda: bool(http.node.http.redrives.get(slow["id"]).ended))
        audit = (await http.client.get("/v1/topics/$audit/messages")).json()["messages"]
        actions = [one["value"]["action"] for one in audit]
        assert actions == ["replay-start", "replay-stop", "replay-end"]
        assert 0 < http.node.bus.log.bounds("news").stop < 50
        assert (await http.client.get("/v1/replays/nix")).json()["code"] == "replay.unknown"


async def test_a_dead_letter_is_read_whole_with_its_key_and_headers() -> None:
    async with http_bus("news") as http:
        value = b"\xff" * 100_000
        about: dict[str, Any] = {"key": b"k", "headers": {"h": b"v", "b": b"\xff"}}
        quarantine(http.node.data, "news", [value], "too strange", **about)
        [shown] = (await http.client.get("/v1/dead-letters")).json()["letters"]
        found = await http.client.get("/v1/dead-letters?id=news:1:0&whole=true")

        assert (shown["key"], shown["headers"]) == ("k", {"h": "v", "b": {"base64": "/w=="}})
        assert (await replay(http, **{"dry-run": True}))["topics"] == {"news": 1}
        assert shown["size"] == len(value) > len(b64decode(shown["base64"]))
        assert b64decode(found.json()["letters"][0]["base64"]) == value
