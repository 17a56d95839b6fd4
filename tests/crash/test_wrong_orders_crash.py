"""Each scenario finds what it is there for: one wrong order of writes in the bus for each store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import test_consumers_crash as consumers
import test_history_crash as history
import test_journal_crash as journal
import test_sessions_crash as sessions
import test_tables_crash as tables
import test_topics_crash as topics
import test_transactions_crash as transactions
from crash_kit import Crash, Look, Run, Work, crashes
from opened_kit import look_at_log, on_node, opened_log

from polybus.edges.node import Node
from polybus.lake.table import LakeTable
from polybus.log.disk import Disk, DiskFile
from polybus.log.history.handover import hand_over
from polybus.services.consumers import ConsumerPosition, Consumers, Report
from polybus.services.context import Durability
from polybus.services.sessions.saving import Saver
from polybus.services.transactions.uploads import Upload

pytestmark = pytest.mark.slow


def nothing(*_: Any, **__: Any) -> None:
    """In place of a write."""


async def no_wait(*_: Any, **__: Any) -> None:
    """In place of waiting for a write."""


def create_without_folder_fsync(run: Run) -> None:
    Disk.sync_folder = nothing  # type: ignore[method-assign]
    topics.create(run)


def publish_without_fsync(run: Run) -> None:
    DiskFile.sync = nothing  # type: ignore[method-assign]
    journal.publish_and_seal(run)


def delete_segments_before_the_hand_over(run: Run) -> None:
    with opened_log(run.data) as log:
        for segment in log.sealed_segments()[:1]:
            copy = segment.with_suffix(".copy")
            copy.write_bytes(segment.read_bytes())
            segment.unlink()
            copy.rename(segment)
        log.after_handover(hand_over(run.data, grace_s=0.0))


def commit_without_waiting(run: Run) -> None:
    sync = DiskFile.sync

    def late(self: DiskFile) -> None:
        time.sleep(0.05)
        sync(self)

    # On a busy machine the answer could else come after the fsync that it does not wait for.
    DiskFile.sync = late  # type: ignore[method-assign]
    Durability.wait = no_wait  # type: ignore[method-assign]
    transactions.commit_inline(run)


def upload_without_fsync(run: Run) -> None:
    Upload.sync = nothing  # type: ignore[method-assign]
    transactions.upload(run)


def answer_before_the_save(run: Run) -> None:
    Saver.save = no_wait  # type: ignore[method-assign]
    sessions.a_short_life(run)


def with_a_saved_position(run: Run) -> None:
    consumers.six_days(run)

    async def report(node: Node) -> None:
        at = {"a": ConsumerPosition(epoch=node.bus.log.bounds("a").epoch, offset=1)}
        node.services.consumers.report("group", Report(positions=at))

    on_node(report, run.data)


def retain_before_the_save(run: Run) -> None:
    report = Consumers.report

    def reported(self: Consumers, *arguments: Any) -> Any:
        consumer = report(self, *arguments)
        self._saved = self._consumers
        return consumer

    Consumers.report = reported  # type: ignore[method-assign, assignment]
    consumers.report_and_retain(run)


def commit_files_without_fsync(run: Run) -> None:
    LakeTable._sync = lambda self, add: None  # type: ignore[method-assign]
    tables.append_and_compact(run)


Case = tuple[Work, Look, Work | None, Work, Callable[[Crash], None]]
CASES: list[Case] = [
    (create_without_folder_fsync, look_at_log, None, topics.create, topics.check_created),
    (
        *(publish_without_fsync, look_at_log, journal.with_topics),
        *(journal.publish_and_seal, journal.check_published),
    ),
    (
        *(delete_segments_before_the_hand_over, look_at_log, history.sealed),
        *(history.hand_all_over, history.check_everything),
    ),
    (
        *(commit_without_waiting, transactions.look, transactions.with_topics),
        *(transactions.commit_inline, transactions.check_once),
    ),
    (
        *(upload_without_fsync, transactions.staged_content, None),
        *(transactions.upload, transactions.check_upload),
    ),
    (
        *(answer_before_the_save, sessions.look, sessions.started),
        *(sessions.go_on, sessions.check),
    ),
    (
        *(retain_before_the_save, consumers.look, with_a_saved_position),
        *(consumers.report_and_retain, consumers.check_position),
    ),
    (
        commit_files_without_fsync,
        tables.look,
        None,
        tables.append_and_compact,
        tables.check_batches,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_a_wrong_order_in_the_bus_is_caught(case: Case) -> None:
    work, look, start, proceed, check = case
    verified = work not in (upload_without_fsync, commit_files_without_fsync)
    with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
        for crash in crashes(work, look, start=start, proceed=proceed, verified=verified):
            check(crash)
    # Not the work itself, which comes to its end.
    assert "at write 0" not in str(caught.value)
