"""Starts buses by forking a process that has already imported Polybus.

`python -m polybus.cli serve` spends most of a second on imports. Here `multiprocessing`'s fork
server imports once, and a bus is a fork of it. Apart from that it is like any other bus.

The fork server has the library of control.py loaded, which is inactive there: a bus whose disk or
clock should fail attaches it to its own control after the fork.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path

from polybus.bench import BenchError
from polybus.torture.bus.control import CONTROL, PRELOAD, library
from polybus.torture.bus.handover_forker import start_forker

PRELOADED = (
    *("polybus.torture.campaign", "polybus.cli.serve", "polybus.edges.node", "uvloop"),
    # What a bus imports when it is first used.
    *("polybus.services.transactions.staging", "websockets.asyncio.client", "pyarrow.acero"),
    "polybus.log.history.handover",
)

# Arrow reads this when it is imported: the fork server's has the choice of the bus, too
# (cli/common/allocator.py).
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(list(PRELOADED))
# An exit code can be read once. `multiprocessing` asks all processes for theirs at each start, and
# takes 255 for one that another thread has read.
_POLLING = threading.Lock()


def start_server() -> None:
    """Start this process's fork server, if it has none yet, with the library if it compiles."""
    before = os.environ.get(PRELOAD)
    # Without a compiler, no requested fault needs it.
    with contextlib.suppress(BenchError):
        os.environ[PRELOAD] = str(library())
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            os.environ.pop(PRELOAD, None)
        else:
            os.environ[PRELOAD] = before


class WarmProcess:
    """A bus, with the part of the `subprocess.Popen` interface that `BusChild` needs."""

    def __init__(self, config: Path, log: Path, environment: Mapping[str, str]) -> None:
        """`environment` is that of a Shim, or empty."""
        start_server()
        reader, writer = processes.Pipe(duplex=False)
        with reader, writer:
            arguments = (str(config), str(log), writer, os.getpgrp(), dict(environment))
            self._process = processes.Process(target=_serve, args=arguments, daemon=True)
            with _POLLING:
                self._process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()), "rb")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _POLLING:
            return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("serve", timeout or 0.0)
        return code


def _serve(
    config: str, log: str, ready: Connection, group: int, environment: dict[str, str]
) -> None:
    """Runs in the new process: become `polybus serve`, in the group of the requesting process."""
    os.setpgid(0, group)
    # Imported objects never become garbage, so the collector can ignore them.
    gc.freeze()
    opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(ready.fileno(), 1)
    os.dup2(opened, 2)
    os.close(opened)
    ready.close()
    faulthandler.enable()
    for name in [name for name in os.environ if name.startswith("POLYBUS_")]:
        del os.environ[name]
    # For the hand-over process, which is not a fork.
    os.environ.pop(PRELOAD, None)
    os.environ.update(environment)
    if environment:
        ctypes.CDLL(None).torture_attach(os.fsencode(environment[CONTROL]))
    start_forker()
    sys.argv = ["polybus", "serve", "--config", config]
    runpy.run_module("polybus.cli", run_name="__main__")
