"""Starts buses from a process that has imported Polybus already.

`python -m polybus.cli serve` spends most of a second on imports. Here `multiprocessing`'s fork
server imports once, and a bus is a fork of it. Apart from that it is the bus of any other start.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

PRELOADED = ("polybus.torture.campaign", "polybus.cli.serve", "polybus.edges.node", "uvloop")

# Arrow reads this when it is imported: the fork server's has the bus's choice (cli.allocator), too.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(list(PRELOADED))


class WarmProcess:
    """A bus, with as much of `subprocess.Popen` as `BusChild` needs."""

    def __init__(self, config: Path, log: Path) -> None:
        reader, writer = processes.Pipe(duplex=False)
        with reader, writer:
            self._process = processes.Process(
                target=_serve, args=(str(config), str(log), writer, os.getpgrp()), daemon=True
            )
            self._process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()), "rb")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("serve", timeout or 0.0)
        return self._process.exitcode


def _serve(config: str, log: str, ready: Connection, group: int) -> None:
    """Runs in the new process: become `polybus serve`, in the group of whoever asked."""
    os.setpgid(0, group)
    # Nothing that was imported becomes garbage: the collector need not look at it.
    gc.freeze()
    opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(ready.fileno(), 1)
    os.dup2(opened, 2)
    os.close(opened)
    ready.close()
    faulthandler.enable()
    for name in [name for name in os.environ if name.startswith("POLYBUS_")]:
        del os.environ[name]
    sys.argv = ["polybus", "serve", "--config", config]
    runpy.run_module("polybus.cli", run_name="__main__")
