"""Transactions that may not be: refused as a whole, and nothing of them hurts the bus."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest
from commit_kit import Producer, records, rows, stage_bytes, staged, values_of
from http_kit import http_bus

from polybus.batch import Batch
from polybus.services.transactions.staging import SCHEMA


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
        assert values_of(http.node.bus.log, "red") == []
        assert records(http) == []
        # The same batch may come again, corrected.
        await producer.done(0, {"red": [b"1"]})


async def test_a_staged_row_cannot_refer_to_a_blob() -> None:
    async with http_bus("red") as http:
        forged = staged([rows("red", [b"{}"], headers=[[("polybus-reference", b"0" * 64)]])])
        name = stage_bytes(http.node.data, "spark", 0, forged)
        text = await Producer(http).refused(400, "headers.reserved", 0, files=[name])
        assert "polybus-reference" in text
        assert values_of(http.node.bus.log, "red") == []


async def test_the_administrator_may_write_to_system_topics_but_not_to_the_records() -> None:
    async with http_bus("red") as http:
        token = (http.node.data / "admin.token").read_text().strip()
        head = {"authorization": f"Bearer {token}"}
        producer = Producer(http)
        await producer.done(0, {"red": [b"1"], "$stats": [b"{}"]}, headers=head)
        assert values_of(http.node.bus.log, "$stats") == [b"{}"]
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
        assert values_of(http.node.bus.log, "red") == []


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
        assert values_of(http.node.bus.log, "red") == []


async def test_nobody_writes_records_and_what_is_none_keeps_no_bus_from_starting(
    tmp_path: Path,
) -> None:
    async with http_bus("red", data=str(tmp_path)) as http:
        token = (tmp_path / "admin.token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        path = "/v1/topics/$commits/messages"
        refused = await http.client.post(path, content=b"no record", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "topic.reserved")
        http.node.bus.commit([Batch.of("$commits", [b"no record"])])
        await Producer(http).done(0, {"red": [b"1"]})
    async with http_bus("red", data=str(tmp_path)) as http:
        assert (await Producer(http).done(0, {"red": [b"1"]}))["already"]
