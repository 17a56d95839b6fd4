"""Uploads of staged files: in pieces, bounded, and unchanged while they are committed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from commit_kit import Producer, rows, stage_bytes, staged, values_of
from http_kit import Http, http_bus

from polybus.errors import UsageError
from polybus.services.transactions.staged_uploads import StagedUploads, StagingRoom

MANY_PARTS = {"transaction-part-bytes": 2000}


def of_parts(topic: str, content: bytes = b"x") -> bytes:
    return staged([rows(topic, [content * 900]) for _ in range(8)])


@contextlib.asynccontextmanager
async def begun(
    http: Http, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A commit of many parts that has its intent; it continues at the end."""
    log, transactions = http.node.bus.log, http.node.services.transactions
    go_on = asyncio.Event()
    monkeypatch.setattr(transactions, "_room", go_on.wait)
    before = log.bounds("$commits").stop
    asked = asyncio.create_task(http.client.post("/v1/commits", json=body))
    await http.until(lambda: log.bounds("$commits").stop > before)
    yield asked
    go_on.set()
    await asked


async def test_a_file_can_be_uploaded_in_pieces_and_a_piece_sent_twice() -> None:
    content = staged([rows("red", [b"%d" % n for n in range(1000)])])
    async with http_bus("red") as http:
        name = "0-abcdefgh.arrows"
        path = f"/v1/staging/up/{name}"
        for first in range(0, len(content), 5000):
            end = first + 5000 >= len(content)
            for _ in range(2):
                query: dict[str, Any] = {"position": first, "end": str(end).lower()}
                answer = await http.client.post(
                    path, params=query, content=content[first : first + 5000]
                )
                assert answer.status_code == 200, answer.text
        assert answer.json() == {"file": name, "bytes": len(content)}
        gap = await http.client.post(path, params={"position": 10**9}, content=b"x")
        assert (gap.status_code, gap.json()["code"]) == (409, "staging.position")
        await Producer(http, "up").done(0, files=[name])
        assert len(values_of(http.node.bus.log, "red")) == 1000


async def test_uploads_are_bounded_and_an_aborted_one_can_be_removed() -> None:
    async with http_bus("red", limits={"staging-bytes-max": 10_000}) as http:
        first, second = "/v1/staging/up/0-aaaaaaaa.arrows", "/v1/staging/up/0-bbbbbbbb.arrows"
        assert (await http.client.post(first, content=b"x" * 6000)).status_code == 200
        full = await http.client.post(second, content=b"x" * 6000)
        assert (full.status_code, full.json()["code"]) == (507, "staging.full")
        assert (await http.client.delete(first)).status_code == 204
        assert (await http.client.post(second, content=b"x" * 6000)).status_code == 200
        too_large = await http.client.post(first, content=b"x" * (9 << 20))
        assert too_large.status_code == 413
        bad = await http.client.post("/v1/staging/up/x", content=b"x")
        assert bad.status_code == 400


async def test_what_nobody_commits_is_removed_after_a_day(tmp_path: Path) -> None:
    old = stage_bytes(tmp_path, "gone", 0, b"x")
    fresh = stage_bytes(tmp_path, "soon", 0, b"x")
    before = time.time() - 86_500
    os.utime(tmp_path / "staging" / "gone" / old, (before, before))
    async with http_bus("red", data=str(tmp_path)) as http:
        await http.until(lambda: not (tmp_path / "staging" / "gone").exists())
        assert Producer(http).left() == [fresh]


async def test_a_file_that_is_being_committed_cannot_be_written_or_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("red", limits=MANY_PARTS) as http:
        name = stage_bytes(http.node.data, "p", 0, of_parts("red"))
        body = {"producer": "p", "query": "q", "batch": 0, "files": [name]}
        path = f"/v1/staging/p/{name}"
        async with begun(http, monkeypatch, body) as asked:
            replaced = await http.client.post(path, content=of_parts("red", b"y"))
            removed = await http.client.delete(path)

        assert (replaced.status_code, replaced.json()["code"]) == (409, "staging.in-use")
        assert removed.status_code == 204
        assert asked.result().status_code == 200
        assert set(values_of(http.node.bus.log, "red")) == {b"x" * 900}


async def test_no_part_reaches_a_system_topic_that_the_intent_does_not_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("red", limits=MANY_PARTS) as http:
        name = stage_bytes(http.node.data, "p", 0, of_parts("red"))
        body = {"producer": "p", "query": "q", "batch": 0, "files": [name]}
        async with begun(http, monkeypatch, body) as asked:
            (http.node.data / "staging" / "p" / name).write_bytes(of_parts("$alerts"))
        answer = asked.result()

        # The first part may have been read before the file was changed.
        assert (answer.status_code, answer.json()["code"]) in [
            (403, "topic.reserved"),
            (400, "commit.file"),
        ]
        assert values_of(http.node.bus.log, "$alerts") == []


async def test_a_single_transaction_is_answered_even_if_its_producer_is_forgotten_meanwhile() -> (
    None
):
    async with http_bus("red", limits={"producers-max": 1}) as http:
        once = [Producer(http, f"once{number}", "once") for number in range(4)]
        answers = await asyncio.gather(*[one.commit(0, {"red": [b"1"]}) for one in once])

        assert [one.status_code for one in answers] == [200] * 4
        assert all(one.json()["offsets"]["red"] for one in answers)


async def test_tickets_of_producers_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polybus.services.transactions.transactions.TICK_S", 0.01)
    async with http_bus("red", limits={"producers-max": 2}) as http:
        for number in range(10):
            await Producer(http, f"once{number}", "once").done(0, {"red": [b"1"]})

        await http.until(lambda: not http.node.services.transactions._tickets)


def test_a_file_is_written_by_one_request_at_a_time_and_not_while_it_is_committed() -> None:
    files = StagedUploads(StagingRoom(Path(), bytes_max=1))
    path = Path("staging/p/0-abcdefgh.arrows")
    with files.writing(path):
        for other in (files.writing(path), files.committing([path])):
            with pytest.raises(UsageError, match="written"), other:
                raise AssertionError("it was let in")
    with files.committing([path]):
        assert files.is_committing(path)
    assert not files.is_committing(path)


def test_what_others_stage_is_counted_and_what_is_gone_makes_room(tmp_path: Path) -> None:
    room = StagingRoom(tmp_path, bytes_max=1000)
    path = tmp_path / "staging" / "q" / "0-abcdefgh.arrows"
    room.take(path, 100, is_new=True)
    name = stage_bytes(tmp_path, "p", 0, b"x" * 950)
    with pytest.raises(UsageError, match="staging-bytes-max"):
        room.take(path, 901, is_new=False)
    with pytest.raises(UsageError, match="staging-bytes-max"):
        room.take(path, 100, is_new=False)
    (tmp_path / "staging" / "p" / name).unlink()
    room.take(path, 901, is_new=False)
