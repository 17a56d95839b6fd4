"""A storm finds what a bus answers wrongly; stalled readers harm nobody else."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from polybus.torture import stalls
from polybus.torture.child import BusChild
from polybus.torture.report import Findings
from polybus.torture.storms import Storm, storm_settings

CLIENTS = 40


def test_a_storm_finds_changed_packs_and_positions_and_lost_messages(tmp_path: Path) -> None:
    async def storms() -> Findings:
        findings = Findings()
        child = BusChild(tmp_path, settings=storm_settings(CLIENTS))
        try:
            assert await child.start()
            storm = Storm(child, random.Random(3), CLIENTS)
            kinds = {client.kind: client for client in storm.clients}
            assert len(kinds) == 6
            await storm.open_sessions()
            await storm.come(20.0)
            storm.report(findings, when="at first")
            await storm.check(findings)
            assert not findings.broken
            silent = storm.go()

            path = f"/v1/sessions/{kinds['poll'].key}/packs"
            await child.ask("POST", path, [["direct", 3]])
            epoch = kinds["subscribe"].position.partition(":")[0]
            kinds["subscribe"].position = f"{int(epoch) - 1}:7"
            storm.messages.receipt("alpha", ["never.stored."], 5)
            await storm.come(20.0)
            storm.report(findings, when="when they were back")
            await storm.check(findings)
            for peer in silent + storm.go():
                peer.vanish("close")
        finally:
            child.kill()
        return findings

    found = asyncio.run(storms())
    assert found.broken == {"packs": 1, "errors": 1, "lost": 1}, found.texts
    assert any("resumed at" in text for text in found.texts)


@pytest.mark.timeout(60)
def test_stalled_readers_harm_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "SLICES", 1)
    monkeypatch.setattr(stalls, "SLICE_S", 1.5)
    # On a busy machine the time says nothing.
    monkeypatch.setattr(stalls, "TIMES_MAX", float("inf"))
    found = asyncio.run(stalls.stall_round(tmp_path / "round", random.Random(1), 30))
    assert [text for text in found.texts if "waited" not in text] == []
    assert found.count == 30
