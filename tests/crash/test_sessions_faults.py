"""A session on a disk that fails for a while: in the end it has got every message, in order.

The same work is done again and again, and each time another operation of the disk fails, once or
until the disk recovers: each change of a file, then each read of one. Its client loses some answers
and confirms some packs meanwhile. What was refused is done again or was not promised.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import itertools
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crash_kit import MEMORY_DISK, lay_out
from disk_kit import Tree
from faults_kit import CountingClient, FailingDisk, Fault
from model_life import Life, VirtualLoop
from staging_kit import stage

from polybus.batch import Batch
from polybus.config import Config
from polybus.errors import PolybusError
from polybus.services.sessions.session import Session
from polybus.services.transactions.commits import TransactionKey
from polybus.services.transactions.transactions import TICK_S, CommitRequest
from polybus.testing import ManualClock

pytestmark = pytest.mark.slow

TOPICS = ("a", "b")
FOREVER = 1 << 40
SAVED_S = 0.3
# The journal is tried again every second, and a topic that could not be read every ten.
RECOVERED_S = 2.5
READ_AGAIN_S = 11.0
# Each record batch weighs more than half of it, so that each is a part.
PART_BYTES = 4500


class World:
    """Lives of a bus on a disk that may fail, and its clients."""

    life: Life
    disk: FailingDisk

    def __init__(self, folder: Path, *, reads: bool) -> None:
        self._folder = folder
        self._reads = reads
        self._lives = itertools.count()
        self._clock = ManualClock()
        raw = {"data": str(folder), "connectors": [], "system": {"events": False}}
        limits = {"transaction-part-bytes": PART_BYTES}
        self._config = msgspec.convert({**raw, "limits": limits}, Config)
        self._now_s = 1000.0
        self._values = itertools.count()
        self._batch = 0
        self._transaction: list[tuple[str, str]] = []
        self._key = ""
        self.client = CountingClient()
        self.promised: dict[str, set[str]] = collections.defaultdict(set)

    def copy(self) -> World:
        """The same world once more, between two lives."""
        made = copy.copy(self)
        made.client = copy.deepcopy(self.client)
        made.promised = copy.deepcopy(self.promised)
        made._transaction = list(self._transaction)
        made._clock = copy.deepcopy(self._clock)
        made._values = copy.copy(self._values)
        return made

    # Lives

    def enter(self, tree: Tree) -> None:
        data = self._folder / f"life-{next(self._lives)}"
        lay_out(tree, data)
        self.disk = FailingDisk(data, reads=self._reads)
        self.disk.install()
        loop = VirtualLoop()
        loop.now_s = self._now_s
        self.life = Life(data, self._config, self._clock, loop)
        self.run(self.life.start())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.life.loop.turns = 0
        self.life.loop.run_until_complete(self.life.loop.create_task(work))

    def leave(self, end: str) -> Tree:
        """Stop or end this life; what is left of it."""
        if end == "stop":
            self.run(self.life.stop())
        tree = self.disk.left("cut" if end == "cut" else "kill")
        self.release()
        return tree

    def release(self) -> None:
        loop = self.life.loop
        if loop.is_closed():
            return
        self._now_s = loop.now_s
        loop.set_exception_handler(lambda *_: None)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.life.release()
        self.disk.uninstall()
        loop.close()

    # What is done

    async def begin(self) -> None:
        for topic in TOPICS:
            self.life.bus.create_topic(topic)
        self._key = await self.life.services.inboxes.create(list(TOPICS), None, "earliest")

    async def publish(self, *topics: str) -> None:
        values = [(topic, f"m{next(self._values)}") for topic in topics]
        batches = [Batch.of(topic, [f'"{value}"'.encode()]) for topic, value in values]
        ticket = self.life.bus.commit(batches, urgent=True)
        await self.life.context.durability.wait(ticket)
        self._promise(values)

    async def transact(self, *topics: str) -> None:
        """A transaction of these topics, or again the one that had no answer."""
        if not self._transaction:
            self._transaction = [(topic, f"t{next(self._values)}") for topic in topics]
        rows = [(topic, f'"{value}"') for topic, value in self._transaction]
        name = f"{self._batch}-{'0' * 8}.arrows"
        (self.life.data / "staging" / "p" / name).unlink(missing_ok=True)
        stage(self.life.data, "p", self._batch, rows, name=name)
        request = CommitRequest(TransactionKey("p", "q", self._batch), [name])
        await self.life.services.transactions.commit(request, self.life.access)
        self._promise(self._transaction)
        self._transaction = []
        self._batch += 1

    def _promise(self, values: list[tuple[str, str]]) -> None:
        for topic, value in values:
            self.promised[topic].add(value)

    async def receive(self, confirmed: slice = slice(0)) -> list[int]:
        """Take all packs, and confirm some; their numbers."""
        inboxes = self.life.services.inboxes
        numbers = self.client.take(await inboxes.collect(self._session, 0))
        inboxes.confirm(self._session, numbers[confirmed])
        return numbers

    async def lose_answer(self) -> None:
        """The connection breaks when the bus has sent the packs."""
        await self.life.services.inboxes.collect(self._session, 0)
        await self.wait(SAVED_S)

    @property
    def _session(self) -> Session:
        session = self.life.services.inboxes.find(self._key)
        assert session is not None, "the session is gone"
        return session

    async def hand_over(self) -> None:
        self.life.maintain()

    async def wait(self, seconds: float) -> None:
        self._clock.advance(s=seconds)
        await asyncio.sleep(seconds)

    # The lives of the test

    async def before(self) -> None:
        """Leave packs in history and in the journal that count as shown, and that nobody has."""
        await self.begin()
        await self.publish("a", "b")
        await self.transact("a", "b", "a")
        await self.receive(slice(1))
        await self.hand_over()
        await self.publish("a")
        await self.transact("b", "a")
        await self.lose_answer()
        await self.publish("a")
        # A start reads the commits of transactions that state.db does not have.
        await self.wait(TICK_S + SAVED_S)

    async def failing(self) -> None:
        """Work of which any part may be refused."""
        work: list[Callable[[], Awaitable[object]]] = [
            lambda: self.receive(slice(None, None, 2)),
            lambda: self.publish("b"),
            lambda: self.transact("a", "b", "b"),
            self.lose_answer,
            lambda: self.receive(slice(1, None, 2)),
            lambda: self.transact("b"),
            self.hand_over,
            self.lose_answer,
            lambda: self.receive(slice(None, None, 3)),
        ]
        for one in work:
            with contextlib.suppress(PolybusError, OSError):
                await one()
        self.disk.heal()
        await self.wait(RECOVERED_S)

    async def after(self) -> None:
        """Everything that is left: the disk is whole."""
        await self.transact("a", "b")
        await self.publish("a", "b")
        while await self.receive(slice(None)):
            await self.wait(READ_AGAIN_S)

    def check(self) -> None:
        for topic in TOPICS:
            stored: list[str] = []
            while len(stored) < self.life.log.bounds(topic).stop:
                for batch in self.life.log.read(topic, len(stored)):
                    stored += [msgspec.json.decode(value) for value in batch.values()]
            assert self.promised[topic].issubset(stored)
            # Some may have come again, under other numbers.
            got = dict.fromkeys(self.client.values(topic))
            assert [value for value in got if value in stored] == stored, self.client


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="polybus-faults-", dir=MEMORY_DISK))
    disabled = logging.root.manager.disable
    # Failures are what this is about.
    logging.disable(logging.CRITICAL)
    try:
        yield folder
    finally:
        logging.disable(disabled)
        shutil.rmtree(folder)


def begun(folder: Path, *, reads: bool) -> tuple[World, Tree]:
    """A world after its first life, and what that has left."""
    world = World(folder, reads=reads)
    world.enter({})
    try:
        world.run(world.before())
        return world, world.leave("kill")
    finally:
        world.release()


def fail_once(world: World, tree: Tree, fault: Fault, end: str) -> list[str]:
    """Continue with one fault; the operations that failed."""
    world.enter(tree)
    try:
        world.disk.fail(fault)
        world.run(world.failing())
        failed = world.disk.failed
        try:
            if end:
                world.enter(world.leave(end))
            world.run(world.after())
            world.check()
        except Exception as error:
            pytest.fail(f"{fault} {failed[:3]}: {error!r}")
        return failed
    finally:
        world.release()


def fail_each(
    folder: Path, end: str, count: int, *, reads: bool = False, is_late: bool = False
) -> None:
    world, tree = begun(folder, reads=reads)
    for first in itertools.count():
        fault = Fault(first, count, is_late=is_late)
        if not fail_once(world.copy(), tree, fault, end):
            assert first > 50, "only this many operations"
            return


@pytest.mark.parametrize(
    ("end", "count", "is_late"), [("", 1, False), ("cut", FOREVER, False), ("kill", 1, True)]
)
def test_a_session_gets_everything_after_a_failed_write(
    folder: Path, end: str, count: int, is_late: bool
) -> None:
    fail_each(folder, end, count, is_late=is_late)


@pytest.mark.parametrize(("end", "count"), [("kill", 1), ("stop", FOREVER)])
def test_a_session_gets_everything_after_a_failed_read(folder: Path, end: str, count: int) -> None:
    """What could not be read counts as damaged until the next start."""
    fail_each(folder, end, count, reads=True)
