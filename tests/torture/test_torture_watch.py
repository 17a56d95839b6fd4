"""What is checked of a bus that survived a fault, and of one that was killed and corrupted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polybus.log.verify.verify import Damage, VerifyReport
from polybus.torture.bus.child import BusChild
from polybus.torture.faults.clients.watch import PROBE_TOPIC, BusWatch, Lateness, watched_round
from polybus.torture.faults.mixes import _check_named
from polybus.torture.report import Findings


async def _nothing(child: BusChild) -> None: ...


async def _add_message(child: BusChild) -> None:
    await child.ask("POST", f"/v1/topics/{PROBE_TOPIC}/messages", "not the probe's")


async def _remove_topic(child: BusChild) -> None:
    await child.ask("DELETE", f"/v1/topics/{PROBE_TOPIC}")
    await child.ask("POST", "/v1/topics", {"name": PROBE_TOPIC})


@pytest.mark.parametrize(
    ("act", "expected"),
    [(_nothing, set()), (_add_message, {"phantoms"}), (_remove_topic, {"lost"})],
)
async def test_the_messages_of_the_probe_are_checked(tmp_path: Path, act, expected) -> None:  # type: ignore[no-untyped-def]
    async def inject(watch: BusWatch) -> None:
        watch.begin()
        await asyncio.sleep(0.5)
        watch.abandon()
        await asyncio.sleep(0.3)
        await act(child)
        await watch.end()

    child = BusChild(tmp_path)
    found = await watched_round(child, Findings(), inject)
    assert found.broken.keys() == expected, found.texts


async def test_damaged_files_of_a_bus_that_stopped_cleanly_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = BusChild(tmp_path)
    stop = child.stop

    async def stop_and_corrupt() -> int:
        code = await stop()
        next(child.data.glob("accounts/default/topics/alpha/topic.json")).write_bytes(b"{}")
        return code

    async def inject(watch: BusWatch) -> None: ...

    monkeypatch.setattr(child, "stop", stop_and_corrupt)
    found = await watched_round(child, Findings(), inject)
    assert found.broken == {"verify": 1}, found.texts


@pytest.mark.parametrize(
    ("took_s", "times"),
    [
        ([0.9, 0.9], 0),
        ([2.5, 0.1, 2.5], 0),
        ([2.5, 1.1], 1),
        ([2.5, 1.1, 1.1], 1),
        ([0.1, 5.1, 0.1], 1),
    ],
)
def test_late_answers_count_if_they_cannot_be_the_machines(took_s: list[float], times: int) -> None:
    findings = Findings()
    lateness = Lateness(findings)
    for one in took_s:
        lateness.record(one)
    assert findings.broken["errors"] == times


FLOOR = Damage(file="journal/floor.json", reason="its checksum is wrong")
STATE = Damage(file="state.db", reason="session 1: its checksum is wrong")
ALPHA = Damage(file="001.arrows", reason="commit 1: bad", topic="alpha", first=1, last=1)


@pytest.mark.parametrize(
    ("path", "damages", "is_right"),
    [
        ("journal/floor.json", [FLOOR], True),
        ("journal/floor.json", [], False),
        ("journal/floor.json", [FLOOR, ALPHA], False),
        ("state.db", [STATE], True),
        ("state.db-wal", [STATE], True),
        # The byte may be one that nothing uses.
        ("state.db", [], True),
        ("state.db", [ALPHA], False),
        ("journal/001.index", [], True),
        ("journal/001.index", [ALPHA], False),
        ("admin.token", [], True),
        ("admin.token", [STATE], False),
    ],
)
def test_a_flip_in_a_mix_is_named_and_nothing_else(
    path: str, damages: list[Damage], is_right: bool
) -> None:
    findings = Findings()
    report = VerifyReport(damages=damages, damage_count=len(damages))
    _check_named(report, f"{path} bit 1 of byte 2 of 3 flipped", findings)
    assert (not findings.broken) == is_right
