"""A storm finds what a bus answers wrongly; stalled readers slow nobody else."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from polybus.torture.bus.child import BusChild
from polybus.torture.faults.clients import slow, stalls
from polybus.torture.faults.clients.storms import Storm, storm_settings
from polybus.torture.report import Findings

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


def test_stalled_readers_slow_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "SLICES", 1)
    monkeypatch.setattr(stalls, "SLICE_S", 1.5)
    # On a busy machine the time says nothing.
    monkeypatch.setattr(stalls, "TIMES_MAX", float("inf"))
    found = asyncio.run(stalls.stall_round(tmp_path / "round", random.Random(1), 30))
    assert [text for text in found.texts if "waited" not in text] == []
    assert found.count == 30


def test_slow_peers_slow_no_other_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "SLICES", 1)
    monkeypatch.setattr(slow, "SLICE_S", 1.5)
    monkeypatch.setattr(stalls, "TIMES_MAX", float("inf"))
    found = asyncio.run(slow.slow_round(tmp_path / "round", random.Random(1), 30))
    assert [text for text in found.texts if "waited" not in text] == []
    assert found.count == 30


def test_what_a_slow_peer_misses_is_found() -> None:
    for stored, invariants in (
        (["a.0.", "b.0.", "a.1."], {}),
        (["a.0.", "a.1.", "a.2."], {}),
        (["a.0."], {"lost": 1}),
        (["a.1.", "a.0."], {"order": 1}),
        (["a.0.", "a.1.", "a.1."], {"order": 1}),
    ):
        findings = Findings()
        sender = slow.SlowSender("a", 0, str.encode, b"")
        sender.receipted = ["a.0.", "a.1."]
        sender.check(stored, findings)
        assert findings.broken == invariants, stored


@pytest.mark.parametrize(
    ("sent", "invariants"),
    [([1, 2, 3], {}), ([1, 2], {"lost": 1}), ([1, 3], {"order": 1}), ([1, 2, 2, 3], {"order": 1})],
)
async def test_a_slow_reader_must_get_every_message(
    sent: list[int], invariants: dict[str, int]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"".join(b"x slow-%06d;" % number for number in sent))
        writer.close()

    findings = Findings()
    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        reader = slow.SlowReader("boson", port, b"\n", random.Random(1))
        reading = asyncio.create_task(reader.run())
        await asyncio.sleep(0.05)
        reading.cancel()
        await reader.check(3, findings)
        reader.close()
    assert findings.broken == invariants
