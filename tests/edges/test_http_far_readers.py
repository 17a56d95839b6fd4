"""What readers on other machines need: bounded pages of one epoch, and ends that are durable."""

from __future__ import annotations

import io

import pyarrow as pa
import pytest
from http_kit import http_bus

from polybus.errors import StorageError
from polybus.log.reading.reader import LogReader

ARROW = {"accept": "application/vnd.apache.arrow.stream"}
MESSAGES = "/v1/topics/news/messages"


def table_of(content: bytes) -> pa.Table:
    return pa.ipc.open_stream(io.BytesIO(content)).read_all()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("offset=2&stop=5", [2, 3, 4]),
        ("offset=2&stop=5&limit=2", [2, 3]),
        ("offset=8&stop=100", [8, 9]),
        ("offset=5&stop=5", []),
        ("stop=2", [0, 1]),
    ],
)
async def test_a_page_ends_where_it_is_told(query: str, expected: list[int]) -> None:
    async with http_bus("news") as http:
        await http.publish("news", *[b"%d" % number for number in range(10)])
        arrow = await http.client.get(f"{MESSAGES}?{query}", headers=ARROW)
        answer = (await http.client.get(f"{MESSAGES}?{query}")).json()

        assert table_of(arrow.content).column("offset").to_pylist() == expected
        assert [one["offset"] for one in answer["messages"]] == expected


async def test_a_page_of_another_epoch_is_refused() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1")
        epoch = (await http.client.get("/v1/topics/news")).json()["epoch"]
        same = await http.client.get(f"{MESSAGES}?epoch={epoch}", headers=ARROW)
        other = await http.client.get(f"{MESSAGES}?epoch={epoch - 1}", headers=ARROW)

        assert table_of(same.content).num_rows == 1
        assert (other.status_code, other.json()["code"]) == (409, "topic.recreated")


async def test_a_page_has_only_the_columns_asked_for() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1")
        some = await http.client.get(f"{MESSAGES}?columns=value,offset", headers=ARROW)
        wrong = await http.client.get(f"{MESSAGES}?columns=value,nix", headers=ARROW)
        twice = await http.client.get(f"{MESSAGES}?columns=value,value", headers=ARROW)

        assert table_of(some.content).column_names == ["value", "offset"]
        assert (wrong.status_code, wrong.json()["code"]) == (400, "http.query")
        assert twice.status_code == 400


async def test_an_end_that_is_asked_for_as_durable_is_there_after_a_crash() -> None:
    async with http_bus("news") as http:
        for number in range(20):
            await http.client.post(f"{MESSAGES}?receipt=memory", content=b"%d" % number)
            answer = await http.client.get("/v1/topics?durable=true")
            (state,) = answer.json()["topics"]

            assert state["stop"] == number + 1
            # What another process finds in the index was synced before.
            assert LogReader(http.node.data).bounds("news").stop >= state["stop"]


async def test_an_end_that_cannot_become_durable_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("news") as http:
        monkeypatch.setattr("polybus.services.context.RECOVERY_S", 0.01)
        monkeypatch.setattr(http.node.bus, "when_durable", lambda *_: None)
        http.node.context.durability.error = StorageError("log.full", "no space")
        answer = await http.client.get("/v1/topics?durable=true")

        assert (answer.status_code, answer.json()["code"]) == (503, "log.full")
