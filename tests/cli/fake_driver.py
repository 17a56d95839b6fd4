"""Stands for the pipeline's driver: speaks its protocol, has no Spark, and dies when told to.

The file `fake.json` in the data folder says how to behave; `fake.log` says what happened. With
`socket` it has the lock, the status and the socket of a driver, and ends when it is asked to there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from polybus.processes import new_scratch
from polybus.spark.pipelines.running import service

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


def end_with_input(stop: threading.Event) -> None:
    # Not sys.stdin: a thread in its read holds a lock that the end of the process needs.
    while os.read(0, 4096):
        pass
    stop.set()


def serve(flow: dict[str, Any]) -> None:
    """Run until the socket or the parent says to stop, and end as a driver does."""
    stop = threading.Event()
    given = dict(zip(sys.argv, sys.argv[1:], strict=False))
    about = {"master": given.get("--master", ""), "pipelines": given.get("--pipelines", "")}
    with service.only_one(data):
        server = service.Service(data, stop=stop.set, run_sql=lambda *_: sys.exit("no SQL"))
        service.write_status(data, "running", flows=[flow], **about)
        threading.Thread(target=end_with_input, args=(stop,), daemon=True).start()
        stop.wait()
        service.write_status(data, "stopped", flows=[flow], **about)
        server.stop()
        # As long as Spark takes to end: the lock is still held.
        time.sleep(0.5)
    note("stopped")


def main() -> None:
    signal.signal(signal.SIGTERM, ended)
    behaviour = json.loads((data / "fake.json").read_text())
    note(f"start {os.getpid()} {' '.join(sys.argv[1:])}")
    starts = (data / "fake.log").read_text().count("start ")
    say(event="starting", text="starting the fake")
    if behaviour.get("refuse"):
        sys.stderr.write("the fake refuses\n")
        sys.exit(3)
    if behaviour.get("deaf"):
        # As a driver in the middle of Spark's start.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        new_scratch("spark")
        note("deaf")
        time.sleep(60)
    say(event="ready", seconds=0.1)
    flow = {"pipeline": "fake", "flow": "silver", "state": "running", "rows": 7, "lag": 3}
    write("this is not JSON")
    say(event="progress", flows=[flow | {"rows_per_s": 1.0, "batch_ms": 5, "error": None}])
    for event in behaviour.get("says", []):
        say(**event)
    for line in behaviour.get("complains", []):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    if behaviour.get("socket"):
        serve(flow | {"lag": starts})
        return
    if starts <= behaviour.get("crashes", 0):
        sys.stderr.write("the fake crashes\n")
        time.sleep(0.1)
        os._exit(9)
    sys.stdin.read()
    note("end stdin")


main()
