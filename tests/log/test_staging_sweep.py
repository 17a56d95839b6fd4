"""Sweeping what was staged, while those who staged it continue."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from polybus.services.transactions import staging


def stage(data: Path, producer: str) -> Path:
    path = staging.staging_folder(data) / producer / "0-abcdefgh.arrows"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"1234")
    return path


def staged_in(data: Path) -> tuple[int, int]:
    sizes, files = staging.staged(data)
    return sizes.total(), files.total()


def test_old_files_go_and_those_that_are_wanted_stay(tmp_path: Path) -> None:
    gone, kept = stage(tmp_path, "gone"), stage(tmp_path, "kept")
    now_s = gone.stat().st_mtime + 100
    assert staged_in(tmp_path) == (8, 2)
    assert staging.sweep(tmp_path, older_than_s=1000, now_s=now_s) == 0
    assert staging.sweep(tmp_path, older_than_s=10, now_s=now_s, keep=[kept]) == 1
    assert kept.exists() and not gone.parent.exists()
    assert staged_in(tmp_path) == (4, 1)


@pytest.mark.parametrize(
    "look", [staging.staged, lambda data: staging.sweep(data, older_than_s=1e9, now_s=0)]
)
def test_folders_that_come_and_go_meanwhile_stop_nobody(tmp_path: Path, look: object) -> None:
    assert callable(look)
    stop = threading.Event()

    def others() -> None:
        number = 0
        while not stop.is_set():
            # An empty folder may be swept just now: whoever stages makes it again.
            with contextlib.suppress(FileNotFoundError):
                staging.discard(stage(tmp_path, f"p{number % 50}"))
            number += 1

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(2000):
            look(tmp_path)
    finally:
        stop.set()
        thread.join()
