"""Forks the hand-overs of a warm bus, because their imports would take most of a campaign's time.

A bus has threads when it starts a hand-over, so it cannot fork one safely. Before it has any, it
forks a helper process, the forker, which forks each hand-over that the bus requests. A hand-over
must be a child of its bus: the bus waits for it, and a hand-over whose parent changes ends. So the
forker forks twice, and the process in between exits: then Linux reparents the hand-over to the bus,
which is a subreaper.
"""

import contextlib
import ctypes
import io
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from polybus.log.history import handover
from polybus.log.history.maintenance import Maintenance
from polybus.log.without_pandas import block_pandas

NAME = b"forker"
_REQUEST_BYTES_MAX = 64 << 10
_PDEATHSIG, _SET_NAME, _SUBREAPER = 1, 15, 36


def start_forker() -> None:
    """Fork the hand-overs of this process from now on; it must not have threads yet."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    bus = os.getpid()
    if os.fork() == 0:
        ours.close()
        libc.prctl(_SET_NAME, NAME)
        libc.prctl(_PDEATHSIG, signal.SIGKILL)
        # The bus may have ended before that.
        if os.getppid() == bus:
            # It may end while this forks a hand-over for it.
            with contextlib.suppress(ConnectionError):
                _fork_for(theirs, bus)
        os._exit(0)
    theirs.close()

    def start(command: list[str], **_: Any) -> ForkedProcess:
        # A Python, -m and the module come first.
        return ForkedProcess(ours, command[3:])

    Maintenance.start_process = staticmethod(start)  # type: ignore[assignment]


def is_forker(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_bytes().strip() == NAME
    return False


class ForkedProcess:
    """A hand-over, with the part of the `subprocess.Popen` interface that `Maintenance` needs."""

    def __init__(self, forker: socket.socket, arguments: list[str]) -> None:
        reader, writer = os.pipe()
        try:
            socket.send_fds(forker, [json.dumps(arguments).encode()], [writer])
        finally:
            os.close(writer)
        self.stdout: io.BufferedReader = os.fdopen(reader, "rb")
        self._pid = int(forker.recv(32) or b"0")
        self.returncode: int | None = None
        if not self._pid:
            raise ChildProcessError("the forker has ended")

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self.returncode


def _fork_for(bus_socket: socket.socket, bus: int) -> None:
    """Run the forker until the bus ends."""
    devnull = os.open(os.devnull, os.O_RDWR)
    # Close the bus's standard streams: their end shows that the bus itself has ended.
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    while True:
        request, descriptors, _, _ = socket.recv_fds(bus_socket, _REQUEST_BYTES_MAX, 1)
        if not request:
            return
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            number = os.fork()
            if number == 0:
                bus_socket.close()
                _hand_over(json.loads(request), descriptors[0], bus)
            os.write(writer, str(number).encode())
            os._exit(0)
        os.waitpid(between, 0)
        os.close(writer)
        os.close(descriptors[0])
        # It is the bus's child by now.
        bus_socket.send(os.read(reader, 32) or b"0")
        os.close(reader)


def _hand_over(arguments: list[str], output: int, bus: int) -> None:
    """The process of a hand-over."""
    code = 1
    try:
        between = os.getppid()
        while (parent := os.getppid()) != bus:
            if parent != between:
                return  # The bus has ended.
            time.sleep(0.001)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        ctypes.CDLL(None).prctl(_SET_NAME, b"hand-over")
        block_pandas()
        code = handover.main(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
