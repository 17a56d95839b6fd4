"""Modes of a data folder: a start that is killed before any of them is corrected begins again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from polybus.log import file_modes

FILES = ("admin.token", "polybus.json", "journal/1.arrows", "accounts/default/topics/a/topic.json")


class Crash(BaseException):
    """The process dies."""


class Modes:
    """Stands for `os.chmod` and `os.sync`; dies before the change of a number."""

    def __init__(self, patched: pytest.MonkeyPatch, crash_at: int | None) -> None:
        self._crash_at = crash_at
        self.changes: list[str] = []
        chmod = os.chmod
        patched.setattr(os, "chmod", self._around(chmod))
        patched.setattr(os, "sync", self._around(lambda what: None))

    def _around(self, change: Any) -> Any:
        def crashing(path: Any = "sync", *arguments: Any, **options: Any) -> None:
            if len(self.changes) == self._crash_at:
                raise Crash
            self.changes.append(str(path))
            change(path, *arguments, **options)

        return crashing


def open_to_all(data: Path) -> None:
    for name in FILES:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).touch()
    for path in (data, *data.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


def modes(data: Path) -> set[str]:
    return {
        f"{'folder' if path.is_dir() else 'file'} {path.stat().st_mode & 0o777:o}"
        for path in (data, *data.rglob("*"))
    }


def test_modes_are_corrected_whenever_the_start_before_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    position = 0
    while True:
        data = tmp_path / str(position)
        open_to_all(data)
        with monkeypatch.context() as patched:
            started = Modes(patched, position)
            try:
                file_modes.prepare(data, group=False)
                break
            except Crash:
                pass
        file_modes.prepare(data, group=False)
        assert modes(data) == {"folder 700", "file 600"}, started.changes
        position += 1
    everything = [str(path) for path in (data, *data.rglob("*"))]
    assert sorted(started.changes) == sorted(["sync", *everything])
    assert started.changes[-2:] == ["sync", str(data)], "nothing is left when DATA says so"
