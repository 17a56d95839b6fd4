"""Health: red with its reason while the disk fails, green by itself when it works again."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest
from edge_kit import until
from http_kit import Http, http_bus
from test_failing_disk import bus_on

from polybus.batch import Batch
from polybus.errors import StorageError
from polybus.log.files import FileLog
from polybus.services import state
from polybus.testing.faulty_disk import FaultyDisk


async def test_the_log_is_healthy_again_without_a_publish(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=1)
    async with bus_on(tmp_path, disk) as (node, _):
        log = node.bus.log
        assert isinstance(log, FileLog)
        log.append(Batch.of("news", [b"1"]))
        log.sync()
        disk.fail("fsync", errno.EIO)
        with pytest.raises(StorageError):
            log.seal()
        await until(lambda: node.context.durability.error is not None)
        disk.heal()
        await until(lambda: node.context.durability.error is None)


async def health(http: Http) -> tuple[int, str]:
    answer = await http.client.get("/healthz")
    return answer.status_code, answer.text


async def test_a_full_state_db_names_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "PROBE_S", 0.01)
    async with http_bus("news") as http:
        db: sqlite3.Connection = http.node.services.state._db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages}")
        key = await http.open_session("news")
        answer = await http.client.post(
            f"/v1/sessions/{key}/packs", json=[["large", "x" * 100_000]]
        )
        assert answer.status_code == 503
        assert answer.json()["code"] == "state.failed" and "full" in answer.json()["detail"]
        db.execute("PRAGMA max_page_count = 1000000")
        await until(lambda: http.node.services.state.error is None)
        assert await health(http) == (200, "ok\n")


async def test_health_is_red_while_state_db_takes_no_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "PROBE_S", 0.01)
    async with http_bus("news") as http:
        db: sqlite3.Connection = http.node.services.state._db
        db.execute("PRAGMA query_only = ON")
        answer = await http.client.post("/v1/sessions", json={"topics": ["news"]})
        assert answer.status_code == 503
        status, text = await health(http)
        assert status == 503 and "state.failed" in text and "readonly" in text
        db.execute("PRAGMA query_only = OFF")
        await until(lambda: http.node.services.state.error is None)
        assert await health(http) == (200, "ok\n")
