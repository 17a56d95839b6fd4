"""Transactions and everybody else: subscribers, the loop, and the disk."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path

import pytest
from commit_kit import Producer, rows, stage_bytes, staged, values_of
from http_kit import http_bus

from polybus.config import Config
from polybus.edges import node
from polybus.log.files import FileLog
from polybus.log.interface import LogCallbacks
from polybus.testing import ScriptedPeer
from polybus.testing.faulty_disk import FaultyDisk


async def follow(boson: ScriptedPeer, topic: str) -> None:
    await boson.send_frame("$subscribe", f"{topic} tell=position".encode())
    assert (await boson.read_frame())[0] == "$position"


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

    def on_faulty_disk(config: Config, callbacks: LogCallbacks) -> FileLog:
        return FileLog(
            Path(config.data),
            durability="fsync",
            journal=config.journal,
            retention=config.retention,
            clock=node.clock_us,
            callbacks=callbacks,
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
        await http.until(lambda: http.node.context.durability.error is None)
        await producer.done(1, {"red": [b"b"]})
        await producer.done(2, {"red": [b"c"]})
        assert values_of(http.node.bus.log, "red") == [b"a", b"b", b"c"]
