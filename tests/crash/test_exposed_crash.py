"""A topic's history and its Delta table: the table has the messages of one manifest, each once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from crash_kit import Crash, Run, crashes
from deltalake import DeltaTable
from opened_kit import messages, opened_log
from test_history_crash import DAY_US, five_days, handed_over_once

from polybus.config import Retention
from polybus.log import delta
from polybus.log.disk import Disk
from polybus.log.history import exposed, retention
from polybus.log.history.handover import hand_over
from polybus.log.interface import TopicSettings
from polybus.log.layout import topic_folder


def in_table(data: Path) -> list[str] | None:
    """The values in the topic's table, in order; None without a table."""
    folder = topic_folder(data, "a") / exposed.TABLE
    if not (folder / delta.LOG).is_dir() or not any((folder / delta.LOG).glob("*.json")):
        return None
    rows = DeltaTable(folder).to_pyarrow_table().sort_by("offset")
    return [value.decode() for value in rows["value"].to_pylist()]


def look(data: Path) -> Any:
    """The messages of the topic, the offset up to which history has them, and its table."""
    with opened_log(data) as log:
        history = log.describe("a")["handed-over"]
        return [messages(log, "a"), history, in_table(data)]


def exposed_once(run: Run) -> None:
    handed_over_once(run)
    exposed.expose(run.data, "a")


def hand_over_and_seal(run: Run) -> None:
    with opened_log(run.data) as log:
        log.after_handover(hand_over(run.data, grace_s=0.0))
        log.seal()
        log.after_handover(hand_over(run.data, grace_s=0.0))


def check_follows(crash: Crash) -> None:
    values, handed_over, table = crash.seen
    assert values == ["1", "2", "3", "4"], crash
    assert table is not None and table == values[: len(table)], crash
    assert len(table) in (2, 3, 4) and len(table) <= handed_over, crash
    assert crash.end == [values, 4, values], crash


def test_a_table_follows_the_hand_over_wherever_it_ends() -> None:
    for crash in crashes(hand_over_and_seal, look, start=exposed_once):
        check_follows(crash)


def hand_over_often(run: Run) -> None:
    """Every version has a checkpoint."""
    delta.CHECKPOINT_EVERY = 1
    hand_over_and_seal(run)


def test_a_table_with_checkpoints_follows_the_hand_over_wherever_it_ends() -> None:
    for crash in crashes(hand_over_often, look, start=exposed_once, ends=("cut", "torn")):
        check_follows(crash)


def expose(run: Run) -> None:
    exposed.expose(run.data, "a")
    run.acknowledge("exposed")


def test_an_exposed_topic_has_its_whole_history_in_the_table_or_no_table() -> None:
    for crash in crashes(expose, look, start=handed_over_once):
        assert crash.seen[2] == ["1", "2"] or not (crash.acknowledged or crash.seen[2]), crash
        assert crash.end[2] == ["1", "2"], crash


def exposed_and_copied(run: Run) -> None:
    """The data folder was copied without its hard links."""
    exposed_once(run)
    for path in (topic_folder(run.data, "a") / exposed.TABLE).glob("date=*/*.parquet"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)


def test_no_file_of_a_copied_table_is_missing_while_it_becomes_a_link() -> None:
    for crash in crashes(expose, look, start=exposed_and_copied, ends=("kill", "cut")):
        assert crash.seen[2] == crash.end[2] == ["1", "2"], crash


class _Killed(BaseException):
    """A process ends."""


class _KilledDisk(Disk):
    def sync_folder(self, path: Path) -> None:
        if path.parent.name == exposed.TABLE and path.name.startswith("date="):
            raise _Killed
        super().sync_folder(path)


def expose_after_a_killed_one(run: Run) -> None:
    """The first process has linked a file, and is killed before its fsync."""
    with suppress(_Killed), mock.patch.object(exposed, "Disk", _KilledDisk):
        exposed.expose(run.data, "a")
    expose(run)


def test_a_link_of_a_killed_writer_is_durable_before_a_version_names_it() -> None:
    for crash in crashes(expose_after_a_killed_one, look, start=handed_over_once):
        assert crash.seen[2] == ["1", "2"] or not (crash.acknowledged or crash.seen[2]), crash
        assert crash.end[2] == ["1", "2"], crash


def unexpose(run: Run) -> None:
    exposed.unexpose(run.data, "a")
    run.acknowledge("gone")


def test_a_table_that_is_removed_leaves_the_topic_as_it_is() -> None:
    for crash in crashes(unexpose, look, start=exposed_once):
        assert crash.seen[0] == ["1", "2", "3", "4"], crash
        assert crash.seen[2] is None or not crash.acknowledged, crash
        assert crash.end[2] is None, crash


def five_days_exposed(run: Run) -> None:
    five_days(run)
    exposed.expose(run.data, "a")


def keep_two_days(run: Run) -> None:
    with opened_log(run.data):
        limits = Retention(age_s=2.5 * 86_400)
        retention.apply(run.data, {"a": TopicSettings()}, limits, now_us=5 * DAY_US)


def test_retention_takes_its_files_out_of_the_table_in_one_version() -> None:
    for crash in crashes(keep_two_days, look, start=five_days_exposed):
        assert crash.seen[2] in (["0", "1", "2", "3"], ["2", "3"]), crash
        assert len(crash.seen[2]) >= len(crash.seen[0]) - 1, crash
        assert crash.end[2] == ["2", "3"], crash
