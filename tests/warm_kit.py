"""Commands of Polybus start from a process that has imported it already.

In many tests a bus or a command is a process of its own, which would spend most of a second on
imports. `install` changes how `subprocess`, and with it asyncio, starts `python -m polybus...`: it
forks the command from a `warm_parent.py`. The command is a child of the test like any other, with
its own streams, environment, folder, signals and exit code. A command that asks for more, or whose
environment changes how Python itself works, starts as usual. With TESTS_COLD=1 all do.

A program of a test, `python -c PROGRAM`, is forked too if its first line is `WARM` or `WARM_SPARK`.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polybus.cli import VERBS

PARENT = Path(__file__).with_name("warm_parent.py")
# They decide what an import does, or how the interpreter works.
AT_IMPORT = ("PYTHON", "POLYBUS_PURE", "LANG", "LC_", "LD_")
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
PR_SET_CHILD_SUBREAPER = 36
WARM = "# Forked from a process that has imported Polybus: warm_kit.py\n"
WARM_SPARK = "# Forked from a process that has imported PySpark: warm_kit.py\n"

_start_as_usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_start_as_usual)
_libc = ctypes.CDLL(None, use_errno=True)
# The environment before any test changed it: parents have this one.
_at_install: dict[str, str] = {}


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(AT_IMPORT)}


class WarmParent:
    """A process with some modules imported, which forks commands for this process."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._asking, theirs = socket.socketpair()
        with theirs:
            # It ends when the socket closes, at the latest with this process.
            self._process = subprocess.Popen(
                [sys.executable, str(PARENT), str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                env=_at_install,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Start a command and return its process id; it is a child of this process.

        Whatever interrupts it, a test's time limit for one, the next command gets another parent:
        the rest of this one's answer would be taken for the next one's.
        """
        with _forking:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                line = json.dumps(request).encode() + b"\n"
                sent = socket.send_fds(self._asking, [line], streams)
                self._asking.sendall(line[sent:])
                answer = b""
                while len(answer) < 9 and (part := self._asking.recv(9 - len(answer))):
                    answer += part
            except BaseException:
                self.forget()
                raise
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) < 9:
            self.forget()
            raise AssertionError("the warm parent has ended")
        return int.from_bytes(answer[:8])

    def forget(self) -> None:
        with _parents_lock:
            for modules in [key for key, parent in _parents.items() if parent is self]:
                del _parents[modules]
        self._asking.close()


# One for all parents: whether orphans come to this process is a setting of the whole process.
_forking = threading.Lock()
_parents: dict[tuple[str, ...], WarmParent] = {}
_parents_lock = threading.Lock()


def modules_of(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """What the parent of a command has imported.

    A bus gets nothing that it does not import itself: it must do without pandas, for one.
    """
    is_spark = module == "-c" and arguments[0].startswith(WARM_SPARK)
    if module == "-c" and not is_spark:
        return ("polybus.lake.compact", "polybus.log.history.handover")
    if is_spark or module.startswith("polybus.spark."):
        return ("polybus.spark", "pyspark.sql", "quick_java")
    if module.startswith("polybus.log.") or "serve" in arguments[:1]:
        return ("polybus.cli.serve", "polybus.edges.node", "polybus.log.without_pandas", "uvloop")
    verbs = (f"polybus.cli.{verb}" for verb in VERBS)
    used = ("polybus.log.reading.reader", "pandas", "quick_java", "rich.table")
    return (*sorted(set(verbs) - {"polybus.cli.bench"}), *used)


def parent_of(modules: tuple[str, ...]) -> WarmParent:
    """The process that has imported these modules; it starts when it is first needed."""
    with _parents_lock:
        if modules not in _parents:
            _parents[modules] = WarmParent(modules)
        return _parents[modules]


def is_plain(asked: Mapping[str, Any]) -> bool:
    """Whether `subprocess` was asked for nothing that a warm parent does not know."""
    command = asked["args"]
    return (
        isinstance(command, list | tuple)
        and command[0] == sys.executable
        and (
            (command[1] == "-m" and str(command[2]).startswith("polybus."))
            or (command[1] == "-c" and str(command[2]).startswith((WARM, WARM_SPARK)))
        )
        and asked["executable"] is None
        and asked["preexec_fn"] is None
        and not asked["pass_fds"]
        and asked["process_group"] == -1
        and (asked["gid"], asked["uid"], asked["umask"]) == (None, None, -1)
        and (asked["cwd"] is None or os.path.isdir(asked["cwd"]))
    )


def _start(self: Any, *args: Any, **options: Any) -> None:
    asked = _parameters.bind(self, *args, **options).arguments
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    if not is_plain(asked) or at_import(environment) != at_import(_at_install):
        _start_as_usual(self, *args, **options)
        return
    kind, module, *arguments = map(os.fspath, asked["args"][1:])
    if kind == "-c":
        module, arguments = "-c", [module, *arguments]
    parent = parent_of(modules_of(module, arguments))
    request = {
        "module": module,
        "arguments": arguments,
        "environment": environment,
        "cwd": os.fspath(asked["cwd"] or os.getcwd()),
        "session": bool(asked["start_new_session"]),
        "ignored": [one for one in SIGNALS if signal.getsignal(one) is signal.SIG_IGN],
        "parent": os.getpid(),
    }
    given = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
    streams = [number if stream == -1 else stream for number, stream in enumerate(given)]
    self.pid = parent.fork(request, streams)
    self._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(asked[name] for name in pipes))


def install() -> None:
    """Start commands of Polybus warm from now on."""
    if os.environ.get("TESTS_COLD") != "1" and sys.platform == "linux":
        _at_install.update(os.environ)
        subprocess.Popen._execute_child = _start  # type: ignore[attr-defined]
