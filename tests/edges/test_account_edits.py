"""Edits of the file of an account are recorded, and so is a change that nobody made."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from commit_kit import values_of
from edge_kit import until

from polybus.cli.accounts import accounts as accounts_command
from polybus.edges.node import Node
from polybus.errors import StorageError
from polybus.services import audit
from polybus.services.accounts import accounts as service
from polybus.services.accounts import edits
from polybus.services.checking import verify
from polybus.testing import run_bus


@pytest.fixture(autouse=True)
def sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SWEEP_S", 0.02)


def told(node: Node) -> list[tuple[str, str]]:
    """The edits in `$audit`: the account, and the file."""
    entries = map(json.loads, values_of(node.bus.log, "$audit"))
    return [(one["target"], one["peer"]) for one in entries if one["action"] == edits.ACTION]


def config_of(data: Path) -> Path:
    return data / "accounts" / "shop" / "config.toml"


def edit(data: Path, topics_max: int) -> None:
    """At once, as an editor does: the bus must not meet half of it."""
    new = config_of(data).with_name("new")
    new.write_text(f"[limits]\ntopics-max = {topics_max}\n")
    new.rename(config_of(data))


def flip(path: Path) -> None:
    """A digit changes, as in a file on a failing disk: its time and size do not."""
    status = path.stat()
    path.write_text(path.read_text().replace("50", "51"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def shown(data: Path) -> str:
    ended = CliRunner().invoke(accounts_command, ["show", "shop", "--data", str(data)])
    assert ended.exit_code == 0, ended.output
    return ended.output


async def make(data: Path) -> None:
    async with run_bus(data=str(data)) as node:
        await node.accounts.create("shop")
        assert told(node) == []
        edit(data, 50)
        await until(lambda: (config_of(data).parent / "config-seen.json").exists())
        assert told(node) == [("shop", "config.toml")]


async def test_an_edit_is_recorded_once(tmp_path: Path) -> None:
    await make(tmp_path)
    async with run_bus(data=str(tmp_path)) as node:
        await until(lambda: node.accounts.configs.limits["shop"].topics_max == 50)
        edit(tmp_path, 7)
        await until(lambda: len(told(node)) == 2)
        await until(lambda: edits.unused_edit(tmp_path, "shop") is None)
    assert verify(tmp_path).notes == []
    assert "config    config.toml, of 20" in shown(tmp_path)


async def test_a_change_that_nobody_made_is_seen(tmp_path: Path) -> None:
    await make(tmp_path)
    flip(config_of(tmp_path))
    report = verify(tmp_path)
    assert report.intact, "it may be an edit"
    (note,) = report.notes
    assert str(config_of(tmp_path)) in note and "if no person changed it, it is damaged" in note
    assert "config    changed at 20" in shown(tmp_path)
    async with run_bus(data=str(tmp_path)) as node:
        await until(lambda: len(told(node)) == 2)
        assert node.accounts.configs.limits["shop"].topics_max == 51


async def test_a_removed_file_is_recorded(tmp_path: Path) -> None:
    await make(tmp_path)
    config_of(tmp_path).unlink()
    assert "removed, and not used by the bus yet" in shown(tmp_path)
    for _ in range(2):
        async with run_bus(data=str(tmp_path)) as node:
            await until(lambda: told(node)[1:] == [("shop", "")])
    assert "config" not in shown(tmp_path)


@pytest.mark.parametrize("what", ["file", "folder"])
async def test_a_file_that_cannot_be_read_is_not_a_removed_one(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its account keeps its settings; the problem is reported once, until the file is back."""
    await make(tmp_path)
    lost = config_of(tmp_path) if what == "file" else config_of(tmp_path).parent
    aside = tmp_path / "aside"
    async with run_bus(data=str(tmp_path)) as node:
        configs = node.accounts.configs
        await until(lambda: configs.limits["shop"].topics_max == 50)
        lost.rename(aside)
        lost.symlink_to(lost)  # Opening it fails with ELOOP, for root too.
        await until(lambda: "shop" in configs.problems)
        with pytest.raises(StorageError, match=r"log\.failed"):
            edits.found_config(tmp_path, "shop")
        swept = node.accounts._sweeps
        await until(lambda: node.accounts._sweeps > swept + 3)
        assert configs.limits["shop"].topics_max == 50
        (error,) = [one.getMessage() for one in caplog.records if one.name == "polybus.accounts"]
        assert "cannot read" in error and "log.failed" in error
        lost.unlink()
        aside.rename(lost)
        await until(lambda: "shop" not in configs.problems)
        assert configs.limits["shop"].topics_max == 50
        assert told(node) == [("shop", "config.toml")]


async def test_a_check_says_that_the_file_cannot_be_read(tmp_path: Path) -> None:
    await make(tmp_path)
    config_of(tmp_path).unlink()
    config_of(tmp_path).symlink_to(config_of(tmp_path))
    (note,) = verify(tmp_path).notes
    assert f"cannot read {config_of(tmp_path)}" in note
    assert "config    cannot read" in shown(tmp_path)


@pytest.mark.parametrize("end", ["before", "after"])
async def test_an_edit_that_was_not_noted_is_recorded_by_the_next_start(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`before` its message in `$audit`, or `after` it and before the note."""
    real = audit.AuditLog.record
    failed: list[object] = []

    async def fail(self: audit.AuditLog, *entry: object) -> None:
        if end == "after":
            await real(self, *entry)  # type: ignore[arg-type]
        failed.append(entry)
        raise StorageError("log.failed", "the disk failed")

    async with run_bus(data=str(tmp_path)) as node:
        await node.accounts.create("shop")
        with monkeypatch.context() as patch:
            patch.setattr(node.accounts.edits, "record", fail.__get__(node.http.audit))
            edit(tmp_path, 50)
            await until(lambda: failed)
    async with run_bus(data=str(tmp_path)) as node:
        await until(lambda: len(told(node)) == 1 + (end == "after"))
        await until(lambda: edits.seen_config(tmp_path, "shop") is not None)
