"""Stands for the pipeline's driver: speaks its protocol, has no Spark, and dies when told to.

The file `fake.json` in the data folder says how to behave; `fake.log` says what happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

data = Path(sys.argv[sys.argv.index("--data") + 1])


def say(**event: Any) -> None:
    write(json.dumps(event))


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    with (data / "fake.log").open("a") as file:
        file.write(text + "\n")


def ended(number: int, frame: FrameType | None) -> None:
    note(f"end bus={'there' if (data / 'run.json').exists() else 'gone'}")
    sys.exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, ended)
    behaviour = json.loads((data / "fake.json").read_text())
    note(f"start {os.getpid()} {' '.join(sys.argv[1:])}")
    starts = (data / "fake.log").read_text().count("start ")
    say(event="starting", text="starting the fake")
    if behaviour.get("refuse"):
        sys.stderr.write("the fake refuses\n")
        sys.exit(3)
    say(event="ready", seconds=0.1)
    flow = {"pipeline": "fake", "flow": "silver", "state": "running", "rows": 7, "lag": 3}
    write("this is not JSON")
    say(event="progress", flows=[flow | {"rows_per_s": 1.0, "batch_ms": 5, "error": None}])
    for event in behaviour.get("says", []):
        say(**event)
    if starts <= behaviour.get("crashes", 0):
        sys.stderr.write("the fake crashes\n")
        time.sleep(0.1)
        os._exit(9)
    sys.stdin.read()
    note("end stdin")


main()
