"""Transactions: all of a batch's messages or none, and once."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from commit_kit import Producer, records, rows, stage_bytes, staged, values_of
from http_kit import http_bus

from polybus.bus.bus import Bus


async def test_a_commit_publishes_all_topics_and_says_where() -> None:
    async with http_bus("red", "blue") as http:
        await http.publish("red", b"before")
        producer = Producer(http)
        answer = await producer.done(0, {"red": [b"1", b"2"], "Blue": [b"3"]})
        log = http.node.bus.log
        epochs = {topic: log.bounds(topic).epoch for topic in ("red", "blue")}
        assert answer == {
            "producer": "spark",
            "query": "q1",
            "batch": 0,
            "already": False,
            "offsets": {"red": [[epochs["red"], 1, 3]], "blue": [[epochs["blue"], 0, 1]]},
        }
        assert values_of(log, "red") == [b"before", b"1", b"2"]
        assert values_of(log, "blue") == [b"3"]
        batch = log.read("red", 1)[0]
        assert (batch.protocol, batch.sender) == ("spark", "spark")
        assert producer.left() == []
        assert [record["batch"] for record in records(http)] == [0]


async def test_keys_and_headers_are_published_with_the_values() -> None:
    async with http_bus("red") as http:
        staged_rows = rows(
            "red", [b"1", b"2"], keys=[b"k", None], headers=[None, [("unit", b"\xff")]]
        )
        name = stage_bytes(http.node.data, "spark", 0, staged([staged_rows]))
        await Producer(http).done(0, files=[name])
        batch = http.node.bus.log.read("red", 0)[0]
        assert list(batch.keys or ()) == [b"k", None]
        assert [dict(one or {}) for one in batch.headers or ()] == [{}, {"unit": b"\xff"}]


@pytest.mark.parametrize("part_bytes", [1 << 20, 10_000])
async def test_large_values_of_a_transaction_are_references(part_bytes: int) -> None:
    limits = {"inline-bytes-max": 20_000, "transaction-part-bytes": part_bytes}
    async with http_bus("red", "blue", limits=limits) as http:
        large = [bytes([number]) * 30_000 for number in range(3)]
        staged_rows = [
            rows("red", [b"1", large[0], b"2"], keys=[None, b"k", None]),
            rows("blue", [large[1]], headers=[[("unit", b"m")]]),
            rows("red", [large[2]]),
        ]
        name = stage_bytes(http.node.data, "spark", 0, staged(staged_rows))
        await Producer(http).done(0, files=[name])
        read = {
            topic: (await http.client.get(f"/v1/topics/{topic}/messages")).json()["messages"]
            for topic in ("red", "blue")
        }
        assert [one.get("value") for one in read["red"]] == [1, None, 2, None]
        assert (read["red"][1]["key"], read["blue"][0]["headers"]) == ("k", {"unit": "m"})
        assert {one["protocol"] for one in read["red"]} == {"spark"}
        found = [read["red"][1], read["blue"][0], read["red"][3]]
        for message, value in zip(found, large, strict=True):
            got = await http.client.get(f"/v1/blobs/{message['reference']['id']}")
            assert got.content == value
        assert http.node.services.blobs.figures[0] == 3


async def test_a_batch_that_comes_again_adds_nothing_and_gets_the_same_answer() -> None:
    async with http_bus("red") as http:
        producer = Producer(http)
        first = await producer.done(0, {"red": [b"a"]})
        again = await producer.done(0, {"red": [b"a"]})
        assert again == first | {"already": True}
        await producer.done(1, {"red": [b"b"]})
        older = await producer.done(0, {"red": [b"a"]})
        assert (older["already"], older["offsets"]) == (True, {})
        assert values_of(http.node.bus.log, "red") == [b"a", b"b"]
        assert producer.left() == []


async def test_batches_are_remembered_over_a_restart(tmp_path: Path) -> None:
    for _ in range(3):
        async with http_bus("red", data=str(tmp_path)) as http:
            producer = Producer(http)
            await producer.done(0, {"red": [b"a"]})
            assert values_of(http.node.bus.log, "red") == [b"a"]
    # Without what was saved of them, the log alone says it.
    (tmp_path / "state.db").unlink()
    async with http_bus("red", data=str(tmp_path)) as http:
        assert (await Producer(http).done(0, {"red": [b"a"]}))["already"]
        last = await http.client.get("/v1/commits/spark")
        assert last.json()["batch"] == 0
        assert (await http.client.get("/v1/commits/nobody")).status_code == 404


async def test_what_was_saved_is_enough_when_the_log_no_longer_has_the_records(
    tmp_path: Path,
) -> None:
    async with http_bus("red", data=str(tmp_path), durability="memory") as http:
        await Producer(http).done(7, {"red": [b"a"]})
    async with http_bus("red", data=str(tmp_path), durability="memory") as http:
        assert records(http) == []
        producer = Producer(http)
        assert (await producer.done(7, {"red": [b"a"]}))["already"]
        assert not (await producer.done(8, {"red": [b"b"]}))["already"]


async def test_a_missing_batch_is_refused_unless_batches_may_be_missing() -> None:
    async with http_bus("red") as http:
        producer = Producer(http)
        await producer.done(3, {"red": [b"a"]})
        text = await producer.refused(409, "commit.gap", 5, {"red": [b"x"]})
        assert "batch 5 follows batch 3" in text
        assert "takeOver" in text
        await producer.done(5, {"red": [b"b"]}, gaps=True)
        await producer.done(9, {"red": [b"c"]}, **{"take-over": True})
        assert values_of(http.node.bus.log, "red") == [b"a", b"b", b"c"]


async def test_an_empty_batch_counts() -> None:
    async with http_bus("red") as http:
        producer = Producer(http)
        for batch, topics in enumerate([None, {"red": [b"a"]}, None, {"red": [b"b"]}]):
            await producer.done(batch, topics)
        assert values_of(http.node.bus.log, "red") == [b"a", b"b"]


async def test_another_query_may_not_use_the_name_unless_it_takes_it_over() -> None:
    async with http_bus("red") as http:
        await Producer(http, query="old").done(5, {"red": [b"a"]})
        other = Producer(http, query="new")
        text = await other.refused(409, "commit.query", 0, {"red": [b"x"]})
        assert "old" in text
        assert "producer" in text
        await other.done(0, {"red": [b"b"]}, **{"take-over": True})
        await other.done(1, {"red": [b"c"]})
        await Producer(http, query="old").refused(409, "commit.query", 6, {"red": [b"x"]})
        assert values_of(http.node.bus.log, "red") == [b"a", b"b", b"c"]


async def test_a_transaction_of_many_parts_is_published_once_and_as_a_whole() -> None:
    limits = {"transaction-part-bytes": 2000}
    async with http_bus("red", "blue", limits=limits) as http:
        producer = Producer(http)
        values = [b"%03d" % n + b"x" * 300 for n in range(40)]
        batches = [rows("red" if n % 2 else "blue", values[n : n + 4]) for n in range(0, 40, 4)]
        batches[1::2] = [rows("red", values[n : n + 4]) for n in range(4, 40, 8)]
        content = staged(batches)
        answers = []
        for _ in range(2):
            name = stage_bytes(http.node.data, "spark", 0, content)
            answers.append(await producer.done(0, files=[name]))
        log = http.node.bus.log
        blue = [value for n in range(0, 40, 8) for value in values[n : n + 4]]
        red = [value for n in range(4, 40, 8) for value in values[n : n + 4]]
        assert (values_of(log, "blue"), values_of(log, "red")) == (blue, red)
        assert answers[1] == answers[0] | {"already": True}
        assert [ranges[0][1:] for ranges in answers[0]["offsets"].values()] == [[0, 20], [0, 20]]
        kinds = [record["kind"] for record in records(http)]
        assert kinds == ["intent", *["part"] * (len(kinds) - 2), "commit"]
        assert len(kinds) > 4
        assert producer.left() == []


def fail_commit(bus: Bus, monkeypatch: pytest.MonkeyPatch, *, call: int) -> None:
    """One commit of the bus fails, by its number from here on."""
    commit, calls = bus.commit, 0

    def fail_once(batches: Any, **options: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("the bus dies here")
        return commit(batches, **options)

    monkeypatch.setattr(bus, "commit", fail_once)


async def test_a_transaction_with_an_intent_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [b"%03d" % n + b"x" * 300 for n in range(40)]
    content = staged([rows("red", values[n : n + 4]) for n in range(0, 40, 4)])
    settings: dict[str, Any] = {"limits": {"transaction-part-bytes": 2000}, "data": str(tmp_path)}
    async with http_bus("red", **settings) as http:
        bus = http.node.bus
        fail_commit(bus, monkeypatch, call=4)
        name = stage_bytes(tmp_path, "spark", 0, content)
        producer = Producer(http)
        assert (await producer.commit(0, files=[name])).status_code == 500
        assert 0 < len(values_of(bus.log, "red")) < 40
        # Its producer gives up, and may not take away what will be finished.
        gone = await http.client.delete(f"/v1/staging/spark/{name}")
        assert gone.status_code == 204
        assert producer.left() == [name]
    async with http_bus("red", **settings) as http:
        assert values_of(http.node.bus.log, "red") == values
        producer = Producer(http)
        assert (await producer.done(0, {"red": [b"x"]}))["already"]
        assert values_of(http.node.bus.log, "red") == values
        assert producer.left() == []


async def test_an_unfinished_transaction_is_finished_when_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [b"%03d" % n + b"x" * 300 for n in range(40)]
    content = staged([rows("red", values[n : n + 4]) for n in range(0, 40, 4)])
    async with http_bus("red", limits={"transaction-part-bytes": 2000}) as http:
        bus = http.node.bus
        fail_commit(bus, monkeypatch, call=3)
        producer = Producer(http)
        files = [stage_bytes(http.node.data, "spark", 0, content)]
        assert (await producer.commit(0, files=files)).status_code == 500
        # A second attempt has files of its own, cut in another way: those of the intent count.
        answer = await producer.done(0, {"red": values})
        assert not answer["already"]
        assert values_of(bus.log, "red") == values
        await producer.done(1, {"red": [b"next"]})
        assert producer.left() == []


async def test_producers_that_wrote_once_are_forgotten_first() -> None:
    async with http_bus("red", limits={"producers-max": 2}) as http:
        await Producer(http, "stream").done(0, {"red": [b"0"]})
        for number in range(3):
            await Producer(http, f"once{number}", "once").done(0, {"red": [b"1"]})
        await Producer(http, "second").done(0, {"red": [b"2"]})
        await Producer(http, "third").refused(409, "commit.too-many", 0, {"red": [b"3"]})
        assert (await Producer(http, "stream").done(0, {"red": [b"0"]}))["already"]


async def test_run_json_says_where_http_is_spoken() -> None:
    async with http_bus("red") as http:
        run = json.loads((http.node.data / "run.json").read_text())
        assert run["http"] == [f"http://127.0.0.1:{http.node.tcp_port}"]


async def test_a_disk_that_fails_after_the_commit_does_not_deny_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    async with http_bus("red") as http:
        producer = Producer(http)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", failing)
            assert not (await producer.done(0, {"red": [b"a"]}))["already"]
        assert values_of(http.node.bus.log, "red") == [b"a"]


async def test_an_error_of_the_disk_in_any_request_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def failing(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    async with http_bus("red") as http:
        monkeypatch.setattr(http.node.services.transactions, "commit", failing)
        answer = await http.client.post(
            "/v1/commits", json={"producer": "spark", "query": "q", "batch": 0, "files": []}
        )
        assert (answer.status_code, answer.json()["code"]) == (503, "log.full")
