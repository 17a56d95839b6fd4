"""All that matches of what was not delivered: counted, and published again, in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from accounts_http_kit import accounts_bus
from http_kit import Http, http_bus
from hypothesis import given
from hypothesis import strategies as st
from test_redrives import finished

from polybus.services import undelivered
from polybus.services.events import UndeliveredRange
from polybus.services.queries.ranges import joined, page_of
from polybus.services.undelivered import UndeliveredMatches

PAGE = 60
TARGET = "/v1/undelivered/replay"

ranges_of = st.builds(
    lambda topic, epoch, first, count: UndeliveredRange(topic, epoch, first, first + count),
    *(st.sampled_from("ab"), st.integers(1, 2), st.integers(0, 30), st.integers(1, 6)),
)


def offsets(ranges: Sequence[UndeliveredRange]) -> list[tuple[str, int, int]]:
    return [(topic, epoch, n) for topic, epoch, first, stop in ranges for n in range(first, stop)]


@given(st.lists(ranges_of, max_size=60), st.integers(1, 5))
def test_pages_have_every_message_once_in_order(ranges: list[UndeliveredRange], limit: int) -> None:
    found: list[UndeliveredRange] = []
    is_last = False
    while not is_last:
        page = page_of(ranges, found[-1] if found else None, limit)
        assert len(page.ranges) <= limit and (page.ranges or page.is_last)
        found, is_last = found + page.ranges, page.is_last
        assert len(found) <= len(set(offsets(ranges)))
    assert offsets(found) == sorted(set(offsets(ranges))) == offsets(joined(ranges))


def miss(http: Http, topic: str, first: int, stop: int, to: str = "10.0.0.5:999") -> None:
    """Let the bus report that somebody did not get these messages."""
    what = UndeliveredRange(topic, http.node.bus.log.bounds(topic).epoch, first, stop)
    about = {"reason": "outbox.full", "to": to, "protocol": "boson-frames"}
    http.node.context.events.undelivered("default", what, **about)


async def written(http: Http) -> None:
    http.node.context.events.write()
    await http.node.context.durability.wait()


async def replay(http: Http, **body: Any) -> Any:
    answer = await http.client.post(TARGET, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_all_that_match_are_published_again_once_however_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undelivered, "PAGE_RANGES", PAGE)
    async with http_bus("news", "olds") as http:
        values = [b"%d" % number for number in range(500)]
        await http.publish("news", *values)
        await http.publish("olds", *values[:10])
        # Every second message, so that nothing can be joined; twice, since two did not get it.
        for number in range(0, 500, 2):
            miss(http, "news", number, number + 1)
            miss(http, "news", number, number + 1, to="10.0.0.6:999")
        miss(http, "olds", 2, 5)
        await written(http)
        before = http.node.bus.log.bounds("news")

        planned = await replay(http, **{"dry-run": True})
        matching = await replay(http, text="OLDS", **{"dry-run": True})
        assert (planned["messages"], planned["topics"]) == (253, {"news": 250, "olds": 3})
        assert (matching["messages"], matching["topics"]) == (3, {"olds": 3})
        assert http.node.bus.log.bounds("news") == before

        begun = await replay(http, rate=100_000, topic="NEWS")
        ended = await finished(http, begun["id"])
        assert (ended["state"], ended["error"]) == ("done", "")
        assert (ended["published"], ended["messages"]) == (250, 250)
        read = await http.client.get("/v1/topics/news/messages?offset=500&limit=1000")
        assert [one["value"] for one in read.json()["messages"]] == list(range(0, 500, 2))
        audit = (await http.client.get("/v1/topics/$audit/messages")).json()["messages"]
        begins = [one["value"] for one in audit if one["value"]["action"] == "replay-start"]
        assert begins[-1]["detail"]["topic"] == "news"


async def test_a_redrive_of_all_does_not_follow_its_own_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undelivered, "PAGE_RANGES", 1)
    async with http_bus("news", "gone") as http:
        await http.publish("news", *[b"x"] * 10)
        await http.publish("gone", b"x")
        for first in (1, 4, 8):
            miss(http, "news", first, first + 4)
        miss(http, "gone", 0, 1)
        await written(http)
        http.node.bus.delete_topic("gone")
        matches = UndeliveredMatches(http.node.bus, http.node.http.queries, ("", "", ""))
        # The log has only some of what the last event names.
        assert await matches.count() == {"news": 9}
        await http.publish("news", b"again", b"again")
        miss(http, "news", 10, 12)
        await written(http)
        found = [one for page in [page async for page in matches.pages()] for one in page]
        assert [(one.first, one.stop) for one in found] == [(1, 10)]


async def test_a_redrive_of_all_that_is_stopped_begins_no_further_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(undelivered, "PAGE_RANGES", 3)
    async with http_bus("news") as http:
        await http.publish("news", *[b"x"] * 20)
        for first in range(0, 20, 2):
            miss(http, "news", first, first + 1)
        await written(http)
        begun = await replay(http, rate=1)
        await http.until(lambda: http.node.bus.log.bounds("news").stop > 20)
        stopped = await http.client.delete(f"/v1/replays/{begun['id']}")
        assert stopped.status_code == 204
        await http.until(lambda: http.node.http.redrives.get(begun["id"]).ended is not None)
        ended = http.node.http.redrives.get(begun["id"])
        assert (ended.state, ended.error, ended.messages) == ("stopped", "", 10)
        assert 20 + ended.published == http.node.bus.log.bounds("news").stop < 24


async def test_the_list_of_what_was_not_delivered_has_older_parts() -> None:
    async with http_bus("news") as http:
        await http.publish("news", *[b"x"] * 10)
        for first in range(5):
            miss(http, "news", first, first + 1)
        await written(http)
        found: list[int] = []
        following: int | None = 0
        while following is not None:
            params = {"limit": 2, "from": following}
            answer = (await http.client.get("/v1/undelivered", params=params)).json()
            found += [one["first"] for one in answer["undelivered"]]
            following = answer["next"]
        assert found == [4, 3, 2, 1, 0]


async def test_a_page_from_a_number_that_no_offset_has_is_refused() -> None:
    async with http_bus("news") as http:
        for path in ("undelivered", "dead-letters"):
            refused = await http.client.get(f"/v1/{path}", params={"from": 1 << 63})
            assert (refused.status_code, refused.json()["code"]) == (400, "http.query")


@pytest.mark.parametrize("body", [{"ranges": []}, {"topic": "news", "ranges": [1]}, {"all": 1}])
async def test_what_to_publish_again_is_said_in_one_way(body: dict[str, Any]) -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"x")
        if body.get("ranges"):
            epoch = http.node.bus.log.bounds("news").epoch
            body = body | {"ranges": [{"topic": "news", "epoch": epoch, "first": 0, "stop": 1}]}
        refused = await http.client.post(TARGET, json=body)
        assert (refused.status_code, refused.json()["code"]) == (400, "http.body-invalid")
        assert http.node.bus.log.bounds("news").stop == 1


async def test_the_administrator_publishes_again_what_accounts_missed() -> None:
    async with accounts_bus() as bus:
        shop, admin = await bus.of("shop"), await bus.admin()
        await shop.publish("news", b"1")
        keyed, lines = b'{"value": 2, "key": "k"}', {"content-type": "application/x-ndjson"}
        await shop.client.post("/v1/topics/news/messages", content=keyed, headers=lines)
        miss(admin, "shop/news", 0, 2)
        await written(admin)
        ended = (await replay(admin))["id"]
        state = "running"
        while state == "running":
            answer = (await admin.client.get(f"/v1/replays/{ended}")).json()
            state = answer["state"]
        assert (state, answer["error"], answer["published"]) == ("done", "", 2)
        assert bus.node.bus.log.bounds("shop/news").stop == 4
