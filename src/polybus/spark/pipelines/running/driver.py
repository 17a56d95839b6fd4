"""The pipeline as a process: the standard flows and the user's own, until it is stopped.

    python -m polybus.spark.pipelines.running.driver --data DIR [--pipelines DIR] …

Standard output has the events of `supervisor`, one JSON object per line. SIGTERM, SIGINT, the verb
`stop` on the socket and the end of standard input stop it.
"""

import argparse
import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from polybus.errors import PolybusError
from polybus.spark.pipelines.running.supervisor import PipelineOptions, Supervisor
from polybus.spark.pipelines.sessions import MASTER, MEMORY

TOKEN_VARIABLE = "POLYBUS_TOKEN"
"""For a bus on another machine (--url), whose token is not in the data folder."""


def parse(arguments: list[str] | None) -> PipelineOptions:
    parser = argparse.ArgumentParser(
        prog="python -m polybus.spark.pipelines.running.driver", description=__doc__
    )
    parser.add_argument("--data", type=Path, required=True, help="data folder of the bus")
    parser.add_argument("--url", help="the bus, if it is on another machine: http://host:port")
    parser.add_argument("--master", default=MASTER, help="Spark master, or sc://host:port")
    parser.add_argument("--memory", default=MEMORY, help="heap of the Java process")
    parser.add_argument("--pipelines", type=Path, help="folder of the user's pipelines")
    parser.add_argument("--once", action="store_true", help="one pass over the log, then end")
    parser.add_argument("--no-standard", action="store_true", help="only the user's pipelines")
    given = vars(parser.parse_args(arguments))
    is_standard = not given.pop("no_standard")
    goes_on = not given.pop("once")
    token = os.environ.get(TOKEN_VARIABLE) or None
    return PipelineOptions(
        **given, standard=is_standard, token=token, continuous=goes_on, until_stopped=goes_on
    )


def stop_with_input(stop: Callable[[], None]) -> None:
    """Stop when the parent process has ended, if standard input is a pipe from it."""
    kind = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop()

    threading.Thread(target=watch, name="polybus-stdin", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    lines = os.fdopen(os.dup(1), "wb", buffering=0)
    # What Spark or a user's file prints must not come between the events.
    os.dup2(2, 1)
    writing = threading.Lock()

    def say(event: dict[str, Any]) -> None:
        with writing, contextlib.suppress(BrokenPipeError):
            lines.write(msgspec.json.encode(event) + b"\n")

    supervisor = Supervisor(options, say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.stop())
    stop_with_input(supervisor.stop)
    try:
        supervisor.run()
    except PolybusError as error:
        say({"event": "failed", "code": error.code, "text": error.text})
        return 1
    except Exception as error:
        # The parent process reads the event; the traceback goes to standard error.
        say({"event": "failed", "text": f"{type(error).__name__}: {error}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
