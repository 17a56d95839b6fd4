"""Nothing on the loop's thread waits: no lock, event, future, thread or descriptor.

Ruff forbids the functions that wait (pyproject.toml, `banned-api`). It cannot see methods of
objects, nor compiled modules, so these are searched here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import polybus

SOURCE = Path(polybus.__file__).parent
ON_THE_LOOP = ("bus", "edges", "scan", "services", "wire")
WAITING = {"wait", "result", "acquire", "join", "select", "poll"}
ALLOWED = {
    # The task is done.
    ("edges/http/downloads.py", "result"),
    # On a thread of its own.
    ("services/accounts/cluster.py", "result"),
    # Columns of a table.
    ("edges/http/api/messages.py", "select"),
    ("services/queries/lookups.py", "select"),
}
COMPILED_WAIT = re.compile(
    r"\b(?:u|nano)?sleep\(|\b(?:p?poll|p?select|sem_(?:timed|clock)?wait|futex)\("
)
# On threads of their own.
COMPILED_ALLOWED = {SOURCE / "log/journal/_writing.pyx"}
EPOLL_TIMEOUT = re.compile(r"epoll_p?wait\([^)\n]*?, *([^,)\n]+)\)")


def waits_in(text: str) -> Iterator[tuple[str, int]]:
    """Methods that may block, with their lines: those that are awaited or given to a call do not.

    A `join` with an argument joins texts; `poll(0)` only looks.
    """
    tree = ast.parse(text)
    harmless: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Await):
            harmless.add(node.value)
        elif isinstance(node, ast.Call):
            harmless |= {*node.args, *[keyword.value for keyword in node.keywords]}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in WAITING
            and node not in harmless
        ):
            first = node.args[0] if node.args else None
            if node.func.attr == "join" and first is not None:
                continue
            if isinstance(first, ast.Constant) and first.value in (0, False):
                continue
            yield node.func.attr, node.lineno


def test_no_method_that_waits_is_called_where_the_loop_runs() -> None:
    found = []
    for package in ON_THE_LOOP:
        for path in sorted((SOURCE / package).rglob("*.py")):
            name = path.relative_to(SOURCE).as_posix()
            for method, line in waits_in(path.read_text()):
                if (name, method) not in ALLOWED:
                    found.append(f"{name}:{line}: {method}() may wait")
    assert not found, "\n".join(found)


def test_no_compiled_module_waits() -> None:
    found = []
    paths = {*SOURCE.rglob("*.pyx"), *SOURCE.rglob("*.pxd")}
    assert paths >= COMPILED_ALLOWED
    for path in sorted(paths - COMPILED_ALLOWED):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            # A declaration of a C function names its types.
            timeouts = EPOLL_TIMEOUT.findall(line)
            is_call = any(one != "0" for one in timeouts) and " int " not in f" {line}"
            if is_call or COMPILED_WAIT.search(line):
                found.append(f"{path.relative_to(SOURCE)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_search_finds_what_waits_and_nothing_else() -> None:
    waiting = ["done.wait()", "future.result()", "future.result(3)", "lock.acquire()"]
    waiting += ["thread.join()", "epoll.poll()", "poller.select(5)"]
    for call in waiting:
        assert list(waits_in(call)), call
    for call in [
        "b''.join(parts)",
        "epoll.poll(0, 9)",
        "start(event.wait())",
        "lock.acquire(False)",
    ]:
        assert not list(waits_in(call)), call
    assert not list(waits_in("async def f(): await event.wait()"))
