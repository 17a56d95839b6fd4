"""Large payloads on the stream protocols: to a blob while they arrive, and to every subscriber."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import json
import os
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from bad_input_kit import MEBI
from edge_kit import TIMEOUT_S, error_line, frame, line, properties, read_properties, until

from polybus import references
from polybus.batch import Batch
from polybus.edges.node import Node
from polybus.errors import StorageError
from polybus.log.blobs import blobs_folder
from polybus.references import HEADER as HEADER_OF_REFERENCES
from polybus.scan.binary_py import HEADER, HEADER_BYTES
from polybus.testing import ScriptedPeer, run_bus

LARGE = bytes(range(256)) * 12_000 + b"the end"
TEXT = 'h\xe9llo "w"\n\U0001f600 \\ ' * 100_000
ID = hashlib.sha256(LARGE).hexdigest()
SMALL = 32 << 10
"""With this `inline-bytes-max` the tests need not be large."""


@contextlib.asynccontextmanager
async def bus(*topics: str, **settings: Any) -> AsyncIterator[Node]:
    connectors = [
        {"protocol": "tcp", "port": 0},
        {"protocol": "tcp", "port": 0, "speaks": "queue", "topic": "news"},
        {"protocol": "tcp", "port": 0, "speaks": "goms", "inline-references": True},
    ]
    async with run_bus("news", *topics, connectors=connectors, **settings) as node:
        yield node


def peer(node: Node, connector: int = 0) -> ScriptedPeer:
    port = int(node.addresses[connector].rpartition(":")[2])
    return ScriptedPeer(port, timeout_s=TIMEOUT_S)


async def read_large(peer: ScriptedPeer) -> tuple[str, bytes]:
    """A message that may come in parts."""
    content = b""
    topic = ""
    while True:
        length, flag, topic_bytes = HEADER.unpack(await peer.read(HEADER_BYTES))
        topic = (await peer.read(topic_bytes)).decode()
        content += await peer.read(length)
        if flag == 0:
            return topic, content
        assert flag == 1 and length


async def subscribe(peer: ScriptedPeer, topics: str = "news") -> None:
    lines = "\n".join(f"{one} tell=position" for one in topics.split())
    await peer.send_frame("$subscribe", lines.encode())
    for _ in topics.split():
        assert (await peer.read_frame())[0] == "$position"


def blobs_of(node: Node) -> list[str]:
    folder = blobs_folder(node.data, "default")
    return sorted(os.listdir(folder)) if folder.exists() else []


async def publish(node: Node, how: str, payload: bytes) -> None:
    """Send the payload between two small messages, and wait until all are published."""
    count = node.bus.topic("news").messages_in
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(peer(node, 1 if how == "queue" else 0))
        match how:
            case "frame":
                await sender.send(
                    frame("news", b"1") + frame("news", payload) + frame("news", b"2")
                )
            case "parts":
                await sender.send(frame("news", b"1"))
                for start in range(0, len(payload), 100_000):
                    await sender.send(frame("news", payload[start : start + 100_000], 1))
                await sender.send(frame("news") + frame("news", b"2"))
            case "properties":
                for content in (b"1", payload, b"2"):
                    await sender.send(properties(("topic", b"news"), ("content", content)))
            case "queue":
                for content in (b"1", payload, b"2"):
                    await sender.send(struct.pack(">i", len(content)) + content)
            case "base64":
                await sender.send(line("register", topics=["news"]))
                for content in (b"1", payload, b"2"):
                    data = base64.b64encode(content).decode()
                    fields = {"topics": ["news"], "data": data, "encoding": "base64"}
                    await sender.send(line("send", **fields))
        await until(lambda: node.bus.topic("news").messages_in == count + 3)


@pytest.mark.parametrize("how", ["frame", "parts", "properties", "queue", "base64"])
async def test_a_large_payload_reaches_subscribers_of_every_protocol_in_its_place(
    how: str,
) -> None:
    async with bus(limits={"inline-bytes-max": SMALL}) as node:
        async with (
            peer(node) as frames,
            peer(node) as props,
            peer(node, 1) as queue,
            peer(node) as goms,
            peer(node, 2) as old,
        ):
            await subscribe(frames)
            await props.send(properties(("hbfs", b"news tell=position")))
            assert "hbfp" in await read_properties(props)
            for one in (goms, old):
                await one.send(line("register", topics=["news"], ack=True))
                assert b"reg-ack" in await one.read_line()
            await publish(node, how, LARGE)
            assert blobs_of(node) == [ID]

            for content in (b"1", LARGE, b"2"):
                expected = struct.pack(">i", len(content)) + content
                assert await queue.read(len(expected)) == expected
            await check_received(frames, props, goms, old)


async def check_received(
    frames: ScriptedPeer, props: ScriptedPeer, goms: ScriptedPeer, old: ScriptedPeer
) -> None:
    """Each gets the payload between its neighbours, in the form of its protocol."""
    assert await frames.read_frame() == ("news", b"1")
    assert await read_large(frames) == ("news", LARGE)
    assert await frames.read_frame() == ("news", b"2")

    assert (await read_properties(props))["content"] == b"1"
    content, first = b"", await read_properties(props)
    assert (first["topic"], first["hbff"]) == (b"news", b"\x01")
    while (part := await read_properties(props))["hbff"] == b"\x01":
        content += part["content"]
    assert first["content"] + content + part["content"] == LARGE
    assert (await read_properties(props))["content"] == b"2"

    assert json.loads(await goms.read_line())["data"] == "1"
    reference = json.loads(await goms.read_line())
    kind = reference.pop("type")
    assert reference == {
        **{"messagetype": "reference", "topics": ["news"]},
        **{"id": ID, "size": len(LARGE), "sha256": ID},
    }
    assert kind == "application/octet-stream"
    assert await downloaded(goms, ID) == LARGE
    assert json.loads(await goms.read_line())["data"] == "2"

    assert json.loads(await old.read_line())["data"] == "1"
    message = json.loads(await old.read_line())
    assert base64.b64decode(message["data"]) == LARGE
    assert message["messagetype"] == "message" and message["encoding"] == "base64"
    assert json.loads(await old.read_line())["data"] == "2"


async def downloaded(peer: ScriptedPeer, blob_id: str, size: int = 100_000) -> bytes:
    """All chunks of a blob; what else arrives meanwhile must have come before."""
    content = b""
    kept = []
    while True:
        fields = {"id": blob_id, "from": len(content), "bytes": size}
        await peer.send(line("download", **fields))
        chunk = json.loads(await peer.read_line())
        while chunk["messagetype"] != "chunk":
            kept.append(chunk)
            chunk = json.loads(await peer.read_line())
        assert (chunk["id"], chunk["from"]) == (blob_id, len(content))
        content += base64.b64decode(chunk["data"])
        if chunk["last"]:
            for one in kept:
                peer._reader._buffer[:0] = json.dumps(one).encode() + b"\n"  # type: ignore[attr-defined]
            return content


@pytest.mark.parametrize("keys", ["data last", "data first"])
async def test_a_large_string_of_goms_is_text_whatever_is_in_it(keys: str) -> None:
    async with bus("other", limits={"inline-bytes-max": SMALL}) as node:
        async with peer(node) as sender, peer(node, 2) as old, peer(node) as frames:
            await old.send(line("register", topics=["news", "other"], ack=True))
            assert b"reg-ack" in await old.read_line()
            await subscribe(frames, "news other")
            await sender.send(line("register", topics=["news", "other"]))
            fields: dict[str, Any] = {"messagetype": "send", "data": TEXT, "ack": True}
            fields |= {"topics": ["news", "other"], "headers": {"a": "b"}}
            if keys == "data last":
                fields["data"] = fields.pop("data")
            data = json.dumps(fields).encode()
            for start in range(0, len(data), 9973):
                await sender.send(data[start : start + 9973])
            ack = json.loads(await sender.read_line())
            assert ack["messagetype"] == "send-ack" and ack["topics"] == ["news", "other"]
            for topic in ("news", "other"):
                message = json.loads(await old.read_line())
                assert message["data"] == TEXT and message["topics"] == [topic]
                assert message["headers"] == {"a": "b"} and "encoding" not in message
                assert await read_large(frames) == (topic, TEXT.encode())
            [blob] = blobs_of(node)
            assert blob == hashlib.sha256(TEXT.encode()).hexdigest()


async def test_a_receipt_comes_when_payload_and_message_are_durable() -> None:
    async with bus() as node:
        async with peer(node) as sender:
            await sender.send(frame("news?receipt=7", LARGE))
            sender.send_eof()
            topic, content = await sender.read_frame()
            assert topic == "$receipt" and content.startswith(b"7 ")
            assert blobs_of(node) == [ID]


@pytest.mark.parametrize("flag", [2, 3])
async def test_parts_that_are_messages_are_published_in_order_large_or_not(flag: int) -> None:
    values = [b"1", LARGE, b"2", b"3" * SMALL, LARGE[1:], b"", b"4"]
    async with bus(limits={"inline-bytes-max": SMALL}) as node:
        async with peer(node) as reader, peer(node) as sender:
            await subscribe(reader)
            for value in values:
                await sender.send(frame("news?receipt=7", value, flag))
            await sender.send(frame("news"))
            for value in values:
                assert await read_large(reader) == ("news", value)
            topic, content = await sender.read_frame()
            assert (topic, content.partition(b":")[2]) == ("$receipt", b"6")
            await until(lambda: len(blobs_of(node)) == 2)
            # And none of them if the topic does not exist.
            for value in (LARGE, b"1"):
                await sender.send(frame("nowhere?receipt=8", value, flag))
            await sender.send(frame("nowhere") + frame("news", b"last"))
            assert await reader.read_frame() == ("news", b"last")
            assert (await sender.read_frame())[0] == "$error"
        await until(lambda: len(blobs_of(node)) == 2)


async def test_a_replay_has_the_payload_in_its_place_on_every_protocol() -> None:
    async with bus(limits={"inline-bytes-max": SMALL}) as node:
        await publish(node, "frame", LARGE)
        async with peer(node) as frames, peer(node) as props, peer(node) as goms:
            async with peer(node, 2) as old:
                await frames.send_frame("$subscribe", b"news from=earliest")
                await props.send(properties(("hbfs", b"news from=earliest")))
                for one in (goms, old):
                    await one.send(line("register", topics=["news"], **{"from": "earliest"}))
                await check_received(frames, props, goms, old)
        base = f"http://127.0.0.1:{node.tcp_port}"
        async with httpx.AsyncClient(base_url=base) as client:
            given = {"topics": ["news"], "from": "earliest"}
            key = (await client.post("/v1/sessions", json=given)).json()["sessionKey"]
            query = {"sessionKey": key, "transport": "longpolling"}
            packs = (await client.get("/msgstream", params=query)).json()
            found = [data for pack in packs.values() for _, data in pack]
            assert [found[0], found[2]] == [1, 2]
            url = found[1]["reference"]["url"]
            assert (await client.get(url)).content == LARGE


async def test_other_topics_and_answers_wait_behind_a_payload_and_nothing_is_lost() -> None:
    async with bus("other", limits={"inline-bytes-max": SMALL}) as node:
        async with peer(node) as reader, peer(node) as sender:
            await subscribe(reader, "news other")
            await sender.send(frame("news", LARGE * 4 + b"1") + frame("other", b"a"))
            await reader.send(frame("news?receipt=9", b"own") + frame("nowhere", b"x"))
            await sender.send(frame("news", LARGE * 4 + b"2") + frame("other", b"b"))
            found: dict[str, list[bytes]] = {}
            while sum(map(len, found.values())) < 7:
                topic, content = await read_large(reader)
                found.setdefault(topic, []).append(content)
            assert found["other"] == [b"a", b"b"]
            assert sorted(found["news"]) == sorted([LARGE * 4 + b"1", b"own", LARGE * 4 + b"2"])
            assert found["$receipt"][0].startswith(b"9 ")
            assert found["$error"][0].startswith(b"topic.unknown")


async def test_a_large_payload_for_an_unknown_topic_is_refused_and_the_connection_stays() -> None:
    async with bus(limits={"inline-bytes-max": SMALL}) as node:
        async with peer(node) as sender:
            await sender.send(frame("nowhere", LARGE) + frame("news?receipt=1", b"x"))
            topic, content = await sender.read_frame()
            assert topic == "$error" and content.startswith(b"topic.unknown")
            assert (await sender.read_frame())[0] == "$receipt"
            assert blobs_of(node) == []


async def test_a_download_of_what_does_not_exist_is_an_error_of_its_own() -> None:
    async with bus(limits={"inline-bytes-max": SMALL}) as node:
        await publish(node, "frame", LARGE)
        async with peer(node) as client:
            for bad in ("0" * 64, "../../etc/passwd", "", ID[:-1]):
                await client.send(line("download", **{"id": bad, "from": 0, "bytes": 10}))
                assert await client.read_line() == error_line("004001", bad)
            await client.send(line("download", **{"id": ID, "from": len(LARGE) + 1}))
            assert json.loads(await client.read_line())["error-code"] == "004001"
            await client.send(line("download", **{"id": ID, "from": -1}))
            assert json.loads(await client.read_line())["error-code"] == "000001"
            await client.send(line("download", id=ID, bytes=1 << 40))
            chunk = json.loads(await client.read_line())
            assert len(base64.b64decode(chunk["data"])) == MEBI and not chunk["last"]
            # Many at once are answered in their order.
            await client.send(
                b"".join(line("download", **{"id": ID, "from": at, "bytes": 1}) for at in range(50))
            )
            for at in range(50):
                assert json.loads(await client.read_line())["from"] == at


async def test_a_payload_that_breaks_off_leaves_nothing() -> None:
    async with bus(limits={"inline-bytes-max": SMALL}) as node:
        text = line("send", topics=["news"], data="x" * 200_000)
        cases = [frame("news", LARGE)[:-1], text[:-10]]
        for data in cases:
            async with peer(node) as sender:
                await sender.send(data)
                await until(lambda: blobs_of(node) != [])
            await until(lambda: blobs_of(node) == [])
        async with peer(node) as sender:
            await sender.send(line("register", topics=["news"]))
            await sender.send(text[:100_000] + b"\n" + line("send", topics=["news"], data="whole"))
            assert json.loads(await sender.read_line())["error-code"] == "000001"
            await until(lambda: node.bus.topic("news").messages_in == 1)
        await until(lambda: blobs_of(node) == [])


async def test_a_payload_that_stops_arriving_is_given_up() -> None:
    limits = {"inline-bytes-max": SMALL, "message-timeout-s": 0.3}
    async with bus(limits=limits) as node:
        async with peer(node) as sender:
            await sender.send(frame("news", LARGE)[:-1])
            assert b"peer.too-slow" in await sender.read_to_end()
        await until(lambda: blobs_of(node) == [])


async def test_a_million_one_byte_parts_are_too_many() -> None:
    async with bus() as node:
        async with peer(node) as sender:
            part = frame("news", b"x", 1)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    await sender.send(part * 10_000)
            said = await sender.read_to_end()
            assert b"boson.parts-too-many" in said
        await until(lambda: blobs_of(node) == [])


async def test_a_header_that_only_the_bus_writes_is_refused_on_every_protocol() -> None:
    async with bus() as node:
        async with peer(node) as goms, peer(node) as props:
            forged = {"polybus-reference": ID}
            await goms.send(line("register", topics=["news"]))
            await goms.send(line("send", topics=["news"], data="x", headers=forged))
            assert json.loads(await goms.read_line())["error-code"] == "000403"
            pairs = (("topic", b"news"), ("content", b"x"), ("polybus-reference", ID.encode()))
            await props.send(properties(*pairs))
            assert (await read_properties(props))["hbfe"].startswith(b"headers.reserved")
            assert node.bus.topic("news").messages_in == 0


async def test_a_message_that_only_looks_like_a_reference_is_an_error_and_others_follow() -> None:
    async with bus() as node, peer(node) as subscriber:
        await subscribe(subscriber)
        marked = [{HEADER_OF_REFERENCES: b"x"}]
        node.bus.commit([Batch.of("news", [b"no reference"], headers=marked)])
        node.bus.commit([Batch.of("news", [b"next"])])

        assert (await read_large(subscriber))[0] == "$error"
        assert await read_large(subscriber) == ("news", b"next")


async def test_a_subscriber_that_does_not_read_a_payload_holds_up_nobody() -> None:
    async with bus("alive", limits={"inline-bytes-max": SMALL}) as node:
        async with peer(node) as deaf, peer(node) as good, peer(node) as sender:
            await subscribe(deaf)
            await subscribe(good, "news alive")
            await sender.send(frame("news", LARGE * 10) + frame("alive", b"1"))
            found = {await read_large(good) for _ in range(2)}
            assert found == {("news", LARGE * 10), ("alive", b"1")}
            assert node.context.memory.ledger.bytes < 2 * MEBI
            await asyncio.sleep(0)


async def test_a_queue_does_not_get_what_its_lengths_cannot_say_and_continues() -> None:
    """A queue's length has 4 bytes, and a reference may be wrong if it comes from Kafka."""
    async with bus(limits={"inline-bytes-max": SMALL}) as node, peer(node, 1) as queue:
        async with peer(node) as sender:
            await sender.send(frame("news?receipt=1", LARGE))
            assert (await sender.read_frame())[0] == "$receipt"
        size = int.from_bytes(await queue.read(4))
        assert await queue.read(size) == LARGE
        for wrong in (1 << 31, len(LARGE) + 1):
            value = references.encode(references.make(ID, wrong))
            mark = {HEADER_OF_REFERENCES: ID.encode()}
            node.bus.commit([Batch.of("news", [value], headers=[mark])])
        node.bus.commit([Batch.of("news", [b"next"])])
        assert await queue.read(8) == b"\0\0\0\4next"
        counts = node.bad_peers.counts
        assert (counts["queue.message-too-large"], counts["blob.unknown"]) == (1, 1)

        def missed() -> list[tuple[str, int, int]]:
            events = [
                event
                for batch in node.bus.log.read("$events", 0)
                for value in batch.values()
                for event in json.loads(value)["events"]
            ]
            found = [one for one in events if one["kind"] == "undelivered"]
            return [(one["reason"], one["first"], one["stop"]) for one in found]

        await until(lambda: len(missed()) == 2)
        assert missed() == [("queue.message-too-large", 1, 2), ("blob.unknown", 2, 3)]


