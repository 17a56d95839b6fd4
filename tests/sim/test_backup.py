"""Backups of a running bus under load, with hand-overs all the time, and the way back."""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from log_kit import opened_log
from sim_kit import FramesPublisher, GomsPublisher, Publisher, check, served, stored
from topics_kit import DAY_US, NOON_US, hand_over, publish

from polybus.cli.backup import backup
from polybus.cli.restore import restore
from polybus.errors import StorageError, UsageError
from polybus.log.disk import FileLock
from polybus.log.verify.verify import verify
from polybus.services import backup as backups
from polybus.testing import run_bus

CONFIG = """
topics = ["red", "blue"]
[journal]
segment-age-s = 0.05
handover-interval-s = 0.1
"""


async def polybus(*arguments: str) -> tuple[int, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("POLYBUS_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polybus.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=clean,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, said.decode()


def wait_for_history(data: Path) -> None:
    deadline = time.monotonic() + 20
    while not any(data.rglob("*.parquet")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def linked(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_nlink > 1]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than `tmp_path`."""
    others = [one for one in ("/dev/shm", "/tmp", "/var/tmp") if os.path.isdir(one)]
    here = tmp_path.stat().st_dev
    other = next((one for one in others if os.stat(one).st_dev != here), None)
    assert other is not None, f"no other file system than that of {tmp_path} among {others}"
    with tempfile.TemporaryDirectory(dir=other) as folder:
        yield Path(folder)


@pytest.mark.slow
async def test_backups_under_load_have_every_receipted_message_once(
    tmp_path: Path, elsewhere: Path
) -> None:
    config = tmp_path / "polybus.toml"
    config.write_text(CONFIG)
    data = tmp_path / "data"
    publishers: list[Publisher] = [FramesPublisher("frames"), GomsPublisher("goms")]
    known: list[list[Publisher]] = []
    async with served(data, "--config", str(config)) as bus:
        load = [asyncio.create_task(one.run(bus.port)) for one in publishers]
        await asyncio.to_thread(wait_for_history, data)
        for number in range(2):
            receipted = [dict(one.receipts) for one in publishers]
            folder, base = str(elsewhere / f"{number}"), str(elsewhere)
            code, said = await polybus("backup", folder, "--base", base, "--data", str(data))
            assert code == 0, said
            assert ("everything is new" in said) == (number == 0)
            known.append([copy.copy(one) for one in publishers])
            for one, receipts in zip(known[-1], receipted, strict=True):
                one.receipts = receipts
        assert await bus.terminate() == 0
        await asyncio.gather(*load)
    assert linked(elsewhere / "1")
    for number, expected in enumerate(known):
        assert all(one.receipts for one in expected)
        restored, made = tmp_path / f"restored-{number}", elsewhere / f"{number}"
        code, said = await polybus("restore", str(made), "--data", str(restored))
        assert code == 0, said
        assert not linked(restored)
        check(expected, stored(restored))
        # The next one is whole without it.
        shutil.rmtree(made)


def files_in(folder: Path) -> dict[str, os.stat_result]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat() for path in found}


def with_history(data: Path) -> None:
    """A message in history, another in the journal."""
    publish(data, "a", [b"1"])
    hand_over(data)
    publish(data, "a", [b"2"])


def test_a_backup_on_a_base_takes_only_what_is_new(tmp_path: Path, elsewhere: Path) -> None:
    data, old, new = tmp_path / "data", elsewhere / "old", elsewhere / "new"
    publish(data, "a", [b"1"], timestamp_us=NOON_US)
    hand_over(data)
    publish(data, "a", [b"2"], timestamp_us=NOON_US + DAY_US)
    log = opened_log(data, lambda: NOON_US + DAY_US)
    log.seal()
    log.close()
    backups.backup(data, old)
    assert not linked(old)
    publish(data, "a", [b"3"], timestamp_us=NOON_US + DAY_US)
    (elsewhere / "killed").mkdir()
    (elsewhere / "killed" / "unfinished-copy").touch()
    ended = CliRunner().invoke(
        backup, [str(new), "--data", str(data), "--base", str(elsewhere), "--json"]
    )
    assert ended.exit_code == 0, ended.output
    before, after = files_in(old), files_in(new)
    shared = {name for name, status in after.items() if status.st_nlink > 1}
    # History, and the sealed segment; not the segment that is written.
    assert sorted(name.rpartition(".")[2] for name in shared) == ["arrows", "parquet"]
    assert any(name.endswith(".arrows") for name in after.keys() - shared)
    assert all(before[name].st_ino == after[name].st_ino for name in shared)
    said = json.loads(ended.output.splitlines()[-1])
    assert said["linked_files"] == len(shared)
    assert said["linked_bytes"] == sum(after[name].st_size for name in shared)
    # The check of the copy makes files to lock.
    assert 0 < said["copied_files"] < len(after) - len(shared)
    shutil.rmtree(old)
    assert verify(new).intact
    backups.restore(new, tmp_path / "restored")
    values = [value for value, _ in stored(tmp_path / "restored")["a"]]
    assert values == ["1", "2", "3"]


def test_the_base_is_the_newest_whole_backup_of_a_folder(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backups"
    assert backups.find_base(folder) is None
    publish(data, "a", [b"1"])
    # By the end of their copies, and not by their names.
    for number, name in enumerate(["b", "c", "a", "half", "damaged"]):
        backups.backup(data, folder / name)
        os.utime(folder / name / "polybus.json", (number, number))
    (folder / "half/unfinished-copy").touch()
    (folder / "damaged/polybus.json").write_text("{")
    (folder / "notes.txt").touch()
    assert backups.find_base(folder) == folder / "a"
    assert backups.find_base(folder / "b") == folder / "b"


def test_nothing_of_a_damaged_base_gets_into_a_backup(tmp_path: Path, elsewhere: Path) -> None:
    data, old, new = tmp_path / "data", elsewhere / "old", elsewhere / "new"
    with_history(data)
    (data / "tables/silver").mkdir(parents=True)
    for name in ("damaged", "short", "gone", "folder", "link"):
        (data / f"tables/silver/{name}.parquet").write_bytes(name.encode())
    backups.backup(data, old)
    tables = old / "tables/silver"
    (tables / "damaged.parquet").write_bytes(b"DAMAGED")
    (tables / "short.parquet").write_bytes(b"sh")
    (tables / "gone.parquet").unlink()
    (tables / "folder.parquet").unlink()
    (tables / "folder.parquet").mkdir()
    (tables / "link.parquet").rename(elsewhere / "rows")
    (tables / "link.parquet").symlink_to(elsewhere / "rows")
    backups.backup(data, new, base=old)
    assert verify(new).intact
    for name in ("damaged", "short", "gone", "folder", "link"):
        path = new / f"tables/silver/{name}.parquet"
        assert path.read_bytes() == name.encode()
        assert path.stat().st_nlink == 1 and not path.is_symlink()


def test_a_base_may_be_deleted_while_it_is_used(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, old, new = tmp_path / "data", elsewhere / "old", elsewhere / "new"
    with_history(data)
    backups.backup(data, old)
    real = os.link

    def gone(source: Path, target: Path) -> None:
        if source.is_relative_to(old):
            source.unlink()
        real(source, target)

    monkeypatch.setattr(os, "link", gone)
    backups.backup(data, new, base=old)
    assert not linked(new) and verify(new).intact


def test_a_base_is_a_whole_backup_outside_of_the_new_one(tmp_path: Path) -> None:
    data, old = tmp_path / "data", tmp_path / "old"
    with_history(data)
    backups.backup(data, old)
    based = ["--data", str(data), "--base", str(old)]
    inside = CliRunner().invoke(backup, [str(old / "new"), *based])
    assert isinstance(inside.exception, UsageError) and inside.exception.code == "backup.target"
    (old / "unfinished-copy").touch()
    half = CliRunner().invoke(backup, [str(tmp_path / "new"), *based])
    assert isinstance(half.exception, UsageError) and half.exception.code == "backup.incomplete"
    assert not (tmp_path / "new").exists()


async def test_a_backup_has_sessions_the_token_and_topics(tmp_path: Path) -> None:
    data, folder, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"
    async with run_bus("news", data=str(data)) as node:
        key = await node.http.inboxes.create([], ttl_s=600.0, start="latest")
        await asyncio.to_thread(backups.backup, data, folder)
    backups.restore(folder, restored)
    assert (restored / "admin.token").read_bytes() == (data / "admin.token").read_bytes()
    modes = {path.stat().st_mode & 0o077 for path in [restored, *restored.rglob("*")]}
    assert modes == {0}
    async with run_bus(data=str(restored)) as node:
        assert "news" in node.bus.log.topics()
        assert node.http.inboxes.find(key) is not None


async def test_a_name_may_be_that_of_a_file_which_a_backup_leaves_out(tmp_path: Path) -> None:
    data, folder, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"
    topics = {"lock", "run.json", "status.json", "scratch", "_staging", "a.tmp", "topic.json.tmp"}
    topics.add("errors.json")
    async with run_bus(*topics, data=str(data)):
        pass
    for table in topics:
        (data / "tables" / table / "_staging").mkdir(parents=True)
        (data / "tables" / table / "1.parquet").write_bytes(b"rows")
        (data / "tables" / table / "_staging/2.parquet").write_bytes(b"rows")
    backups.backup(data, folder)
    backups.restore(folder, restored)
    assert verify(restored).intact
    assert {path.parent.name for path in restored.glob("tables/*/1.parquet")} == topics
    assert not [*restored.rglob("2.parquet")]
    async with run_bus(data=str(restored)) as node:
        assert topics <= set(node.bus.log.topics())


async def test_what_cannot_be_a_backup_is_refused(tmp_path: Path) -> None:
    data, full = tmp_path / "data", tmp_path / "full"
    async with run_bus("news", data=str(data)):
        pass
    full.mkdir()
    (full / "note").touch()
    for target in (full, data / "inside"):
        assert refusal(backup, target, data) == "backup.target"
    good = tmp_path / "good"
    backups.backup(data, good)
    assert refusal(restore, good, full) == "backup.target"
    (good / "polybus.json").unlink()
    assert refusal(restore, good, tmp_path / "new") == "backup.incomplete"


async def test_a_folder_that_cannot_be_written_is_named_with_a_code_of_backups(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    async with run_bus("news", data=str(data)):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"backup\.storage: cannot create .*file/backup"):
        backups.backup(data, tmp_path / "file" / "backup")


def refusal(verb: click.Command, folder: Path, data: Path) -> str:
    ended = CliRunner().invoke(verb, [str(folder), "--data", str(data)])
    assert isinstance(ended.exception, UsageError), ended.output
    return ended.exception.code


async def test_a_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    async with run_bus("news", data=str(data)):
        pass
    backups.backup(data, folder)
    (folder / "accounts/default/topics/news/manifest.json").write_text("{}")
    code, said = await polybus("restore", str(folder), "--data", str(tmp_path / "new"))
    assert code == 1 and "manifest.json" in said
    assert not (tmp_path / "new").exists()


async def test_tables_wait_for_the_end_of_the_pipeline_or_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with run_bus("news", data=str(data)):
        pass
    (data / "tables/silver").mkdir(parents=True)
    (data / "tables/silver/1.parquet").write_bytes(b"rows")
    with FileLock(data / "pipeline/lock"):
        with pytest.raises(UsageError) as refused:
            backups.backup(data, tmp_path / "1")
        assert refused.value.code == "pipeline.running"
        backups.backup(data, tmp_path / "2", tables=False)
    backups.backup(data, tmp_path / "3")
    assert not (tmp_path / "2/tables").exists()
    assert (tmp_path / "3/tables/silver/1.parquet").read_bytes() == b"rows"
    assert verify(tmp_path / "3").intact


def make_read_only(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the superuser, too, who may write everywhere."""
    real = os.open

    def read_only(path: str | Path, flags: int, *rest: int, **named: int) -> int:
        is_inside = Path(os.fsdecode(path)).is_relative_to(data)
        if is_inside and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **named)

    for path in [data, *data.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    monkeypatch.setattr(os, "open", read_only)


@pytest.mark.parametrize("has_locks", [True, False])
async def test_a_stopped_bus_can_be_copied_from_a_folder_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    data, folder = tmp_path / "data", tmp_path / "backup"
    async with run_bus("news", data=str(data)) as node:
        key = await node.http.inboxes.create(["news"], ttl_s=600.0, start="latest")
    (data / "pipeline/lock").touch()
    backups.backup(data, tmp_path / "first")
    if not has_locks:
        for name in ("lock", "history.lock"):
            (data / name).unlink()
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    with monkeypatch.context() as patch:
        make_read_only(data, patch)
        ended = CliRunner().invoke(backup, [str(folder), "--data", str(data)])
        assert ended.exit_code == 0, ended.output
    for path in [data, *data.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    async with run_bus(data=str(folder)) as node:
        assert "news" in node.bus.log.topics()
        assert node.http.inboxes.find(key) is not None


async def test_a_running_bus_whose_folder_can_only_be_read_is_not_copied_without_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    async with run_bus("news", data=str(data)):
        (data / "history.lock").unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            make_read_only(data, patch)
            with pytest.raises(StorageError, match="run this as the bus's user"):
                await asyncio.to_thread(backups.backup, data, tmp_path / "backup")
        for path in [data, *data.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)
