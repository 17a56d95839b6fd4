"""The process that `warm_kit` forks commands from: it imports modules once, then serves requests.

Usage: `python warm_parent.py SOCKET_FD MODULE...`

A request is one JSON line with three file descriptors beside it. The command must be a child of the
process that asked, so that waiting for it, its exit code and signals are those of any subprocess.
This process therefore forks twice: the process in the middle ends at once, and the kernel gives
its child to the nearest ancestor that asked for orphans (`prctl(2)`, PR_SET_CHILD_SUBREAPER), which
is the process that asked. Only then the command begins.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

REQUEST_BYTES_MAX = 1 << 20
ADOPTION_S = 20.0
# What a Python that starts does with a signal that its parent does not ignore.
AT_START: dict[int, Any] = {
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
}


class Asked(NamedTuple):
    """A request, and the standard streams of the new process."""

    request: dict[str, Any]
    streams: list[int]


def serve(asking: socket.socket) -> Asked:
    """Answer requests until nobody asks any more; returns only in a new process."""
    while True:
        line, streams, _, _ = socket.recv_fds(asking, REQUEST_BYTES_MAX, 3)
        if not line:
            os._exit(0)
        while not line.endswith(b"\n"):
            line += asking.recv(REQUEST_BYTES_MAX)
        request = json.loads(line)
        middle = os.fork()
        if middle == 0:
            command = os.fork()
            if command == 0:
                return Asked(request, streams)
            asking.sendall(command.to_bytes(8))
            os._exit(0)
        os.waitpid(middle, 0)
        for stream in streams:
            os.close(stream)
        asking.sendall(b".")


def become(asked: Asked) -> None:
    """Take over everything that a process gets from the one that starts it."""
    request = asked.request
    deadline = time.monotonic() + ADOPTION_S
    while os.getppid() != request["parent"]:
        if time.monotonic() > deadline:
            # Whoever asked was interrupted, or has ended.
            os._exit(1)
        time.sleep(0.0005)
    if request["session"]:
        os.setsid()
    for number, stream in enumerate(asked.streams):
        os.dup2(stream, number)
    for stream in asked.streams:
        os.close(stream)
    # The streams' objects were made around the same numbers and have buffered nothing yet.
    getattr(sys.stdout, "reconfigure")(line_buffering=os.isatty(1))  # noqa: B009
    for number, handler in AT_START.items():
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    module = request["module"]
    sys.path[0] = os.getcwd()
    sys.argv = [module, *request["arguments"]]
    # A module that is run has not been imported, except a package: it is its `__main__` that runs.
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)


if __name__ == "__main__":
    asking = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # Nothing of this becomes garbage in a child. Not looking at it saves a child most of its end.
    # DuckDB must not be among it: it complains at the end about objects that were not collected.
    gc.freeze()
    asked = serve(asking)
    asking.close()
    become(asked)
    if asked.request["module"] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_module(asked.request["module"], run_name="__main__", alter_sys=True)
