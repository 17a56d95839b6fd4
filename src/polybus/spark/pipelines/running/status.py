"""The last known state of the pipelines of a data folder: DATA/pipeline/status.json.

`polybus pipeline run` and the driver of `polybus up` write it each second and at their end, so that
`polybus pipeline status` has an answer when nothing runs: how far every flow came, and why it
stopped.
"""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import Any

import msgspec

FILE = "status.json"


def write_status(data: Path, state: str, flows: list[dict[str, Any]], problems: list[str]) -> None:
    """Put the state in the place of the last one, if the disk has room for it."""
    status = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "state": state,
        "flows": flows,
        "problems": problems,
    }
    folder = data / "pipeline"
    # A full disk is for the flows to tell of, and no reason to end a run.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # Whole or not there, but not fsynced each second: after a power cut it is not worth much.
        fresh = folder / f"{FILE}.tmp"
        fresh.write_bytes(msgspec.json.encode(status))
        fresh.rename(folder / FILE)


def read_status(data: Path) -> dict[str, Any] | None:
    """The last written state; None if nothing ever ran here."""
    try:
        content = (data / "pipeline" / FILE).read_bytes()
        return msgspec.json.decode(content, type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
