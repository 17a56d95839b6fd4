"""A crash at any moment leaves the version before or the one after, and each batch once."""

from __future__ import annotations

import errno
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from warm_kit import WARM

from polybus.errors import StorageError
from polybus.lake.compact import compact, vacuum
from polybus.lake.table import LakeTable
from polybus.testing.faulty_disk import FaultyDisk

BATCH_ROWS = 3


def batch_rows(batch: int) -> pa.Table:
    return pa.table({"offset": [batch * BATCH_ROWS + index for index in range(BATCH_ROWS)]})


def check_whole(table: LakeTable) -> int:
    """Every batch is there once up to the last, and no other row; the number of batches."""
    last = table.last_batch("w")
    batches = 0 if last is None else last + 1
    found = sorted(table.read().column("offset").to_pylist()) if table.exists else []
    assert found == list(range(batches * BATCH_ROWS))
    return batches


@pytest.mark.parametrize("seed", range(25))
def test_a_power_cut_at_any_moment_leaves_the_old_version_or_the_new(
    seed: int, tmp_path: Path
) -> None:
    path = tmp_path / "silver"
    draw = random.Random(seed)
    promised = batch = 0
    for _ in range(6):
        disk = FaultyDisk(seed=draw.randrange(1 << 30))
        disk.cut_power_after(draw.randrange(1, 120))
        table = LakeTable(path, disk=disk)
        try:
            for batch in range(promised, promised + 30):
                table.append(batch_rows(batch), writer="w", batch_id=batch)
                promised = batch + 1
                if draw.random() < 0.2:
                    compact(table)
        except StorageError:
            pass
        disk.crash()
        found = check_whole(LakeTable(path))
        assert found in (promised, batch + 1)
        promised = found
    assert promised > 0


WRITER = (
    WARM
    + """
import sys
from array import array
from pathlib import Path
import pyarrow as pa
from polybus.lake.compact import compact
from polybus.lake.table import LakeTable

def rows(first):
    # Of a list pyarrow would make an array only after loading pandas, which takes a second.
    content = pa.py_buffer(array("q", range(first, first + 3)))
    return pa.table([pa.Array.from_buffers(pa.int64(), 3, [None, content])], names=["offset"])

table = LakeTable(Path(sys.argv[1]))
last = table.last_batch("w")
batch = 0 if last is None else last + 1
# The first commit of a process loads libraries: it would get all the kills.
LakeTable(Path(sys.argv[1] + "-warm")).append(rows(0), writer="w", batch_id=None)
print(flush=True)
while True:
    # Like Spark after a failure, which cannot know whether its last batch was taken.
    for number in (max(0, batch - 1), batch):
        table.append(rows(number * 3), writer="w", batch_id=number)
    print(batch, flush=True)
    if batch % 10 == 0:
        compact(table)
    batch += 1
"""
)


@pytest.mark.slow
def test_a_writer_killed_at_random_moments_adds_each_batch_exactly_once(tmp_path: Path) -> None:
    path = tmp_path / "silver"
    draw = random.Random(5)
    told = -1
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(draw.randrange(1, 6))]
            time.sleep(draw.uniform(0.0, 0.02))  # The moment is what is drawn, not waited for.
            process.send_signal(signal.SIGKILL)
            lines = b"".join([*lines, process.stdout.read()]).split()
        told = max([told, *map(int, lines)])
        assert check_whole(LakeTable(path)) >= told + 1
    assert told > 10
    table = LakeTable(path)
    compact(table)
    vacuum(table, grace_s=-1)
    assert {str(one.relative_to(path)) for one in path.glob("*.parquet")} == set(table.state.files)
    check_whole(table)


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_a_failing_disk_refuses_the_batch_and_takes_it_later(
    operation: str, tmp_path: Path
) -> None:
    disk = FaultyDisk(seed=1)
    table = LakeTable(tmp_path / "silver", disk=disk)
    table.append(batch_rows(0), writer="w", batch_id=0)
    disk.fail(operation, errno.ENOSPC)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match=r"lake\.storage: table silver: cannot commit"):
        table.append(batch_rows(1), writer="w", batch_id=1)
    assert check_whole(LakeTable(tmp_path / "silver")) == 1
    disk.heal()
    table.append(batch_rows(1), writer="w", batch_id=1)
    assert check_whole(LakeTable(tmp_path / "silver")) == 2
