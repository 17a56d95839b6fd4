"""Processes that run rounds, each one after the other.

A worker has a fork server of its own, which its first bus starts: a new worker for each round would
import Polybus for each round.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from polybus.torture.bus.warm import processes, start_server
from polybus.torture.report import Findings
from polybus.torture.rounds import Round

Perform = Callable[[Round], Findings]


class Worker:
    """A process that runs one round at a time."""

    def __init__(self, perform: Perform) -> None:
        """Start it. It calls `perform`, which can be pickled, for each round."""
        start_server()
        self._pipe, other = processes.Pipe()
        with other:
            self._process = processes.Process(target=_work, args=(other, perform))
            self._process.start()
        self.round: Round | None = None
        self._began_s = 0.0

    def begin(self, one: Round) -> None:
        self.round, self._began_s = one, time.monotonic()
        self._pipe.send(one)

    @property
    def result(self) -> Connection:
        """Readable when the round, or the process, has ended."""
        return self._pipe

    def collect(self) -> tuple[Round, Findings | None, float]:
        """The round that has ended, its findings, and how long it took; None if it failed itself.

        The worker has ended, too, in that case.
        """
        one, self.round = self.round, None
        assert one is not None
        try:
            found = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            found = None
        return one, found, time.monotonic() - self._began_s

    def close(self) -> None:
        """End it, with its buses if it still has some."""
        assert self._process.pid is not None
        if self.round is None:
            self._pipe.close()
            self._process.join(1.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()


def first_ended(workers: Sequence[Worker]) -> list[Worker]:
    """Wait until the round of one or more of them has ended."""
    ended = wait([worker.result for worker in workers])
    return [worker for worker in workers if worker.result in ended]


def _work(pipe: Connection, perform: Perform) -> None:
    """Runs in the process, which has a group of its own: its buses end with it."""
    os.setpgid(0, 0)
    while True:
        try:
            one = pipe.recv()
        except EOFError:
            return
        pipe.send(perform(one))