async def test_a_large_message_that_is_refused_after_its_queue_is_gone_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bus ends a queue whose message it refuses; a bus that stops has ended it before."""
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    async with bus(limits={"inline-bytes-max": SMALL}) as node:
        called, is_gone = asyncio.Event(), asyncio.Event()

        async def refuse(*given: Any) -> None:
            called.set()
            await is_gone.wait()
            raise StorageError("log.closed", "the bus is stopping")

        monkeypatch.setattr(node.services.blobs, "keep", refuse)
        async with peer(node, 1) as queue:
            await queue.send(len(LARGE).to_bytes(4) + LARGE)
            await called.wait()
            for one in list(node.tcp.connections):
                one.abort()
            await until(lambda: not node.tcp.connections)
        is_gone.set()
        await asyncio.sleep(0.05)
        gc.collect()
    assert failed == []


async def test_nothing_begins_after_a_payload_that_the_end_of_the_loop_cancels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waited for it would begin tasks that nobody awaits."""
    began = asyncio.Event()

    async def wait(*_: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    async with bus(limits={"inline-bytes-max": SMALL}) as node, peer(node) as sender:
        monkeypatch.setattr(node.services.blobs, "keep", wait)
        await sender.send_frame("news", LARGE)
        await sender.send_frame("$subscribe", b"news from=earliest")
        await asyncio.wait_for(began.wait(), TIMEOUT_S)
        [task] = [one for one in asyncio.all_tasks() if "IncomingPayload" in repr(one)]
        # The request has been read, and waits.
        await asyncio.sleep(0.05)
        before = asyncio.all_tasks()
        task.cancel()
        await asyncio.wait([task])
        assert asyncio.all_tasks() <= before
        assert not node.bus.topic("news").subscribers
