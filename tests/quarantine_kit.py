"""Dead letters, put where the pipeline puts them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from polybus.lake.table import open_table


def quarantine(
    data: Path,
    topic: str,
    values: list[bytes],
    reason: str | list[str],
    *,
    first: int = 0,
    key: bytes | None = None,
    headers: dict[str, bytes] | None = None,
) -> None:
    """`reason` may be one for each."""
    count = len(values)
    rows = pa.table(
        {
            "topic": [topic] * count,
            "epoch": [1] * count,
            "offset": list(range(first, first + count)),
            "timestamp": pa.array([1_700_000_000_000_000] * count, pa.timestamp("us", "UTC")),
            "protocol": ["goms"] * count,
            "sender": ["10.0.0.5:999"] * count,
            "key": pa.array([key] * count, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array([headers] * count, pa.map_(pa.string(), pa.binary())),
            "reason": [reason] * count if isinstance(reason, str) else reason,
            "cut": [False] * count,
        }
    )
    open_table(data, "quarantine").append(rows, writer="test", batch_id=None)
