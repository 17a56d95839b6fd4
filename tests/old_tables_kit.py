"""Tables that version 0.1.0 wrote before its tables were Delta tables."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent / "lake" / "old_tables.tar.gz"
PAYLOADS = [{"a": [number, 2.5, None], "b": "x y"} for number in range(6)]
"""The VARIANT column of `silver`, in the order of `offset`; Spark wrote three batches of two."""
BY_TOPIC = [("", 2), ("a/b c", 1), ("a/b c", 3), ("x", 4)]
"""The rows of `by topic`, which has partitions: topic and n."""


def lay_out_old_tables(data: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(data, filter="data")
