"""Transactions against a model of what their producers must find, with ends at any write.

A producer stages files and asks for a commit until it has an answer. Each batch that had one is in
the log once, as a whole and in order; one without an answer is there once or not at all, and asking
again makes it once. That ends for a single batch that the bus has forgotten (producers-max).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from disk_kit import End
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from model_kit import Model, ends, run_model, topics
from staging_kit import stage

from polybus.errors import UsageError
from polybus.services.transactions.commits import ONCE, Offsets, TransactionKey
from polybus.services.transactions.transactions import CommitRequest

pytestmark = pytest.mark.slow

PRODUCERS = ("p", "q")
PRODUCERS_MAX = 4
# Each record batch weighs more than half of it, so that each is a part.
PART_BYTES = 4500

Rows = list[tuple[str, str]]
producers = st.sampled_from(PRODUCERS)
writes = st.integers(0, 25)


@dataclass
class Transaction:
    """One batch of a producer.

    Attributes:
        rows: what it publishes; of the topics that exist when it begins.
        is_asked: it may be in the log.
        offsets: its answer.
        is_torn: a topic of it was deleted after it was asked for.
    """

    key: TransactionKey
    files: list[str]
    rows: Rows
    is_asked: bool = False
    offsets: Offsets | None = None
    is_torn: bool = False


@dataclass
class ModelProducer:
    """A producer: its last batch, and the one that it wants to commit."""

    name: str
    batch: int = -1
    staged: Transaction | None = None
    done: list[Transaction] = field(default_factory=list)


class Transactions(Model):
    """The rules.

    `order` has every transaction that may be in the log, in the order in which it was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.producers = {name: ModelProducer(name) for name in PRODUCERS}
        self.others: list[Transaction] = []
        self.files = 0

    @initialize(in_parts=st.booleans())
    def set_up(self, in_parts: bool) -> None:
        limits = {"producers-max": PRODUCERS_MAX}
        if in_parts:
            limits["transaction-part-bytes"] = PART_BYTES
        self.begin(limits=limits)

    # Staging

    def _stage(self, key: TransactionKey, names: list[str], count: int) -> Transaction:
        """Stage a file for each part of the rows, as the tasks of a query do."""
        rows = [(one, value) for one, value in zip(names, self.new_values(len(names)), strict=True)]
        files = []
        for at in range(count):
            part = [(topic, f'"{value}"') for topic, value in rows[at::count]]
            self.files += 1
            name = f"{key.batch}-{self.files:032d}.arrows"
            stage(self.life.data, key.producer, key.batch, part, name=name)
            files.append(name)
        ordered = [row for at in range(count) for row in rows[at::count]]
        return Transaction(key, files, ordered)

    @rule(
        name=producers,
        names=st.lists(topics, min_size=1, max_size=4),
        count=st.integers(1, 2),
    )
    def stage_next(self, name: str, names: list[str], count: int) -> None:
        """The next batch of a producer; files of an attempt before are abandoned."""
        producer = self.producers[name]
        names = [one for one in names if one in self.epochs]
        if producer.staged is not None and producer.staged.is_asked:
            return

        async def work() -> None:
            key = TransactionKey(name, "query", producer.batch + 1)
            producer.staged = self._stage(key, names, count)

        self.do(work)

    # Committing

    async def _commit(self, wanted: Transaction) -> bool:
        """Whether it was refused for a topic that is gone."""
        request = CommitRequest(wanted.key, wanted.files)
        # The bus may have done and forgotten it.
        may_be_done = wanted.is_asked and wanted.key.query == ONCE
        wanted.is_asked = True
        try:
            offsets, _ = await self.life.services.transactions.commit(request, self.life.access)
        except UsageError as error:
            assert error.code in ("topic.unknown", "topic.reserved", "commit.file"), error
            gone = {topic for topic, _ in wanted.rows} - self.epochs.keys()
            assert gone or not self._are_staged(wanted), error
            wanted.is_asked = may_be_done
            return True
        self._receipt_of(wanted, offsets)
        return False

    def _are_staged(self, wanted: Transaction) -> bool:
        folder = self.life.data / "staging" / wanted.key.producer
        return all((folder / name).exists() for name in wanted.files)

    def _receipt_of(self, wanted: Transaction, offsets: Offsets) -> None:
        found = wanted.offsets
        assert found is None or found == offsets, f"{wanted.key}: {found} is now {offsets}"
        wanted.offsets = offsets
        for topic, ranges in offsets.items():
            for epoch, first, stop in ranges:
                if self.epochs.get(topic) == epoch:
                    values = self.read(topic)[first:stop]
                    mine = [value for name, value in wanted.rows if name == topic]
                    assert set(values) <= set(mine), f"{wanted.key}: {values} of {mine}"

    @precondition(lambda self: any(one.staged for one in self.producers.values()))
    @rule(name=producers)
    def commit(self, name: str) -> None:
        producer = self.producers[name]
        wanted = producer.staged
        if wanted is None:
            return

        async def work() -> None:
            if await self._commit(wanted):
                producer.staged = None
                return
            producer.batch = wanted.key.batch
            producer.done.append(wanted)
            producer.staged = None

        self.do(work)

    @rule(name=producers, back=st.integers(0, 2))
    def commit_again(self, name: str, back: int) -> None:
        """The last batch has the same answer, and older ones are not done again."""
        done = self.producers[name].done
        if len(done) <= back:
            return
        before = done[-1 - back]

        async def work() -> None:
            request = CommitRequest(before.key, before.files)
            offsets, is_known = await self.life.services.transactions.commit(
                request, self.life.access
            )
            assert is_known, f"{before.key} was done again"
            assert offsets == (before.offsets if not back else {}), f"{before.key}: {offsets}"

        self.do(work)

    @rule(names=st.lists(topics, min_size=1, max_size=2))
    def commit_once(self, names: list[str]) -> None:
        """A producer of a single batch; the oldest of them are forgotten."""
        names = [one for one in names if one in self.epochs]

        async def work() -> None:
            key = TransactionKey(f"once-{len(self.others)}", ONCE, 0)
            wanted = self._stage(key, names, 1)
            self.others.append(wanted)
            await self._commit(wanted)

        if names:
            self.do(work)

    @rule(name=producers)
    def skip_a_batch(self, name: str) -> None:
        producer = self.producers[name]
        if producer.batch < 0 or producer.staged is not None:
            return

        async def work() -> None:
            key = TransactionKey(name, "query", producer.batch + 2)
            with pytest.raises(UsageError, match="batches are missing"):
                request = CommitRequest(key, [])
                await self.life.services.transactions.commit(request, self.life.access)

        self.do(work)

    # Others

    @rule(topic=topics, count=st.integers(1, 3), receipt=st.booleans())
    def send(self, topic: str, count: int, receipt: bool) -> None:
        """Other publishers, whose messages come between the parts."""

        async def work() -> None:
            await self.publish([(topic, count)], receipt=receipt)

        if topic in self.epochs:
            self.do(work)

    @rule(topic=topics)
    def delete_topic(self, topic: str) -> None:
        async def work() -> None:
            await self.delete(topic)

        if topic in self.epochs:
            self._tear(topic)
            self.do(work)

    def _tear(self, topic: str) -> None:
        for one in self._transactions():
            one.is_torn |= one.is_asked and topic in dict(one.rows)

    @rule(seconds=st.sampled_from((0.01, 1.0, 61.0)))
    def wait(self, seconds: float) -> None:
        async def work() -> None:
            await self.pass_time(seconds)

        self.do(work)

    @rule(first=writes, end=ends, again=st.none() | writes)
    def kill_later(self, first: int, end: End, again: int | None) -> None:
        self.arm((first, end), *([(again, end)] if again is not None else []))

    @rule()
    def stop_and_start(self) -> None:
        self.restart()

    # What must hold

    def _transactions(self) -> list[Transaction]:
        found = list(self.others)
        for one in self.producers.values():
            found += one.done
            found += [one.staged] if one.staged is not None else []
        return found

    def check_topic(self, topic: str, found: list[str]) -> None:
        """Other publishers' messages are in their order; transactions are whole, and once."""
        assert len(set(found)) == len(found), f"{topic}: {found}"
        for one in self._transactions():
            mine = [value for name, value in one.rows if name == topic]
            seen = [value for value in found if value in set(mine)]
            if not one.is_asked:
                assert not seen, f"{one.key} was refused, and {topic} has {seen}"
            elif not one.is_torn:
                assert seen in ([], mine), f"{one.key}: {topic} has {seen} of {mine}"
                assert seen == mine or one.offsets is None, (
                    f"{one.key} was answered: {topic}, {found}"
                )

    def check_all(self) -> None:
        shown = {topic: self.read(topic) for topic in self.epochs}
        for topic, found in shown.items():
            self.check_topic(topic, found)
        for one in self._transactions():
            if one.is_asked and not one.is_torn:
                names = set(dict(one.rows))
                there = {topic for topic in names if set(shown[topic]) & {v for _, v in one.rows}}
                assert there in (set(), names), f"{one.key}: only in {there} of {names}"

    def restarted(self) -> None:
        self.check_all()

    def _check_found(self, key: tuple[str, int], found: list[str], start: int) -> None:
        """Messages of transactions are between those of others."""
        others = {value for one in self._transactions() for _, value in one.rows}
        plain = [value for value in found if value not in others]
        sent = self.sent[key]
        assert plain == sent[: len(plain)], f"{key}: {plain} of {sent}"
        assert len(plain) >= self.receipted[key], f"{key}: receipted messages are gone"
        del sent[len(plain) :]
        self.receipted[key] = len(plain)

    def topic_is_gone(self, topic: str, epoch: int) -> None:
        self._tear(topic)

    def teardown(self) -> None:
        try:
            if hasattr(self, "life"):
                self.arm()
                # First: each commit of another producer may make the bus forget one of these.
                self.do(self._ask_again)
                for name in self.producers:
                    self.commit(name)
                self.do(self._check_now)
        finally:
            super().teardown()

    async def _ask_again(self) -> None:
        """Ask for single batches that had no answer, the newest first.

        The bus forgets the oldest of them beyond PRODUCERS_MAX: whoever asks later than that makes
        them twice.
        """
        known = sum(
            bool(one.done) or (one.staged is not None and one.staged.is_asked)
            for one in self.producers.values()
        )
        for one in reversed(self.others):
            known += one.is_asked
            if known > PRODUCERS_MAX:
                return
            if one.offsets is None and one.is_asked:
                await self._commit(one)

    async def _check_now(self) -> None:
        self.check_all()


def test_transactions_are_done_once_whatever_happens() -> None:
    run_model(Transactions, examples=60, steps=40)
