"""Transactions: all of a batch's messages or none, once, and only what may be written."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from commit_kit import Producer, rows, stage_bytes, staged, values_of
from http_kit import Http, http_bus

from polybus.batch import Batch
from polybus.config import Config
from polybus.edges import node
from polybus.log.files import FileLog
from polybus.log.staging import SCHEMA
from polybus.testing import ScriptedPeer
from polybus.testing.faulty_disk import FaultyDisk


def records(http: Http) -> list[dict[str, Any]]:
    return [msgspec.json.decode(value) for value in values_of(http.node.server.bus.log, "$commits")]


async def follow(boson: ScriptedPeer, topic: str) -> None:
    await boson.send_frame("$subscribe", f"{topic} tell=position".encode())
    assert (await boson.read_frame())[0] == "$position"


async def test_a_commit_publishes_all_topics_and_says_where() -> None:
    async with http_bus("red", "blue") as http:
        await http.publish("red", b"before")
        producer = Producer(http)
        answer = await producer.done(0, {"red": [b"1", b"2"], "Blue": [b"3"]})
        log = http.node.server.bus.log
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
        batch = http.node.server.bus.log.read("red", 0)[0]
        assert list(batch.keys or ()) == [b"k", None]
        assert [dict(one or {}) for one in batch.headers or ()] == [{}, {"unit": b"\xff"}]


async def test_a_batch_that_comes_again_adds_nothing_and_gets_the_same_answer() -> None:
    async with http_bus("red") as http:
        producer = Producer(http)
        first = await producer.done(0, {"red": [b"a"]})
        again = await producer.done(0, {"red": [b"a"]})
        assert again == first | {"already": True}
        await producer.done(1, {"red": [b"b"]})
        older = await producer.done(0, {"red": [b"a"]})
        assert (older["already"], older["offsets"]) == (True, {})
        assert values_of(http.node.server.bus.log, "red") == [b"a", b"b"]
        assert producer.left() == []


async def test_batches_are_remembered_over_a_restart(tmp_path: Path) -> None:
    for _ in range(3):
        async with http_bus("red", data=str(tmp_path)) as http:
            producer = Producer(http)
            await producer.done(0, {"red": [b"a"]})
            assert values_of(http.node.server.bus.log, "red") == [b"a"]
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
        assert values_of(http.node.server.bus.log, "red") == [b"a", b"b", b"c"]


async def test_an_empty_batch_counts() -> None:
    async with http_bus("red") as http:
        producer = Producer(http)
        for batch, topics in enumerate([None, {"red": [b"a"]}, None, {"red": [b"b"]}]):
            await producer.done(batch, topics)
        assert values_of(http.node.server.bus.log, "red") == [b"a", b"b"]


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
        assert values_of(http.node.server.bus.log, "red") == [b"a", b"b", b"c"]


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
        log = http.node.server.bus.log
        blue = [value for n in range(0, 40, 8) for value in values[n : n + 4]]
        red = [value for n in range(4, 40, 8) for value in values[n : n + 4]]
        assert (values_of(log, "blue"), values_of(log, "red")) == (blue, red)
        assert answers[1] == answers[0] | {"already": True}
        assert [ranges[0][1:] for ranges in answers[0]["offsets"].values()] == [[0, 20], [0, 20]]
        kinds = [record["kind"] for record in records(http)]
        assert kinds == ["intent", *["part"] * (len(kinds) - 2), "commit"]
        assert len(kinds) > 4
        assert producer.left() == []


async def test_a_transaction_with_an_intent_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [b"%03d" % n + b"x" * 300 for n in range(40)]
    content = staged([rows("red", values[n : n + 4]) for n in range(0, 40, 4)])
    settings: dict[str, Any] = {"limits": {"transaction-part-bytes": 2000}, "data": str(tmp_path)}
    async with http_bus("red", **settings) as http:
        bus = http.node.server.bus
        commit, calls = bus.commit, 0

        def fail_at_the_fourth(batches: Any, **options: Any) -> int:
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("the bus dies here")
            return commit(batches, **options)

        monkeypatch.setattr(bus, "commit", fail_at_the_fourth)
        name = stage_bytes(tmp_path, "spark", 0, content)
        producer = Producer(http)
        assert (await producer.commit(0, files=[name])).status_code == 500
        assert 0 < len(values_of(bus.log, "red")) < 40
        # Its producer gives up, and may not take away what will be finished.
        gone = await http.client.delete(f"/v1/staging/spark/{name}")
        assert gone.status_code == 204
        assert producer.left() == [name]
    async with http_bus("red", **settings) as http:
        assert values_of(http.node.server.bus.log, "red") == values
        producer = Producer(http)
        assert (await producer.done(0, {"red": [b"x"]}))["already"]
        assert values_of(http.node.server.bus.log, "red") == values
        assert producer.left() == []


async def test_an_unfinished_transaction_is_finished_when_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = [b"%03d" % n + b"x" * 300 for n in range(40)]
    content = staged([rows("red", values[n : n + 4]) for n in range(0, 40, 4)])
    async with http_bus("red", limits={"transaction-part-bytes": 2000}) as http:
        bus = http.node.server.bus
        commit, calls = bus.commit, 0

        def fail_once(batches: Any, **options: Any) -> int:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("once")
            return commit(batches, **options)

        monkeypatch.setattr(bus, "commit", fail_once)
        producer = Producer(http)
        files = [stage_bytes(http.node.data, "spark", 0, content)]
        assert (await producer.commit(0, files=files)).status_code == 500
        # A second attempt has files of its own, cut in another way: those of the intent count.
        answer = await producer.done(0, {"red": values})
        assert not answer["already"]
        assert values_of(bus.log, "red") == values
        await producer.done(1, {"red": [b"next"]})
        assert producer.left() == []


@pytest.mark.parametrize(
    ("status", "code", "topics", "says"),
    [
        (404, "topic.unknown", {"red": [b"1"], "nobody": [b"2"]}, "nobody"),
        (403, "topic.reserved", {"red": [b"1"], "$stats": [b"2"]}, "$stats"),
        (413, "commit.value-too-large", {"red": [b"1", b"x" * 5000]}, "5000 bytes"),
        (413, "commit.too-large", {"red": [b"x" * 3000] * 9}, "maxOffsetsPerTrigger"),
    ],
)
async def test_what_may_not_be_is_refused_as_a_whole(
    status: int, code: str, topics: dict[str, list[bytes]], says: str
) -> None:
    limits = {"message-bytes-max": 4000, "transaction-bytes-max": 20_000}
    async with http_bus("red", limits=limits) as http:
        producer = Producer(http)
        assert says in await producer.refused(status, code, 0, topics)
        assert values_of(http.node.server.bus.log, "red") == []
        assert records(http) == []
        # The same batch may come again, mended.
        await producer.done(0, {"red": [b"1"]})


async def test_the_administrator_may_write_to_system_topics_but_not_to_the_records() -> None:
    async with http_bus("red") as http:
        token = (http.node.data / "admin.token").read_text().strip()
        head = {"authorization": f"Bearer {token}"}
        producer = Producer(http)
        await producer.done(0, {"red": [b"1"], "$stats": [b"{}"]}, headers=head)
        assert values_of(http.node.server.bus.log, "$stats") == [b"{}"]
        for topic in ("$commits", "$nothing"):
            answer = await producer.commit(1, {topic: [b"x"]}, headers=head)
            assert answer.status_code == 403, answer.text


def broken_files() -> dict[str, tuple[bytes, str]]:
    good = staged([rows("red", [b"1"])])
    other = pa.schema([("value", pa.binary())])
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, SCHEMA, options=options) as writer:
        writer.write_batch(rows("red", [b"x" * 1000]))
    lying = bytearray(good)
    # The offsets of the values: the last one points far behind the values.
    at = good.index(b"1", good.index(b"red"))
    lying[at - 4 : at - 3] = b"\xff"
    return {
        "empty": (b"", "byte 0"),
        "rubbish": (os.urandom(500), "byte 0"),
        "torn": (good[:-60], ""),
        "other columns": (
            staged([pa.record_batch([pa.array([b"1"])], schema=other)], schema=other),
            "columns",
        ),
        "compressed": (bytes(sink.getvalue()), "compressed"),
        "null value": (staged([rows("red", [b"1", None])]), "column value"),
        "two topics": (
            staged([pa.concat_batches([rows("red", [b"1"]), rows("blue", [b"2"])])]),
            "one topic",
        ),
        "many headers": (
            staged([rows("red", [b""], headers=[[(str(n), b"") for n in range(2000)]])]),
            "properties-max",
        ),
        "a record batch that would be large in memory": (
            staged([rows("red", [b""] * 100_000, headers=[[("a", b"")]] * 100_000)]),
            "several rows",
        ),
        "a huge record batch": (
            staged([rows("red", [b"x" * 900_000] * 20)]),
            "record batch",
        ),
    }


@pytest.mark.parametrize("kind", broken_files())
async def test_a_file_that_is_not_what_it_should_be_is_refused_by_name(kind: str) -> None:
    content, says = broken_files()[kind]
    async with http_bus("red", "blue", limits={"message-bytes-max": 100_000}) as http:
        name = stage_bytes(http.node.data, "spark", 0, content)
        text = await Producer(http).refused(400, "commit.file", 0, files=[name])
        assert name in text
        assert says in text
        assert values_of(http.node.server.bus.log, "red") == []


async def test_no_byte_of_a_staged_file_can_hurt_the_bus() -> None:
    good = staged([rows("red", [b"12345", b"678"], keys=[b"k", None])])
    async with http_bus("red") as http:
        producer = Producer(http, query="q")
        for position in range(0, len(good), 3):
            content = bytearray(good)
            content[position] ^= 0xFF
            producer.name = f"p{position}"
            name = stage_bytes(http.node.data, producer.name, 0, bytes(content))
            answer = await producer.commit(0, files=[name])
            assert answer.status_code in (200, 400, 404, 413), answer.text
        await producer.done(1, {"red": [b"fine"]})


async def test_files_are_named_by_their_producer_and_nobody_else() -> None:
    async with http_bus("red") as http:
        producer = Producer(http)
        missing = "0-" + "0" * 32 + ".arrows"
        assert missing in await producer.refused(400, "commit.file", 0, files=[missing])
        for name in ("../../lock", "0-x.arrows", "/etc/passwd", "x"):
            await producer.refused(400, "commit.file", 0, files=[name])
        name = stage_bytes(http.node.data, "spark", 0, staged([rows("red", [b"1"])]))
        await producer.refused(400, "commit.file", 0, files=[name, name])
        for bad in ("", "..", "a/b", "-x", "x" * 200):
            producer.name = bad
            await producer.refused(400, "commit.producer", 0, files=[])
        assert values_of(http.node.server.bus.log, "red") == []


async def test_producers_that_wrote_once_are_forgotten_first() -> None:
    async with http_bus("red", limits={"producers-max": 2}) as http:
        await Producer(http, "stream").done(0, {"red": [b"0"]})
        for number in range(3):
            await Producer(http, f"once{number}", "once").done(0, {"red": [b"1"]})
        await Producer(http, "second").done(0, {"red": [b"2"]})
        await Producer(http, "third").refused(409, "commit.too-many", 0, {"red": [b"3"]})
        assert (await Producer(http, "stream").done(0, {"red": [b"0"]}))["already"]


async def test_a_file_can_be_uploaded_in_pieces_and_a_piece_sent_twice() -> None:
    content = staged([rows("red", [b"%d" % n for n in range(1000)])])
    async with http_bus("red") as http:
        name = "0-abcdefgh.arrows"
        path = f"/v1/staging/up/{name}"
        for first in range(0, len(content), 5000):
            end = first + 5000 >= len(content)
            for _ in range(2):
                query: dict[str, Any] = {"position": first, "end": str(end).lower()}
                answer = await http.client.post(
                    path, params=query, content=content[first : first + 5000]
                )
                assert answer.status_code == 200, answer.text
        assert answer.json() == {"file": name, "bytes": len(content)}
        gap = await http.client.post(path, params={"position": 10**9}, content=b"x")
        assert (gap.status_code, gap.json()["code"]) == (409, "staging.position")
        await Producer(http, "up").done(0, files=[name])
        assert len(values_of(http.node.server.bus.log, "red")) == 1000


async def test_uploads_are_bounded_and_an_aborted_one_can_be_removed() -> None:
    async with http_bus("red", limits={"staging-bytes-max": 10_000}) as http:
        first, second = "/v1/staging/up/0-aaaaaaaa.arrows", "/v1/staging/up/0-bbbbbbbb.arrows"
        assert (await http.client.post(first, content=b"x" * 6000)).status_code == 200
        full = await http.client.post(second, content=b"x" * 6000)
        assert (full.status_code, full.json()["code"]) == (507, "staging.full")
        assert (await http.client.delete(first)).status_code == 204
        assert (await http.client.post(second, content=b"x" * 6000)).status_code == 200
        too_large = await http.client.post(first, content=b"x" * (9 << 20))
        assert too_large.status_code == 413
        bad = await http.client.post("/v1/staging/up/x", content=b"x")
        assert bad.status_code == 400


async def test_what_nobody_commits_is_removed_after_a_day(tmp_path: Path) -> None:
    old = stage_bytes(tmp_path, "gone", 0, b"x")
    fresh = stage_bytes(tmp_path, "soon", 0, b"x")
    before = time.time() - 86_500
    os.utime(tmp_path / "staging" / "gone" / old, (before, before))
    async with http_bus("red", data=str(tmp_path)) as http:
        await http.until(lambda: not (tmp_path / "staging" / "gone").exists())
        assert Producer(http).left() == [fresh]


async def test_subscribers_of_every_protocol_get_a_commit_once() -> None:
    async with http_bus("red", "blue") as http, ScriptedPeer(http.node.tcp_port) as boson:
        await follow(boson, "red")
        async with ScriptedPeer(http.node.tcp_port) as goms:
            await goms.send_json({"messagetype": "register", "topics": ["red"], "ack": True})
            assert (await goms.read_json())["messagetype"] == "reg-ack"
            key = await http.open_session("red")
            producer = Producer(http)
            for _ in range(3):
                await producer.done(0, {"blue": [b"no"], "red": [b"1", b"2"]})
            await producer.done(1, {"red": [b"end"]})
            assert [await boson.read_frame() for _ in range(3)] == [
                ("red", b"1"), ("red", b"2"), ("red", b"end"),
            ]  # fmt: skip
            assert [(await goms.read_json())["data"] for _ in range(3)] == ["1", "2", "end"]
            packs = await http.packs(key)
            messages = [message for pack in packs.values() for message in pack]
            assert messages == [["red", 1], ["red", 2], ["red", "end"]]


async def test_a_large_commit_reaches_live_subscribers_in_order_and_leaves_their_limits_alone() -> (
    None
):
    """More than an outbox may hold: it is read from the log, and what comes next comes after it."""
    count, size = 240, 100_000
    limits = {"outbox-bytes-max": 1 << 20}
    async with http_bus("red", limits=limits) as http, ScriptedPeer(http.node.tcp_port) as boson:
        await follow(boson, "red")
        async with ScriptedPeer(http.node.tcp_port) as goms:
            await goms.send_json({"messagetype": "register", "topics": ["red"], "ack": True})
            await goms.read_json()
            key = await http.open_session("red")
            batches = [
                rows("red", [b"%04d" % n + b"x" * size for n in range(first, first + 10)])
                for first in range(0, count, 10)
            ]
            name = stage_bytes(http.node.data, "spark", 0, staged(batches))
            await Producer(http).done(0, files=[name])
            # What a goMS peer sends while it catches up must not come back to it.
            await goms.send_json({"messagetype": "send", "topics": ["red"], "data": "own"})
            await http.publish("red", b"after")
            frames = [await boson.read_frame() for _ in range(count + 2)]
            heads = [value[:4] for _, value in frames]
            assert heads[:count] == [b"%04d" % n for n in range(count)]
            assert sorted(heads[count:]) == [b"afte", b"own"]
            said = [(await goms.read_json())["data"][:5] for _ in range(count + 1)]
            assert [one[:4] for one in said[:count]] == [f"{n:04}" for n in range(count)]
            assert said[count] == "after"
            assert await goms.hears_nothing()
            seen: list[str] = []
            confirm = None
            while len(seen) < count + 2:
                packs = await http.packs(key, confirm)
                seen += [str(message[1])[:4] for one in packs.values() for message in one]
                confirm = ",".join(packs)
            assert seen[:count] == [f"{n:04}" for n in range(count)]


async def test_the_loop_answers_others_while_a_large_transaction_is_published() -> None:
    async with http_bus("red", limits={"transaction-part-bytes": 4 << 20}) as http:
        batches = [rows("red", [b"x" * 500_000] * 4) for _ in range(30)]
        name = stage_bytes(http.node.data, "spark", 0, staged(batches))
        waits = []
        task = asyncio.create_task(Producer(http).done(0, files=[name]))
        while not task.done():
            before = time.monotonic()
            assert (await http.client.get("/healthz")).status_code == 200
            waits.append(time.monotonic() - before)
        await task
        assert len(waits) >= 5
        assert max(waits) < 1.0


async def test_a_full_disk_is_said_and_the_same_commit_is_done_once_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk(seed=1)

    def on_faulty_disk(config: Config) -> FileLog:
        return FileLog(
            Path(config.data),
            durability="fsync",
            journal=config.journal,
            retention=config.retention,
            clock=node.clock_us,
            disk=disk,
            maintenance=False,
        )

    monkeypatch.setattr(node, "open_log", on_faulty_disk)
    async with http_bus("red") as http:
        producer = Producer(http)
        await producer.done(0, {"red": [b"a"]})
        disk.fail("write", errno.ENOSPC)
        await producer.refused(503, "log.full", 1, {"red": [b"b"]})
        await producer.refused(503, "log.full", 1, {"red": [b"b"]})
        await Producer(http, "other").refused(503, "log.full", 0, {"red": [b"x"]})
        disk.heal()
        await http.until(lambda: http.node.server.storage_error is None)
        await producer.done(1, {"red": [b"b"]})
        await producer.done(2, {"red": [b"c"]})
        assert values_of(http.node.server.bus.log, "red") == [b"a", b"b", b"c"]


async def test_run_json_says_where_http_is_spoken() -> None:
    async with http_bus("red") as http:
        run = json.loads((http.node.data / "run.json").read_text())
        assert run["http"] == [f"http://127.0.0.1:{http.node.tcp_port}"]


async def test_nobody_writes_records_and_what_is_none_keeps_no_bus_from_starting(
    tmp_path: Path,
) -> None:
    async with http_bus("red", data=str(tmp_path)) as http:
        token = (tmp_path / "admin.token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        path = "/v1/topics/$commits/messages"
        refused = await http.client.post(path, content=b"no record", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "topic.reserved")
        http.node.server.bus.publish_system([Batch.of("$commits", [b"no record"])])
        await Producer(http).done(0, {"red": [b"1"]})
    async with http_bus("red", data=str(tmp_path)) as http:
        assert (await Producer(http).done(0, {"red": [b"1"]}))["already"]
