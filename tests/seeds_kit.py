"""Seeds of tests that explore: another one for each state of the source, the same in each run."""

from __future__ import annotations

import subprocess
from pathlib import Path

OTHERWISE = 11


def seed_of_source() -> int:
    """So that each change is tried with other faults, and a run repeats what the last one did."""
    command = ["git", "rev-parse", "HEAD:src"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(done.stdout[:8], 16) if done.returncode == 0 else OTHERWISE
