"""Ends a piece of work before each of its writes, and looks at what the next start makes of it.

The work runs once, in a process of its own. Before each of its writes, and after the last, the disk
is recorded as each kind of end would leave it (disk_kit.py), with what the work had been promised
until then. Each of these disks is then laid out, and

    seen     is what a real start shows, which recovers
    again    is what another start shows: the same, as recovery is idempotent
    end      is what a start shows when the work, or what `proceed` does, was done after that

A test asserts what it likes of each `Crash`. It is asserted here that everything starts, that the
second start changes nothing, and that `verify` finds no damage before and after.

What a start does depends on nothing but the disk. Many ends leave the same one, or one that the
first start makes the same: what follows on that is done once.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disk_kit import End, Tree, WatchedDisk

from polybus.log.without_pandas import block_pandas
from polybus.services.checking import verify
from polybus.torture.bus.warm import start_server

ENDS: tuple[End, ...] = ("kill", "cut", "torn")
LOOK_S = 20
MEMORY_DISK = "/dev/shm" if os.path.isdir("/dev/shm") else None
# The server from which every test is forked has these already.
PRELOADED = [
    *("pytest", "polybus.edges.node", "polybus.lake.compact", "polybus.services.checking"),
    *("pyarrow.acero", "pyarrow.dataset", "uvicorn.lifespan.off", "zoneinfo"),
]


@dataclass
class Run:
    """What the work is given: its data folder, and a way to say what it was promised."""

    data: Path
    acknowledged: list[Any] = field(default_factory=list)
    is_recorded: bool = True

    def acknowledge(self, *fact: Any) -> None:
        """The work got a receipt that something is safe; `Crash.acknowledged` lists it."""
        self.acknowledged = [*self.acknowledged, list(fact)]

    def pause(self) -> None:
        """Do not end before the writes from now on, until `resume`."""
        self.is_recorded = False

    def resume(self) -> None:
        self.is_recorded = True


@dataclass
class Crash:
    """One end of the work.

    Attributes:
        position: the number of the write that did not happen.
        before: what that write was; empty if the work came to its end before.
        acknowledged: what the work had been promised until then.
        seen: what the next start showed.
        end: what was shown when the work had been done after that.
    """

    how: End
    position: int
    before: str
    acknowledged: list[Any]
    seen: Any = None
    end: Any = None

    def __str__(self) -> str:
        where = f"{self.how} at write {self.position}: {self.before or 'the end'}"
        return f"{where}\nacknowledged: {self.acknowledged}\nseen: {self.seen}\nend: {self.end}"


Work = Callable[[Run], None]
Look = Callable[[Path], Any]


@dataclass
class Scenario:
    """What is done; `crashes` has the meaning of each."""

    work: Work
    look: Look
    start: Work | None
    proceed: Work
    ends: tuple[End, ...]
    verified: bool


def crashes(
    work: Work,
    look: Look,
    *,
    start: Work | None = None,
    proceed: Work | None = None,
    ends: tuple[End, ...] = ENDS,
    verified: bool = True,
) -> Iterator[Crash]:
    """Every end of `work` that leaves another disk, or was promised something else.

    `start` makes the state before it, `proceed` is what is done afterwards (the work once more,
    unless it says otherwise), `look` starts on a folder and says what it shows, as JSON. All are
    functions of a module.
    """
    scenario = Scenario(work, look, start, proceed or work, ends, verified)
    count = 0
    # Not made by the runner, which is killed when the test has seen enough.
    with tempfile.TemporaryDirectory(prefix="polybus-crash-", dir=MEMORY_DISK) as folder:
        for crash, problem in _from_runner(_run, scenario, Path(folder) / "data"):
            if problem:
                pytest.fail(f"{crash}\n{problem}", pytrace=False)
            count += 1
            yield crash
    assert count > 1, "the work writes nothing"


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process from which it may fork."""
    [(problem, result)] = _from_runner(_run_once, function, *arguments)
    if problem:
        pytest.fail(problem, pytrace=False)
    return result


