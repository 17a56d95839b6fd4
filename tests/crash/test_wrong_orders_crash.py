"""Each scenario finds what it is there for: one wrong order of writes in the bus for each store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_accounts_crash as accounts
import test_backup_crash as backups
import test_blobs_crash as blobs
import test_consumers_crash as consumers
import test_dimension_crash as dimension
import test_exposed_crash as exposed_topics
import test_history_crash as history
import test_journal_crash as journal
import test_moving_crash as moving
import test_reset_crash as resets
import test_sessions_crash as sessions
import test_tables_crash as tables
import test_topics_crash as topics
import test_transactions_crash as transactions
import test_view_crash as views
from crash_kit import ENDS, Crash, Look, Run, Work, crashes
from disk_kit import End
from opened_kit import look_at_log, on_node, opened_log

from polybus.edges.node import Node
from polybus.lake.dimension import Dimension
from polybus.lake.table import LakeTable, open_table
from polybus.log import checked_json, layout
from polybus.log.blobs import BlobMark, BlobWriter
from polybus.log.copying import FilesTarget
from polybus.log.disk import Disk, DiskFile, replace_file
from polybus.log.history import exposed
from polybus.log.history.handover import hand_over
from polybus.services import backup
from polybus.services.accounts.records import Account
from polybus.services.accounts.store import AccountStore
from polybus.services.consumers import ConsumerPosition, Consumers, Report
from polybus.services.context import Durability
from polybus.services.sessions.saving import Saver
from polybus.services.sessions.session import Session
from polybus.services.transactions.staged_uploads import StagedUpload
from polybus.spark.pipelines.declared import changes, view_flow

pytestmark = pytest.mark.slow


APPLY = Dimension.apply


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

    # On a busy machine otherwise the answer could come after the fsync that it does not wait for.
    DiskFile.sync = late  # type: ignore[method-assign]
    Durability.wait = no_wait  # type: ignore[method-assign]
    transactions.commit_inline(run)


def upload_without_fsync(run: Run) -> None:
    StagedUpload.sync = nothing  # type: ignore[method-assign]
    transactions.upload(run)


def answer_before_the_save(run: Run) -> None:
    async def save(self: Saver, wanted: Iterable[Session]) -> set[Session]:
        return set(wanted)

    Saver.save = save  # type: ignore[assignment,method-assign]
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


class NoFolderSync(Disk):
    """Never makes names durable."""

    def sync_folder(self, path: Path) -> None:
        """Not now."""


def place_blobs_without_folder_fsync(run: Run) -> None:
    place = BlobWriter.place

    def placed(self: BlobWriter, target: Path, mark: BlobMark) -> Path:
        self._disk = NoFolderSync()
        return place(self, target, mark)

    BlobWriter.place = placed  # type: ignore[method-assign]
    blobs.publish(run)


def make_a_version_before_its_links(run: Run) -> None:
    link = exposed._link
    exposed._link = lambda folder, files, known, disk: link(folder, files, known, NoFolderSync())
    exposed_topics.hand_over_and_seal(run)


def remove_the_account_before_the_grants(run: Run) -> None:
    delete = AccountStore.delete

    def deleted(self: AccountStore, name: str, deletion: int = 0) -> None:
        remove, self._remove = self._remove, nothing  # type: ignore[method-assign]
        remove(name, deletion)
        self.accounts[name] = Account(name=name, created="")
        delete(self, name)
        del self.accounts[name]

    AccountStore.delete = deleted  # type: ignore[method-assign]
    accounts.delete_shop(run)


def believe_the_changes_of_a_dimension(run: Run) -> None:
    """A batch counts as done when its changes are stored."""

    def applied(self: Dimension, *arguments: Any, **named: Any) -> None:
        if not self.changes.has_batch(named["writer"], named["batch_id"]):
            APPLY(self, *arguments, **named)

    Dimension.apply = applied  # type: ignore[method-assign]
    dimension.apply_all(run, kind=2)


def note_a_view_before_its_version(run: Run) -> None:
    """And replace its rows in two versions, the first of which the note names."""

    def noted(view: Any, files: Any, based_on: Any, folder: Path, note: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        note = msgspec.structs.replace(note, version=view.version + 1)
        replace_file(folder / view_flow.FILE, checked_json.encode(note))
        if view.exists:
            view.commit([], remove=list(based_on.files), writer="view", batch_id=None)
        view.commit(files, writer="view", batch_id=None)

    views.commit_view = noted  # type: ignore[attr-defined, assignment]
    views.refresh_often(run)


def start_over_without_a_note(run: Run) -> None:
    def reset_at_once(data: Path, checkpoints: Path, reset: Any) -> None:
        for name in sorted(reset.checkpoints):
            shutil.rmtree(checkpoints / name)
        for name in sorted(reset.tables):
            table = open_table(data, name)
            table.commit([], remove=list(table.state.files), writer="reset", batch_id=None)

    changes.start_over = reset_at_once  # type: ignore[attr-defined]
    resets.start_over(run)


def call_a_backup_whole_before_its_journal(run: Run) -> None:
    journal_of, end = backup._Copy.journal, backup._Copy.end

    def early(self: Any) -> None:
        replace_file(self._target / backup.NOTE, (self._data / backup.NOTE).read_bytes())
        layout.unfinished_copy_path(self._target).unlink()
        journal_of(self)

    def late(self: Any) -> None:
        layout.unfinished_copy_path(self._target).touch()
        end(self)

    backup._Copy.journal, backup._Copy.end = early, late  # type: ignore[method-assign]
    backups.make_backup(run)


def copy_topics_before_their_note(run: Run) -> None:
    FilesTarget.begin = nothing  # type: ignore[method-assign]
    moving.copy(run)


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
    (
        *(place_blobs_without_folder_fsync, blobs.look, blobs.with_topics),
        *(blobs.publish, blobs.check),
    ),
    (
        *(make_a_version_before_its_links, exposed_topics.look, exposed_topics.exposed_once),
        *(exposed_topics.hand_over_and_seal, exposed_topics.check_follows),
    ),
    (
        *(remove_the_account_before_the_grants, accounts.look_at_accounts),
        *(accounts.with_accounts, accounts.delete_shop, accounts.check_deleted),
    ),
    (
        *(believe_the_changes_of_a_dimension, partial(dimension.look, kind=2), None),
        *(believe_the_changes_of_a_dimension, partial(dimension.check_batches, kind=2)),
    ),
    (
        *(note_a_view_before_its_version, views.look, None),
        *(views.refresh_often, views.check_note),
    ),
    (
        *(start_over_without_a_note, resets.look, resets.filled),
        *(resets.start_over, resets.check_together),
    ),
    (
        *(call_a_backup_whole_before_its_journal, backups.look_at_backup, backups.fill),
        *(backups.make_backup, backups.check_backup),
    ),
    (
        *(copy_topics_before_their_note, moving.look, moving.prepare),
        *(moving.copy_again, moving.check_copy),
    ),
]
# Their folder is not a bus's, or has only a part of it.
UNVERIFIED = (
    *(upload_without_fsync, commit_files_without_fsync, believe_the_changes_of_a_dimension),
    *(note_a_view_before_its_version, start_over_without_a_note),
    *(call_a_backup_whole_before_its_journal, copy_topics_before_their_note),
)
# The order alone is wrong, so that it takes no power cut to see it.
FOUND_BY_KILLS = (
    *(remove_the_account_before_the_grants, believe_the_changes_of_a_dimension),
    *(note_a_view_before_its_version, start_over_without_a_note),
    *(call_a_backup_whole_before_its_journal, copy_topics_before_their_note),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_a_wrong_order_in_the_bus_is_caught(case: Case) -> None:
    work, look, start, proceed, check = case
    verified = work not in UNVERIFIED
    ends: tuple[End, ...] = ("kill",) if work in FOUND_BY_KILLS else ENDS
    with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
        for crash in crashes(
            work, look, start=start, proceed=proceed, ends=ends, verified=verified
        ):
            check(crash)
    # Not the work itself, which comes to its end.
    assert "at write 0" not in str(caught.value)
