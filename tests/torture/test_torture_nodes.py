"""A cluster under load keeps every promise when a node is cut off, or an important broker dies."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from seeds_kit import seed_of_source

from polybus.torture.faults.cluster.links import BrokerLink
from polybus.torture.faults.cluster.nodes import node_round


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_fault_of_a_cluster_breaks_no_promise(tmp_path: Path) -> None:
    faults = ("cut", "leader", "controller")
    found = await node_round(tmp_path, random.Random(seed_of_source()), 1, faults)
    assert not found.broken, found.texts
    assert found.count == 1


async def test_a_link_that_is_cut_passes_nothing_until_it_is_whole_again() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = BrokerLink(server.sockets[0].getsockname()[1])
    port = await link.open()

    async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port)

    try:
        reader, writer = await connected()
        writer.write(b"1")
        assert await reader.readexactly(1) == b"1"
        link.cut()
        writer.write(b"2")
        late, late_writer = await connected()
        late_writer.write(b"3")
        for waits in (reader, late):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waits.readexactly(1), 0.2)
        link.heal(resets=False)
        assert await reader.readexactly(1) == b"2"
        assert await late.readexactly(1) == b"3"
        link.cut()
        link.heal(resets=True)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        again, again_writer = await connected()
        again_writer.write(b"4")
        assert await again.readexactly(1) == b"4"
        for one in (writer, late_writer, again_writer):
            one.close()
    finally:
        await link.close()
        server.close()
