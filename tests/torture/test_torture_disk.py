"""Faults of the disk and the clock against a real bus, for a short time."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polybus.errors import PolybusError
from polybus.torture.bus.child import BusChild
from polybus.torture.bus.control import EVERY_CHANGE, Shim
from polybus.torture.faults.crashes.cuts import PowerCut

T = TypeVar("T")


class LosesAll(random.Random):
    """A power cut that loses everything that it may lose."""

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        return a


@pytest.mark.parametrize("durability", ["fsync", "interval"])
async def test_an_answered_change_survives_a_power_cut_at_once(
    tmp_path: Path, durability: str
) -> None:
    shim = Shim(tmp_path, records=True)
    settings = {"durability": durability}
    child = BusChild(tmp_path, settings=settings, environment=shim.environment)
    power = PowerCut(shim)

    async def sessions(*topics: str) -> str:
        answer: dict[str, Any] = await child.ask("POST", "/v1/sessions", {"topics": list(topics)})
        return str(answer["sessionKey"])

    try:
        assert await child.start()
        await child.ask("POST", "/v1/topics", {"name": "made"})
        await child.ask("POST", "/v1/topics", {"name": "deleted"})
        await child.ask("POST", "/v1/topics/made/messages", "hello")
        kept, gone = await sessions("made"), await sessions("made")
        await child.ask("DELETE", "/v1/topics/deleted")
        await child.ask("DELETE", f"/v1/sessions/{gone}")
        shim.cut_power()
        child.kill_all()
        power.cut(LosesAll())
        assert await child.start()
        assert len((await child.messages("made"))[1]) == 1
        listed = await child.ask("GET", "/v1/topics")
        assert "deleted" not in {one["name"] for one in listed["topics"]}
        await child.ask("PUT", f"/v1/sessions/{kept}/topics", {"topics": ["made"]})
        with pytest.raises(PolybusError, match="session.unknown|no session"):
            await child.ask("PUT", f"/v1/sessions/{gone}/topics", {"topics": ["made"]})
    finally:
        child.kill_all()


async def test_a_start_on_a_failing_disk_says_so(tmp_path: Path) -> None:
    shim = Shim(tmp_path)
    child = BusChild(tmp_path, environment=shim.environment)
    shim.fail(errno.EIO, EVERY_CHANGE, "run.json*")
    assert not await child.start()
    assert "data.failed" in child.log_text and "Traceback" not in child.log_text
    shim.heal()
    assert await child.start()
    assert await child.stop() == 0
