"""Large payloads over HTTP: in as a stream, out in ranges, and only to those who may read them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from accounts_http_kit import accounts_bus
from bad_input_kit import MEBI
from edge_kit import until
from http_kit import Http, http_bus, raw

from polybus.errors import UsageError
from polybus.log.blobs import BLOCK_BYTES, blobs_folder
from polybus.log.files import FileLog

LARGE = bytes(range(256)) * 8192 + b"the end"
ID = hashlib.sha256(LARGE).hexdigest()


def folders(data: Path, account: str = "default") -> list[str]:
    folder = blobs_folder(data, account)
    return sorted(os.listdir(folder)) if folder.exists() else []


async def put(http: Http, topic: str, content: Any = LARGE, **headers: str) -> dict[str, Any]:
    answer = await http.client.put(f"/v1/topics/{topic}/blob", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_payload_is_streamed_in_and_out_and_its_message_is_a_reference() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), 100_000):
            yield LARGE[start : start + 100_000]

    async with http_bus("news") as http:
        stored = await put(http, "news", pieces(), **{"content-type": "image/png"})
        reference = {"id": ID, "size": len(LARGE), "sha256": ID, "type": "image/png"}
        assert stored["reference"] == {**reference, "url": f"/v1/blobs/{ID}"}
        assert stored["offsets"] == [0]
        answer = await http.client.get("/v1/topics/news/messages")
        [message] = answer.json()["messages"]
        assert message["reference"] == reference
        assert message["headers"] == {} and "value" not in message
        got = await http.client.get(f"/v1/blobs/{ID}")
        assert got.content == LARGE and got.headers["etag"] == f'"{ID}"'
        assert got.headers["content-length"] == str(len(LARGE))
        assert got.headers["content-type"] == "application/octet-stream"


async def test_a_message_over_the_limit_becomes_a_reference_whatever_it_is_posted_as() -> None:
    async with http_bus("news", "lines") as http:
        await http.publish("news", b"x" * MEBI, LARGE)
        line = b'{"value": 1}\n' + json.dumps({"value": "y" * MEBI, "key": "k"}).encode() + b"\n"
        answer = await http.client.post(
            "/v1/topics/lines/messages",
            content=line,
            headers={"content-type": "application/x-ndjson"},
        )
        assert answer.json()["offsets"] == [0, 1]
        read = (await http.client.get("/v1/topics/news/messages")).json()["messages"]
        assert read[0]["text"] == "x" * MEBI
        assert read[1]["reference"]["id"] == ID
        read = (await http.client.get("/v1/topics/lines/messages")).json()["messages"]
        assert read[0]["value"] == 1
        assert read[1]["reference"]["size"] == MEBI + 2 and read[1]["key"] == "k"
        blob = await http.client.get(f"/v1/blobs/{read[1]['reference']['id']}")
        assert blob.content == b'"' + b"y" * MEBI + b'"'


async def test_a_session_gets_the_reference_with_its_url() -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        await put(http, "news")
        [[topic, data]] = (await http.packs(key))["1"]
        assert topic == "news" and data["reference"]["url"] == f"/v1/blobs/{ID}"
        got = await http.client.get(data["reference"]["url"])
        assert got.content == LARGE


async def test_a_download_can_be_resumed_with_ranges_and_etags() -> None:
    async with http_bus("news") as http:
        await put(http, "news")
        size = len(LARGE)
        cases = {
            "bytes=0-0": (0, 1),
            f"bytes={BLOCK_BYTES - 1}-{BLOCK_BYTES}": (BLOCK_BYTES - 1, BLOCK_BYTES + 1),
            "bytes=1000-": (1000, size),
            "bytes=-7": (size - 7, size),
            f"bytes=5-{size * 2}": (5, size),
        }
        for text, (start, stop) in cases.items():
            part = await http.client.get(f"/v1/blobs/{ID}", headers={"range": text})
            assert part.status_code == 206 and part.content == LARGE[start:stop], text
            assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
        for text in ("bytes=1-2,4-5", "bytes=-", "bytes=9-3", "lines=1-2", "bytes=a-b"):
            whole = await http.client.get(f"/v1/blobs/{ID}", headers={"range": text})
            assert whole.status_code == 200 and len(whole.content) == size, text
        beyond = await http.client.get(f"/v1/blobs/{ID}", headers={"range": f"bytes={size}-"})
        assert beyond.status_code == 416 and beyond.json()["code"] == "blob.range"
        known = await http.client.get(f"/v1/blobs/{ID}", headers={"if-none-match": f'"{ID}"'})
        assert known.status_code == 304 and known.content == b""
        changed = {"range": "bytes=1-2", "if-range": '"other"'}
        assert (await http.client.get(f"/v1/blobs/{ID}", headers=changed)).status_code == 200
        head = await http.client.head(f"/v1/blobs/{ID}")
        assert head.headers["content-length"] == str(size) and head.content == b""


async def test_every_id_that_is_none_has_the_same_answer(tmp_path: Path) -> None:
    async with http_bus("news", data=str(tmp_path)) as http:
        await put(http, "news")
        folder = blobs_folder(tmp_path, "default")
        (tmp_path / "secret").write_bytes(b"secret")
        linked = "a" * 64
        (folder / linked).symlink_to(tmp_path)
        content = folder / ID / "content"
        content.rename(tmp_path / "moved")
        content.symlink_to(tmp_path / "moved")
        ids = [
            *("0" * 64, linked, ID, ID.upper(), ID[:-1], "..", "%2e%2e", "..%2f..%2fsecret"),
            *("%2fetc%2fpasswd", "../" * 5 + "etc/passwd", "/etc/passwd", f"{ID}%00", "%00"),
            *(f"{ID}/content", f"{ID}%2fcontent", "incoming-0", "%20", "%C3%A9"),
        ]
        answers = set()
        for one in ids:
            # Not with httpx, which normalises paths.
            head = f"GET /v1/blobs/{one} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            answer = await raw(http.node, head.encode())
            status, _, rest = answer.partition(b"\r\n")
            answers.add((status, rest.partition(b"\r\n\r\n")[2]))
        [(status, text)] = answers
        assert status == b"HTTP/1.1 404 Not Found" and json.loads(text)["code"] == "blob.unknown"


async def test_a_blob_can_be_read_by_who_may_subscribe_to_a_topic_that_points_at_it() -> None:
    async with accounts_bus() as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        await put(shop, "news")
        assert (await shop.client.get(f"/v1/blobs/{ID}")).status_code == 200
        denied = await other.client.get(f"/v1/blobs/{ID}")
        unknown = await other.client.get(f"/v1/blobs/{'0' * 64}")
        assert (denied.status_code, denied.content) == (404, unknown.content)
        assert (await put(shop, "shared"))["reference"]["id"] == ID
        assert (await other.client.get(f"/v1/blobs/{ID}")).content == LARGE
        assert folders(bus.node.data, "shop") == [ID]
        bus.node.accounts.revoke("shop", "other", "shared")
        assert (await other.client.get(f"/v1/blobs/{ID}")).status_code == 404


async def test_nobody_can_write_a_reference_to_the_blob_of_another() -> None:
    async with accounts_bus() as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        bus.node.accounts.grant("shop", "other", "shared", ["publish", "subscribe"])
        await put(shop, "news")
        forged = {"value": {"reference": {"id": ID, "size": 1, "sha256": ID}}}
        line = json.dumps({**forged, "headers": {"polybus-reference": ID}}).encode()
        refused = await other.client.post(
            "/v1/topics/shop%2Fshared/messages",
            content=line,
            headers={"content-type": "application/x-ndjson"},
        )
        assert refused.status_code == 400 and refused.json()["code"] == "headers.reserved"
        await other.publish("shop%2Fshared", json.dumps(forged["value"]).encode())
        read = (await other.client.get("/v1/topics/shop%2Fshared/messages")).json()
        assert "reference" not in read["messages"][0]
        assert (await other.client.get(f"/v1/blobs/{ID}")).status_code == 404


async def test_the_bytes_of_blobs_count_for_the_quota_of_their_account() -> None:
    async with accounts_bus(limits={"account-bytes-max": 3 * MEBI}) as bus:
        shop = await bus.of("shop")
        await put(shop, "news")
        full = await shop.client.put("/v1/topics/news/blob", content=LARGE + b"2")
        assert full.status_code == 507 and full.json()["code"] == "account.bytes"
        await shop.until(lambda: folders(bus.node.data, "shop") == [ID])
        other = await bus.of("default")
        await put(other, "news")


async def test_a_payload_over_the_limit_or_of_an_unknown_topic_leaves_nothing() -> None:
    async with http_bus("news", limits={"message-bytes-max": 2 * MEBI}) as http:
        large = await http.client.put("/v1/topics/news/blob", content=LARGE + bytes(MEBI))
        assert large.status_code == 413 and large.json()["code"] == "http.body-too-large"
        unknown = await http.client.put("/v1/topics/other/blob", content=b"x")
        assert unknown.status_code == 404
        await http.until(lambda: folders(http.node.data) == [])


async def test_there_are_at_most_as_many_blobs_as_the_limit_says() -> None:
    async with http_bus("news", limits={"blobs-max": 1}) as http:
        await put(http, "news")
        more = await http.client.put("/v1/topics/news/blob", content=b"x")
        assert more.status_code == 507 and more.json()["code"] == "blob.too-many"


async def test_blobs_go_with_the_messages_that_retention_removes(tmp_path: Path) -> None:
    settings = {"journal": {"handover-interval-s": 3600}, "retention": {"age-s": 0.001}}
    async with http_bus("old", "kept", data=str(tmp_path), **settings) as http:
        await put(http, "old")
        await put(http, "kept", b"another")
        log = http.node.bus.log
        assert isinstance(log, FileLog)
        await asyncio.to_thread(log.seal)
        await asyncio.to_thread(log._maintenance.run_once)
        # What is still in the journal does not expire.
        await put(http, "kept", b"another")
        assert log.bounds("old").start == 1
        http.node.services.blobs.sweep_soon()
        await http.until(lambda: len(folders(tmp_path)) == 1)
        assert (await http.client.get(f"/v1/blobs/{ID}")).status_code == 404
        [left] = folders(tmp_path)
        assert (await http.client.get(f"/v1/blobs/{left}")).content == b"another"
        metrics = (await http.client.get("/metrics")).text
        assert "\npolybus_blobs 1\n" in metrics


async def test_so_many_payloads_arrive_at_a_time_and_no_more() -> None:
    async with http_bus("news", limits={"uploads-max": 1}) as http:
        head = b"PUT /v1/topics/news/blob HTTP/1.1\r\nhost: localhost\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", http.node.tcp_port)
        writer.write(head + b"content-length: 9000000\r\n\r\n" + bytes(MEBI))
        await http.until(lambda: folders(http.node.data) != [])
        busy = await http.client.put("/v1/topics/news/blob", content=b"x")
        assert busy.status_code == 503 and busy.json()["code"] == "blob.busy"
        writer.close()
        await http.until(lambda: folders(http.node.data) == [])
        for number in range(3):
            await put(http, "news", b"%d" % number)


async def test_a_sender_that_goes_away_leaves_nothing() -> None:
    async with http_bus("news") as http:

        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(3 * MEBI)
            await http.until(lambda: folders(http.node.data) != [])
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await http.client.put("/v1/topics/news/blob", content=pieces())
        await http.until(lambda: folders(http.node.data) == [])


async def test_blobs_go_with_the_topics_that_point_at_them(tmp_path: Path) -> None:
    async with http_bus("one", "two", data=str(tmp_path)) as http:
        await put(http, "one")
        await put(http, "two")
        await put(http, "two", b"another")
        assert len(folders(tmp_path)) == 2
        http.node.bus.delete_topic("two")
        await http.until(lambda: folders(tmp_path) == [ID])
        assert (await http.client.get(f"/v1/blobs/{ID}")).content == LARGE
    async with http_bus("one", data=str(tmp_path)) as http:
        assert (await http.client.get(f"/v1/blobs/{ID}")).content == LARGE
        http.node.bus.delete_topic("one")
        await http.until(lambda: folders(tmp_path) == [])
        assert (await http.client.get(f"/v1/blobs/{ID}")).status_code == 404


async def test_a_blob_that_is_published_again_while_it_goes_is_there() -> None:
    async with http_bus("one", "two") as http:
        for _ in range(5):
            await put(http, "two")
            http.node.bus.delete_topic("two")
            await put(http, "one")
            assert (await http.client.get(f"/v1/blobs/{ID}")).content == LARGE
            http.node.bus.delete_topic("one")
            for topic in ("one", "two"):
                http.node.bus.create_topic(topic)


async def test_the_removal_of_a_blob_comes_before_what_is_stored_after_it() -> None:
    """A sweep decides the removal, and an upload of the same bytes wakes up in the same pass."""
    async with http_bus("one") as http:
        blobs, done = http.node.services.blobs, list[str]()
        blobs._later(done.append, "removal")
        await blobs._run(done.append, "placing")
        assert done == ["removal", "placing"]


async def test_a_payload_for_a_topic_that_goes_meanwhile_leaves_nothing() -> None:
    async with http_bus("one") as http:
        blobs = http.node.services.blobs
        upload = blobs.upload(http.node.accounts.admin, "one")
        await upload.write(LARGE)
        with pytest.raises(UsageError, match="gone"):
            await blobs.keep(upload, ["one", "gone"])
        await blobs.swept()
        await until(lambda: folders(http.node.data) == [])
        assert blobs.bytes_of("default") == 0


async def test_damaged_bytes_are_not_served() -> None:
    async with http_bus("news") as http:
        await put(http, "news")
        content = blobs_folder(http.node.data, "default") / ID / "content"
        corrupted = bytearray(LARGE)
        corrupted[10] ^= 1
        content.write_bytes(corrupted)
        damaged = await http.client.get(f"/v1/blobs/{ID}")
        assert damaged.status_code == 503 and damaged.json()["code"] == "blob.damaged"
        intact = await http.client.get(
            f"/v1/blobs/{ID}", headers={"range": f"bytes={BLOCK_BYTES}-"}
        )
        assert intact.content == LARGE[BLOCK_BYTES:]


async def test_many_slow_senders_do_not_delay_another() -> None:
    async with http_bus("news") as http:
        head = b"PUT /v1/topics/news/blob HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-length: 9000000\r\n\r\n"
        peers = [await asyncio.open_connection("127.0.0.1", http.node.tcp_port) for _ in range(50)]
        for _, writer in peers:
            writer.write(head + bytes(100_000))
        try:
            async with asyncio.timeout(10):
                await put(http, "news")
                await http.publish("news", b"x" * MEBI)
        finally:
            for _, writer in peers:
                writer.close()
        await http.until(lambda: folders(http.node.data) == [ID])


async def test_a_bus_in_memory_keeps_blobs_for_as_long_as_it_runs(tmp_path: Path) -> None:
    async with http_bus("news", data=str(tmp_path), durability="fsync") as http:
        await put(http, "news")
    async with http_bus("news", data=str(tmp_path), durability="memory") as http:
        await put(http, "news", b"in memory")
        await put(http, "news")
        assert len(folders(tmp_path)) == 2
    async with http_bus("news", data=str(tmp_path), durability="memory") as http:
        # What the log on disk needs stays.
        await http.node.services.blobs.swept()
        assert folders(tmp_path) == [ID]
        assert (await http.client.get(f"/v1/blobs/{ID}")).status_code == 404
    async with http_bus("news", data=str(tmp_path)) as http:
        assert (await http.client.get(f"/v1/blobs/{ID}")).content == LARGE
