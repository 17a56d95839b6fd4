"""Staged files, `$commits` in the journal and the producers in state.db: once, all or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from crash_kit import Crash, Run, crashes, kill
from opened_kit import all_messages, on_node
from staging_kit import stage

from polybus.edges.node import Node
from polybus.errors import StorageError
from polybus.log.history.handover import compact
from polybus.services.transactions.commits import TransactionKey
from polybus.services.transactions.staged_uploads import StagedUpload, StagingRoom
from polybus.services.transactions.staging import staging_folder
from polybus.services.transactions.transactions import CommitRequest

pytestmark = pytest.mark.slow


TOPICS = ["a", "b"]
BATCHES = 2
# Each record batch is then a part of its own.
SMALL_PARTS = {"transaction-part-bytes": 4500}


def values_of(batch: int) -> list[tuple[str, str]]:
    return [("a", f"{batch}.1"), ("b", f"{batch}.2"), ("a", f"{batch}.3")]


def with_topics(run: Run) -> None:
    async def nothing(node: Node) -> None: ...

    on_node(nothing, run.data, topics=TOPICS)


def commit(run: Run, limits: dict[str, int]) -> None:
    async def work(node: Node) -> None:
        run.resume()
        for batch in range(BATCHES):
            files = [stage(run.data, "spark", batch, values_of(batch))]
            wanted = CommitRequest(TransactionKey("spark", "query", batch), files)
            offsets, _ = await node.services.transactions.commit(wanted, node.accounts.default)
            run.acknowledge(batch, offsets)

    run.pause()
    on_node(work, run.data, topics=TOPICS, limits=limits)


def commit_inline(run: Run) -> None:
    commit(run, {})


def commit_in_parts(run: Run) -> None:
    commit(run, SMALL_PARTS)


def look(data: Path) -> Any:
    async def shown(node: Node) -> Any:
        producers = {one.name: one.batch for one in node.services.transactions._producers.values()}
        return [producers.get("spark", -1), all_messages(node.bus.log)]

    return on_node(shown, data, topics=TOPICS)


def check_batches(shown: Any) -> None:
    """Every batch up to the last one is there whole, in order, and nothing else."""
    last, seen = shown
    whole = [pair for batch in range(last + 1) for pair in values_of(batch)]
    assert seen == {topic: [value for name, value in whole if name == topic] for topic in TOPICS}


def check_once(crash: Crash) -> None:
    check_batches(crash.seen)
    check_batches(crash.end)
    assert crash.seen[0] >= max([batch for batch, _ in crash.acknowledged], default=-1), crash
    assert crash.end[0] == BATCHES - 1, crash


def test_a_transaction_that_fits_one_commit_is_done_once_or_not_at_all() -> None:
    for crash in crashes(commit_inline, look, start=with_topics):
        check_once(crash)


def test_a_transaction_with_an_intent_is_finished_by_the_next_start() -> None:
    for crash in crashes(commit_in_parts, look, start=with_topics):
        check_once(crash)


def half_published(run: Run) -> None:
    """A transaction of which the intent and one part are published, and the bus is gone."""
    with_topics(run)
    kill(commit_in_parts, run.data, before="fdatasync journal/", nth=4)


def start_and_stop(run: Run) -> None:
    look(run.data)


def test_a_start_that_finishes_a_transaction_may_be_killed_too() -> None:
    for crash in crashes(start_and_stop, look, start=half_published):
        assert crash.seen == crash.end, crash
        check_batches(crash.seen)
        assert crash.seen[0] == 0, crash


def upload(run: Run) -> None:
    room = StagingRoom(run.data, bytes_max=1 << 20)
    path = staging_folder(run.data) / "spark" / "0-00000000.arrows"
    piece = StagedUpload(path, 0, room)
    piece.write(b"first")
    piece.sync()
    piece.close()
    run.acknowledge("first")
    piece = StagedUpload(path, 5, room)
    piece.write(b" and last")
    piece.sync()
    piece.close()
    run.acknowledge("last")


def staged_content(data: Path) -> str | None:
    path = staging_folder(data) / "spark" / "0-00000000.arrows"
    return path.read_text() if path.exists() else None


def check_upload(crash: Crash) -> None:
    facts = [fact for [fact] in crash.acknowledged]
    if facts:
        assert (crash.seen or "").startswith("first"), crash
    if "last" in facts:
        assert crash.seen == "first and last", crash
    assert crash.end == "first and last", crash


def test_an_uploaded_piece_is_there_when_it_is_acknowledged() -> None:
    for crash in crashes(upload, staged_content, verified=False):
        check_upload(crash)


def test_nothing_is_committed_while_records_of_commits_are_damaged(tmp_path: Path) -> None:
    """Damaged history does not freeze `$commits`; without its records a batch would come twice."""
    data = tmp_path / "data"

    def commit_once() -> Any:
        async def work(node: Node) -> Any:
            files = [stage(data, "spark", 0, values_of(0))]
            wanted = CommitRequest(TransactionKey("spark", "query", 0), files)
            return await node.services.transactions.commit(wanted, node.accounts.default)

        return on_node(work, data, topics=TOPICS)

    offsets, _ = commit_once()
    for path in data.glob("state.db*"):
        path.unlink()
    compact(data)
    (history,) = data.glob("accounts/default/topics/*commits/history/*/*.parquet")
    good = history.read_bytes()
    damaged = bytearray(good)
    damaged[len(good) // 2] ^= 255
    history.write_bytes(damaged)
    with pytest.raises(StorageError, match=r"log\.damaged"):
        commit_once()
    history.write_bytes(good)
    assert commit_once() == (offsets, True)
