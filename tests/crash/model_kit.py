"""A bus for model checkers: they can end it before any write, and continue with what is left.

A life is one process of the bus, on a folder of its own (model_life.py). It runs on one thread in
virtual time, so hypothesis can repeat and shorten a failure. `arm` ends it before its n-th write
from then on: the folder of the next life has what that kind of end leaves (disk_kit.py).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import msgspec
from crash_kit import MEMORY_DISK, lay_out
from disk_kit import End, Tree, WatchedDisk
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from model_life import THREAD_S, TOPICS, Life, PowerOff, VirtualLoop

from polybus.batch import Batch
from polybus.config import Config
from polybus.log.verify.verify import verify
from polybus.services.state_rows import verify_state
from polybus.testing import ManualClock

LONG = "POLYBUS_MODEL_EXAMPLES"
M = TypeVar("M", bound=RuleBasedStateMachine)

topics = st.sampled_from(TOPICS)
ends: st.SearchStrategy[End] = st.sampled_from(("kill", "cut", "torn"))


def run_model(machine: type[RuleBasedStateMachine], *, examples: int, steps: int) -> None:
    """Check the machine: the same examples each time, or as many random ones as LONG says."""
    long = int(os.environ.get(LONG, "0"))
    settings = hypothesis.settings(
        max_examples=long or examples,
        stateful_step_count=steps,
        derandomize=not long,
        database=None,
        deadline=None,
        print_blob=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    disabled = logging.root.manager.disable
    # Crashes are what this is about: their lines would hide the steps of a failure.
    logging.disable(logging.CRITICAL)
    try:
        run_state_machine_as_test(machine, settings=settings)
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def stepped(machine: type[M]) -> Iterator[M]:
    """The machine, for steps that a test names itself."""
    state = machine()
    try:
        yield state
    finally:
        state.teardown()


class Model(RuleBasedStateMachine):
    """What both models share: lives, ends, and what the log must have.

    Attributes:
        sent: the values of every topic, by its epoch and their offsets.
        receipted: how many of them had a receipt.
        epochs: the topics that there are.
        crashes: how many lives ended without a stop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="polybus-model-", dir=MEMORY_DISK))
        self._lives = itertools.count()
        self._values = itertools.count(1)
        self.clock = ManualClock()
        self.sent: dict[tuple[str, int], list[str]] = {}
        self.receipted: collections.Counter[tuple[str, int]] = collections.Counter()
        self.epochs: dict[str, int] = {}
        self.deleting: str | None = None
        self.crashes = 0
        self.state_delay_s = self.log_delay_s = 0.0
        self._armed: list[tuple[int, End]] = []
        self._left: Tree | None = None
        self.life: Life
        self.disk: WatchedDisk

    # Lives

    def begin(self, **settings: Any) -> None:
        """The first life, on an empty folder."""
        raw = {"data": str(self._folder), "connectors": [], "system": {"events": False}}
        self.config = msgspec.convert({**raw, **settings}, Config)
        self._enter({})
        for topic in TOPICS:
            self.epochs[topic] = self.life.bus.create_topic(topic).epoch
            self.sent[topic, self.epochs[topic]] = []

    def _enter(self, tree: Tree) -> None:
        """Start on this disk; a start may be ended, too."""
        while True:
            data = self._folder / f"life-{next(self._lives)}"
            lay_out(tree, data)
            self._verify(data)
            self.disk = WatchedDisk(data, self._before_write)
            self.disk.install()
            loop = VirtualLoop()
            if hasattr(self, "life"):
                loop.now_s = self.life.loop.now_s
            self.life = Life(data, self.config, self.clock, loop)
            if self._ran(self.life.start()):
                self.set_delays()
                return
            tree = self._leave()

    def set_delays(self) -> None:
        self.life.loop.state_delay_s = THREAD_S + self.state_delay_s
        self.life.set_log_delay(self.log_delay_s)

    def _leave(self) -> Tree:
        """The life is over; what is left of it."""
        left = self._left
        assert left is not None
        self._clear()
        self._left = None
        return left

    def _clear(self) -> None:
        """End everything of this life, without another write to what is left."""
        loop = self.life.loop
        loop.set_exception_handler(lambda *_: None)
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
            for task in tasks:
                task.cancelled() or task.exception()
        self._is_watched = False
        self.life.release()
        self._is_watched = True
        self.disk.uninstall()
        loop.close()
        shutil.rmtree(self.life.data)

    _is_watched = True

    def _before_write(self, what: str) -> None:
        if self._left is not None and self._is_watched:
            raise PowerOff
        if self._armed and self._is_watched:
            count, end = self._armed[0]
            if count:
                self._armed[0] = (count - 1, end)
                return
            self._armed.pop(0)
            self._end(end)
            raise PowerOff

    def _end(self, end: End) -> None:
        self._left = self.disk.left(end)

    def arm(self, *ends: tuple[int, End]) -> None:
        """End this life after this many writes, the next after as many, and so on."""
        self._armed = list(ends)

    def _ran(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Whether the work came to its end before the life did."""
        loop = self.life.loop
        loop.turns = 0
        task = loop.create_task(work)
        try:
            loop.run_until_complete(task)
        except BaseException:
            if self._left is None:
                raise
        return self._left is None

    def do(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether the work came to its end; else the next life has begun."""

        async def run() -> None:
            await work()

        if self._ran(run()):
            return True
        self._crashed()
        return False

    def crash(self, end: End) -> None:
        self._end(end)
        self._crashed()

    def _crashed(self) -> None:
        self.crashes += 1
        self._enter(self._leave())
        self._look_at_log()
        self.restarted()

    def restart(self) -> None:
        """Stop and start, in order."""

        async def stop() -> None:
            await self.life.stop()

        if self.do(stop):
            self._receipt()
            self.stopped()
            self._end("kill")
            self._enter(self._leave())
            self._look_at_log()
            self.restarted()

    def stopped(self) -> None:
        """A life has ended in order."""

    def restarted(self) -> None:
        """Another life has begun."""

    def teardown(self) -> None:
        try:
            if hasattr(self, "life") and not self.life.loop.is_closed():
                self._left = {}
                self._clear()
        finally:
            if hasattr(self, "disk"):
                self.disk.uninstall()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _verify(self, data: Path) -> None:
        if any(data.iterdir()):
            report = verify(data)
            assert report.intact, f"verify: {[str(one) for one in report.damages]}"
            assert verify_state(data) == []

    # The log

    def new_values(self, count: int) -> list[str]:
        return [f"m{next(self._values)}" for _ in range(count)]

    def will_send(self, topic: str, values: list[str]) -> None:
        """These are appended next."""
        self.sent[topic, self.epochs[topic]] += values

    def _receipt(self) -> None:
        """Everything that was sent is durable."""
        for key, values in self.sent.items():
            self.receipted[key] = len(values)

    async def publish(self, batches: list[tuple[str, int]], *, receipt: bool) -> None:
        """Publish this many messages to each topic, in one commit."""
        made = []
        for topic, count in batches:
            values = self.new_values(count)
            self.will_send(topic, values)
            made.append(Batch.of(topic, [f'"{value}"'.encode() for value in values]))
        ticket = self.life.bus.commit(made, urgent=receipt)
        if receipt:
            await self.life.context.durability.wait(ticket)
            self._receipt()

    async def delete(self, topic: str) -> None:
        self.deleting = topic
        self.life.bus.delete_topic(topic)
        self._deleted()

    def _deleted(self) -> None:
        assert self.deleting is not None
        del self.epochs[self.deleting]
        self.deleting = None

    async def create(self, topic: str) -> None:
        epoch = self.life.bus.create_topic(topic).epoch
        self._created(topic, epoch)

    def _created(self, topic: str, epoch: int) -> None:
        assert (topic, epoch) not in self.sent, f"{topic} has the epoch {epoch} again"
        self.epochs[topic] = epoch
        self.sent[topic, epoch] = []

    async def maintain(self) -> None:
        self.life.maintain()
        self._receipt()

    def _look_at_log(self) -> None:
        """Every receipted message is there, once and in order; others may be, after them."""
        log = self.life.log
        assert not log.frozen, log.frozen
        if self.deleting is not None and self.deleting not in log.topics():
            topic, epoch = self.deleting, self.epochs[self.deleting]
            self._deleted()
            self.topic_is_gone(topic, epoch)
        self.deleting = None
        for topic in TOPICS:
            if topic not in log.topics():
                assert topic not in self.epochs, f"{topic} is gone"
                continue
            bounds = log.bounds(topic)
            if topic not in self.epochs:
                # Its creation had no answer.
                self._created(topic, bounds.epoch)
            key = (topic, bounds.epoch)
            assert self.epochs[topic] == bounds.epoch
            assert bounds.start == 0 or self.config.retention.bytes is not None
            self._check_found(key, self.read(topic), bounds.start)

    def _check_found(self, key: tuple[str, int], found: list[str], start: int) -> None:
        """What a start found in a topic from an offset on; what it found is safe."""
        sent = self.sent[key]
        stop = start + len(found)
        assert found == sent[start:stop], f"{key}: {found} of {sent}"
        assert stop >= self.receipted[key], f"{key}: receipted messages are gone"
        del sent[stop:]
        self.receipted[key] = stop

    def topic_is_gone(self, topic: str, epoch: int) -> None:
        """The deletion of a topic had no answer, and happened."""

    def read(self, topic: str) -> list[str]:
        """All values of a topic, read from the log."""
        log = self.life.log
        bounds = log.bounds(topic)
        found: list[str] = []
        offset = bounds.start
        while offset < bounds.stop:
            for batch in log.read(topic, offset):
                assert batch.first_offset == offset
                found += [msgspec.json.decode(value) for value in batch.values()]
                offset = batch.last_offset + 1
        return found

    # Time

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(s=seconds)
        await asyncio.sleep(seconds)

    # Rules of both

    @rule(topic=topics)
    def create_topic(self, topic: str) -> None:
        async def work() -> None:
            await self.create(topic)

        if topic not in self.epochs:
            self.do(work)

    @rule(log_s=st.sampled_from((0.0, 0.05, 5.0)), state_s=st.sampled_from((0.0, 0.05, 2.0)))
    def slow_down(self, log_s: float, state_s: float) -> None:
        self.log_delay_s, self.state_delay_s = log_s, state_s
        self.set_delays()

    @rule()
    def hand_over(self) -> None:
        self.do(self.maintain)

    @rule(end=ends)
    def kill(self, end: End) -> None:
        self.crash(end)