def _from_runner(target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """What `target` sends from a process of its own, up to None."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    # A process has one fork server, and the buses of tests/torture need its library.
    start_server()
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    runner = context.Process(target=target, args=(send, *arguments))
    runner.start()
    send.close()
    try:
        while (result := receive.recv()) is not None:
            yield result
    except EOFError:
        pytest.fail("the process was killed: a start did not end", pytrace=False)
    finally:
        runner.kill()
        runner.join()
        runner.close()
        receive.close()


def kill(work: Work, data: Path, *, before: str = "", nth: int = 1) -> None:
    """Do the work on a folder, and SIGKILL it before the nth write that begins with `before`."""
    run = Run(data)
    count = 0

    def before_write(what: str) -> None:
        nonlocal count
        count += run.is_recorded and what.startswith(before)
        if count == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        WatchedDisk(data, before_write).install()
        work(run)

    status = _forked(child)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


def complete(work: Work, data: Path) -> None:
    """Do the work in a process of its own: delta-rs does not work on both sides of a fork."""
    status = _forked(lambda: work(Run(data)))
    assert status == 0, f"the work ended with status {status}"


def recorded(
    work: Work, data: Path, ends: tuple[End, ...], *, every: bool = False
) -> list[tuple[Crash, Tree]]:
    """Each end of the work with its disk; `every`: also those that leave the same as another."""
    spool = data.with_name("recorded")

    def child() -> None:
        spool.write_bytes(pickle.dumps(_record(work, data, ends, every=every)))

    status = _forked(child)
    assert status == 0, f"the work ended with status {status}"
    found: list[tuple[Crash, Tree]] = pickle.loads(spool.read_bytes())
    return found


# In the runner.


def _run_once(results: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        results.send(("", function(*arguments)))
    except Exception:
        results.send((traceback.format_exc(), None))
    results.send(None)


def _run(results: Any, scenario: Scenario, data: Path) -> None:
    block_pandas()
    crash = Crash("kill", 0, "the start", [])
    try:
        data.mkdir()
        if scenario.start is not None:
            complete(scenario.start, data)
        steps = Steps(scenario, data)
        for crash, tree in recorded(scenario.work, data, scenario.ends):
            signal.alarm(LOOK_S)
            results.send((crash, steps.fill_in(crash, tree)))
    except Exception:
        results.send((crash, traceback.format_exc()))
    results.send(None)


class Steps:
    """What is done on each disk. A step on the same disk once more is not taken again."""

    def __init__(self, scenario: Scenario, data: Path) -> None:
        self._scenario = scenario
        self._data = data
        self._laid_out = b""
        # By a step and the digest of a disk: what the step returned, and the disk it left.
        self._taken: dict[tuple[Look, bytes], tuple[Any, Tree]] = {}

    def fill_in(self, crash: Crash, tree: Tree) -> str:
        """Fill in what was shown after this end; what went wrong, if anything did."""
        try:
            _, tree = self._take(self._verify, tree)
            crash.seen, tree = self._take(self._look, tree)
            again, tree = self._take(self._look, tree)
            if again != crash.seen:
                return f"the second start shows something else: {again}"
            _, tree = self._take(self._proceed, tree)
            crash.end, tree = self._take(self._look, tree)
            self._take(self._verify, tree)
        except Exception:
            return traceback.format_exc()
        return ""

    def _take(self, step: Look, tree: Tree) -> tuple[Any, Tree]:
        disk = _digest(tree)
        if (step, disk) not in self._taken:
            if self._laid_out != disk:
                shutil.rmtree(self._data)
                lay_out(tree, self._data)
            self._laid_out = b""
            result = step(self._data)
            left = _tree_of(self._data)
            self._laid_out = _digest(left)
            self._taken[step, disk] = result, left
        return self._taken[step, disk]

    def _look(self, data: Path) -> Any:
        return json.loads(json.dumps(self._scenario.look(data)))

    def _proceed(self, data: Path) -> None:
        self._scenario.proceed(Run(data))

    def _verify(self, data: Path) -> None:
        if self._scenario.verified:
            report = verify(data)
            assert report.intact, f"verify: {[str(one) for one in report.damages]}"


def lay_out(tree: Tree, data: Path) -> None:
    data.mkdir()
    for relative, content in tree.items():
        path = data / relative
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)


def _tree_of(data: Path) -> Tree:
    """All folders and files; sockets are left out."""
    paths = [path for path in data.rglob("*") if path.is_dir() or path.is_file()]
    contents = [None if path.is_dir() else path.read_bytes() for path in paths]
    return {
        str(path.relative_to(data)): content for path, content in zip(paths, contents, strict=True)
    }


def _forked(work: Callable[[], None]) -> int:
    """Do the work in a child process; its status."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        # Not `sys.exit`: threads of the work may still wait for something.
        os._exit(code)
    return os.waitpid(child, 0)[1]


def _record(
    work: Work, data: Path, ends: tuple[End, ...], *, every: bool
) -> list[tuple[Crash, Tree]]:
    run = Run(data)
    known: set[tuple[str, bytes]] = set()
    found: list[tuple[Crash, Tree]] = []
    position = 0

    def record(what: str) -> None:
        nonlocal position
        if not run.is_recorded:
            return
        position += 1
        for end in ends:
            tree = disk.left(end)
            key = (json.dumps(run.acknowledged), _digest(tree))
            if every or key not in known:
                known.add(key)
                found.append((Crash(end, position, what, run.acknowledged), tree))

    disk = WatchedDisk(data, record)
    disk.install()
    work(run)
    record("")
    return found


def _digest(tree: Tree) -> bytes:
    digest = hashlib.blake2b()
    for path, content in sorted(tree.items()):
        digest.update(f"{path} {-1 if content is None else len(content)} ".encode())
        digest.update(content or b"")
    return digest.digest()
