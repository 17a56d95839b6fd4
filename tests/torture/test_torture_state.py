"""Saves of state.db whose fsync fails, below SQLite."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polybus.services.state_rows import verify_state
from polybus.torture.bus.control import SYNC, Shim

pytestmark = pytest.mark.slow

SAVES = """
import asyncio, os, sys
from pathlib import Path
from polybus.errors import StorageError
from polybus.services.state import StateDb
from polybus.services.state_rows import summed

async def main():
    state = StateDb(Path(sys.argv[1]), fsync=True)
    await state.open()
    print("opened", flush=True)
    for line in sys.stdin:
        rows = [summed(f"c{number}", os.urandom(4000)) for number in range(int(line))]
        try:
            await state.write([("INSERT OR REPLACE INTO consumers VALUES (?, ?, ?)", rows)])
            print("saved", flush=True)
        except StorageError:
            print("failed", flush=True)
    os._exit(0)

asyncio.run(main())
"""


def test_saves_that_failed_are_no_damage_after_a_kill(tmp_path: Path) -> None:
    """A smaller save after them leaves their ends in the write-ahead log."""
    shim = Shim(tmp_path)
    shim.root.mkdir()
    bus = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(shim.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | shim.environment,
    )
    assert bus.stdin is not None and bus.stdout is not None
    with bus:
        assert bus.stdout.readline() == "opened\n"
        for rows, is_failing in ((1, False), (40, True), (20, True), (1, False)):
            if is_failing:
                shim.fail(errno.EIO, SYNC, "state.db-wal", count=1)
            bus.stdin.write(f"{rows}\n")
            bus.stdin.flush()
            assert bus.stdout.readline() == ("failed\n" if is_failing else "saved\n")
            shim.heal()
        bus.kill()
    assert verify_state(shim.root) == []
