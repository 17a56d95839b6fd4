"""A log without a bus around it, for tests of every folder that read what was stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from polybus import config
from polybus.log.files import FileLog
from polybus.log.interface import LogCallbacks


def opened_log(
    data: Path, clock_us: Callable[[], int], callbacks: LogCallbacks | None = None
) -> FileLog:
    """Every commit is synced, and nothing is handed over unasked."""
    return FileLog(
        data,
        durability="fsync",
        journal=config.Journal(),
        retention=config.Retention(),
        clock=clock_us,
        callbacks=callbacks,
        maintenance=False,
    )
