"""The load of a torture round reaches the bus by every way, and every store beside its log."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from polybus.torture.bus.child import TOPICS, BusChild
from polybus.torture.load import upkeep
from polybus.torture.load.ledger import INLINE_BYTES_MAX, MessageLedger, parse_value
from polybus.torture.load.load import LOADED, SCHEMES, Load
from polybus.torture.report import Findings


def path_kinds(data: Path) -> dict[str, bool]:
    """Whether there are files of each kind that the load makes beside the log."""
    kinds = [
        *("shop*/account.json", "default/blobs/*/content", "shop*/blobs/*/content"),
        "default/topics/alpha/table/_delta_log/*.json",
    ]
    return {kind: any((data / "accounts").glob(kind)) for kind in kinds}


async def test_every_protocol_stores_messages_small_and_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "BACKUPS_SHARE", 1.0)
    checked: list[Path] = []
    check_copy = upkeep.UpkeepLoad._check_copy

    def noted(self: upkeep.UpkeepLoad, copy: Path, promised: Any) -> None:
        checked.append(copy)
        check_copy(self, copy, promised)

    monkeypatch.setattr(upkeep.UpkeepLoad, "_check_copy", noted)
    findings = Findings()
    child = BusChild(tmp_path, settings=LOADED)
    load = Load(child, random.Random(1), findings)
    try:
        assert await child.start()
        running = asyncio.create_task(load.run())
        writers: set[str] = set()
        large: set[str] = set()
        wanted = {"udp", "transaction", *(f"{scheme}0" for scheme in SCHEMES)}
        start = 0
        async with asyncio.timeout(150):
            while not (
                wanted <= writers & large
                and all(path_kinds(child.data).values())
                and start
                and checked
            ):
                await asyncio.sleep(0.2)
                for topic in TOPICS:
                    texts = [text for _, text in (await child.messages(topic))[1]]
                    values = [(parse_value(text), len(text)) for text in texts]
                    writers |= {found[0] for found, _ in values if found is not None}
                    large |= {
                        found[0]
                        for found, size in values
                        if found is not None and size > INLINE_BYTES_MAX
                    }
                start = (await child.ask("GET", f"/v1/topics/{upkeep.EXPIRING}"))["start"]
        load.stopping.set()
        await running
        await load.check()
        assert await child.stop() == 0
    finally:
        child.kill()
    assert findings.texts == []


@pytest.mark.parametrize(
    ("stored", "broken"), [([0, 1], {}), ([1], {}), ([2], {}), ([], {"lost": 1})]
)
async def test_retention_may_leave_any_end_of_a_topic_but_not_nothing(
    stored: list[int], broken: dict[str, int]
) -> None:
    """The last message had no receipt yet when its bus was killed."""
    messages = MessageLedger()
    values = messages.take(upkeep.EXPIRING, upkeep.WRITER, 3)
    for offset in range(2):
        messages.receipt(upkeep.EXPIRING, [values[offset]], offset)

    class Stored:
        async def ask(self, *_: object) -> dict[str, int]:
            return {"start": min(stored, default=3)}

        async def messages(self, *_: object) -> tuple[int, list[tuple[int, str]]]:
            return 3, [(offset, values[offset]) for offset in stored]

    findings = Findings()
    child: Any = Stored()
    await upkeep.UpkeepLoad(child, random.Random(1), findings, messages, asyncio.Event()).check()
    assert findings.broken == broken
