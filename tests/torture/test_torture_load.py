"""The load of a torture round reaches the bus by every way."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from polybus.torture.child import TOPICS, BusChild
from polybus.torture.ledger import parse_value
from polybus.torture.load import SCHEMES, Load
from polybus.torture.report import Findings


async def test_every_protocol_stores_messages(tmp_path: Path) -> None:
    findings = Findings()
    child = BusChild(tmp_path)
    load = Load(child, random.Random(1), findings)
    try:
        assert await child.start()
        running = asyncio.create_task(load.run())
        writers: set[str] = set()
        wanted = {"udp", "transaction", *(f"{scheme}0" for scheme in SCHEMES)}
        async with asyncio.timeout(30):
            while not wanted <= writers:
                await asyncio.sleep(0.2)
                for topic in TOPICS:
                    values = [parse_value(text) for _, text in (await child.messages(topic))[1]]
                    writers |= {found[0] for found in values if found is not None}
        load.stopping.set()
        await running
        await load.check()
        assert await child.stop() == 0
    finally:
        child.kill()
    assert findings.texts == []
