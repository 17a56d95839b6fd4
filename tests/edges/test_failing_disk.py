"""A disk that is full or broken: no receipts, clear errors, and back to work when it heals."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from edge_kit import frame, line, properties, read_properties, until

from polybus.config import Config, Connector, Journal, Retention
from polybus.edges.node import Node
from polybus.log.files import FileLog
from polybus.log.interface import LogCallbacks
from polybus.testing import ScriptedPeer
from polybus.testing.faulty_disk import FaultyDisk


@asynccontextmanager
async def bus_on(data: Path, disk: FaultyDisk) -> AsyncIterator[tuple[Node, int]]:
    """A bus whose log is on that disk, and its port."""

    def open_log(config: Config, callbacks: LogCallbacks) -> FileLog:
        return FileLog(
            data,
            durability="fsync",
            journal=Journal(),
            retention=Retention(),
            clock=lambda: time.time_ns() // 1000,
            callbacks=callbacks,
            disk=disk,
            maintenance=False,
        )

    config = Config(data=str(data), connectors=[Connector(port=0)], topics=["news"])
    node = Node(config, open_log=open_log)
    await node.start()
    try:
        yield node, node.tcp_port
    finally:
        await node.stop()


async def test_a_full_disk_gives_no_receipts_and_all_of_them_once_there_is_room(
    tmp_path: Path,
) -> None:
    disk = FaultyDisk(seed=1)
    async with bus_on(tmp_path, disk) as (node, port), ScriptedPeer(port, timeout_s=20) as peer:
        await peer.send(frame("news?receipt=before", b"0"))
        assert (await peer.read_frame())[1].startswith(b"before ")
        disk.fail("write", errno.ENOSPC)
        await peer.send(frame("news?receipt=during", b"1"))
        await until(lambda: node.context.durability.error is not None)
        await peer.send(frame("news?receipt=refused", b"2"))
        name, content = await peer.read_frame()
        assert (name, content.split()[0]) == ("$error", b"log.full")
        disk.heal()
        assert (await peer.read_frame())[1].startswith(b"during ")
        await peer.send(frame("news?receipt=after", b"3"))
        name, content = await peer.read_frame()
        assert content.startswith(b"after ") and content.endswith(b":2")
        assert node.context.durability.error is None
    async with bus_on(tmp_path, FaultyDisk(seed=2)) as (node, _):
        values = [value for batch in node.bus.log.read("news", 0) for value in batch.values()]
        assert values == [b"0", b"1", b"3"]


@pytest.mark.parametrize("protocol", ["goms", "boson-properties"])
async def test_each_protocol_is_told_that_nothing_is_stored(tmp_path: Path, protocol: str) -> None:
    disk = FaultyDisk(seed=1)
    async with bus_on(tmp_path, disk) as (node, port), ScriptedPeer(port, timeout_s=20) as peer:
        async with ScriptedPeer(port) as first:
            disk.fail("fsync", errno.EIO)
            await first.send(frame("news?receipt=1", b""))
            await until(lambda: node.context.durability.error is not None)
        if protocol == "goms":
            await peer.send(line("register", topics=["news"]))
            await peer.send(line("send", topics=["news"], ack=True, data="x"))
            assert json.loads(await peer.read_line())["error-code"] == "002001"
        else:
            request = properties(("hbfr", b"1"), ("topic", b"news"), ("content", b"x"))
            await peer.send(request)
            assert (await read_properties(peer))["hbfe"].split()[0] == b"log.failed"
        disk.heal()


@pytest.mark.slow
async def test_a_shutdown_with_a_broken_disk_still_ends(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=1)
    log_closed = False
    async with asyncio.timeout(30):
        try:
            async with bus_on(tmp_path, disk) as (node, port):
                async with ScriptedPeer(port) as peer:
                    disk.fail("fsync", errno.EIO)
                    await peer.send(frame("news?receipt=1", b"x"))
                    await until(lambda: node.context.durability.error is not None)
        except Exception as error:
            # The log says that it could not keep everything.
            assert "log." in str(error)
        log_closed = True
    assert log_closed
