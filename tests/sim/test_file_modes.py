"""Who may open the files of a data folder: every file and folder that a real bus leaves."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from sim_kit import served

from polybus.errors import StorageError
from polybus.log import file_modes
from polybus.testing import ScriptedPeer


def wrong_modes(data: Path, *, folder: int, file: int) -> list[str]:
    """Every path with another mode. Sockets and the token are always for the owner alone."""
    wrong = []
    for path in [data, *data.rglob("*")]:
        mode = path.stat().st_mode
        owner_only = stat.S_ISSOCK(mode) or path.name == "admin.token"
        wanted = folder if path.is_dir() else 0o600 if owner_only else file
        if mode & 0o777 != wanted:
            wrong.append(f"{path.relative_to(data)} {mode & 0o777:o}")
    return wrong


def has_history(data: Path) -> bool:
    return any(data.rglob("*.parquet"))


async def run_a_bus(data: Path) -> None:
    """Everything writes: journal, state, staging, a hand-over."""
    config = data.with_suffix(".toml")
    config.write_text(
        "[journal]\nsegment-age-s = 0.05\nhandover-interval-s = 0.2\n[[topics]]\nname = 'red'\n"
    )
    before = os.umask(0o022)
    try:
        async with served(data, "--config", str(config)) as bus:
            async with ScriptedPeer(bus.port) as peer:
                number = 0
                while not has_history(data):
                    await peer.send_frame(f"red?receipt={number}", b"x")
                    await peer.read_frame()
                    number += 1
                    await asyncio.sleep(0.05)
            assert await bus.terminate() == 0
    finally:
        os.umask(before)


@pytest.mark.slow
async def test_every_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    await run_a_bus(data)
    assert wrong_modes(data, folder=0o700, file=0o600) == []


def test_a_start_leaves_the_files_of_others_as_they_are(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "project").mkdir(mode=0o755)
    (tmp_path / "project" / "run").touch(mode=0o755)
    before = [path.stat().st_mode for path in sorted(tmp_path.rglob("*"))]
    (tmp_path / "journal").mkdir(mode=0o755)
    file_modes.prepare(tmp_path, group=False)
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    (tmp_path / "journal").rmdir()
    assert [path.stat().st_mode for path in sorted(tmp_path.rglob("*"))] == before


async def test_an_old_folder_is_corrected_at_the_start_and_group_access_keeps_the_umask(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    (data / "journal").mkdir(parents=True)
    (data / "journal" / "note").touch()
    os.chmod(data / "journal" / "note", 0o644)
    for path in (data / "journal", data):
        path.chmod(0o755)
    file_modes.prepare(data, group=False)
    assert wrong_modes(data, folder=0o700, file=0o600) == []
    for umask, folder, file in (
        (0o022, 0o750, 0o640),
        (0o002, 0o770, 0o660),
        (0o077, 0o700, 0o600),
    ):
        before = os.umask(umask)
        try:
            file_modes.prepare(data, group=True)
        finally:
            os.umask(before)
        assert wrong_modes(data, folder=folder, file=file) == []


async def test_a_socket_folder_of_others_is_refused(tmp_path: Path) -> None:
    """One that is a link, or that others can write to, may be a trap."""
    good = tmp_path / "good"
    file_modes.prepare_socket_folder(good / "a.sock")
    assert good.stat().st_mode & 0o777 == 0o700
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(good)
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(foreign, 12345, 12345)
    folders = [open_to_all, link, *([foreign] if os.getuid() == 0 else [])]
    for folder in folders:
        with pytest.raises(StorageError) as refused:
            file_modes.prepare_socket_folder(folder / "a.sock")
        assert refused.value.code == "admin.socket-folder"
