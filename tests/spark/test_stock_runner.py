"""Spark's own runner accepts the example files unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spark_kit import environment, running_bus

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "pipelines"


@pytest.mark.parametrize("name", ["telemetry"])  # Most of the API is in this one; 25 s each.
def test_an_example_passes_a_dry_run_of_sparks_own_runner(name: str, tmp_path: Path) -> None:
    with running_bus(tmp_path, ["telemetry", "device.alerts"]) as bus:
        shutil.copytree(EXAMPLES / name, tmp_path / name)
        tools = Path(sys.executable).parent
        done = subprocess.run(
            [tools / "spark-pipelines", "dry-run"],
            cwd=tmp_path / name,
            env=environment(
                POLYBUS_DATA=str(bus.data),
                PATH=f"{tools}:{os.environ['PATH']}",
                SPARK_LOCAL_IP="127.0.0.1",
                # As quick_java.py, for the processes of Java that we do not start ourselves.
                JDK_JAVA_OPTIONS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            ),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert "Run is COMPLETED" in done.stderr + done.stdout, done.stderr[-4000:]
