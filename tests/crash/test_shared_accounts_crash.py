"""Accounts of a cluster: no node undoes what another did, wherever a node dies or is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from shared_kit import FakeCluster, FakeNode

from polybus.batch import Batch
from polybus.errors import StorageError, UsageError
from polybus.services import cluster_table
from polybus.services.accounts import accounts as accounts_module
from polybus.services.accounts import configs, settings
from polybus.services.accounts.records import Account
from polybus.services.cluster_table import ClusterEntry

pytestmark = pytest.mark.asyncio

CONFIG = '[[permissions]]\naccount = "shop"\ntopics = "z"\nrights = ["subscribe"]\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead node waits for takes no time."""
    monkeypatch.setattr(cluster_table, "WRITE_TIMEOUT_S", 0.2)


@contextlib.asynccontextmanager
async def cluster(folder: Path, count: int = 2) -> AsyncIterator[list[FakeNode]]:
    made = FakeCluster()
    nodes = [
        FakeNode(made, folder / f"{number}", accounts={"default": "open"})
        for number in range(count)
    ]
    try:
        yield nodes
    finally:
        for node in (*nodes, *made.nodes):
            node.kill()
            node.accounts.close()


async def settled() -> None:
    """Let everything happen that has begun."""
    for _ in range(20):
        await asyncio.sleep(0)


def later(node: FakeNode) -> FakeNode:
    """A node that starts after compaction."""
    node.cluster.compact()
    return FakeNode(node.cluster, node.context.data)


def shown(node: FakeNode) -> dict[str, Account]:
    return dict(node.store.accounts)


async def in_thread(work: Callable[..., object], *given: object) -> None:
    await asyncio.to_thread(work, *given)


class Beside:
    """Begins some work before the n-th write of any node."""

    def __init__(
        self, cluster: FakeCluster, before: int, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._cluster, self._store = cluster, cluster.store
        self._left = before
        self._work = work
        cluster.store = self._count  # type: ignore[method-assign]

    def _count(self, batch: Batch) -> None:
        if self._left == 0:
            self.task = asyncio.create_task(self._work())
        self._left -= 1
        self._store(batch)

    async def ended(self) -> None:
        if self.task is not None:
            await self.task
        self._cluster.store = self._store  # type: ignore[method-assign]


async def test_deleting_an_account_does_not_undo_what_another_node_changes_meanwhile(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (a, b):
        for name in ("first", "second", "gone"):
            await a.accounts.create(name)
        for owner in ("first", "second"):
            await in_thread(a.store.grant, owner, "gone", "x", ["subscribe"])
        token = await asyncio.to_thread(a.store.make_token, "second")
        identity = a.store.accounts["second"].tokens[0].id
        # Another node revokes the token between any two writes of the deletion.
        for before in itertools.count():
            revoke = functools.partial(in_thread, b.store.revoke_token, "second", identity)
            beside = Beside(a.cluster, before, revoke)
            await a.accounts.remove("gone")
            await beside.ended()
            if beside.task is None:
                break
            for node in (a, b, later(b)):
                assert node.store.find_token(token) is None
                assert "gone" not in node.store.accounts
                assert not any(one.grants for one in node.store.accounts.values())
            await a.accounts.create("gone")
            for owner in ("first", "second"):
                await in_thread(a.store.grant, owner, "gone", "x", ["subscribe"])
            token = await asyncio.to_thread(a.store.make_token, "second")
            identity = a.store.accounts["second"].tokens[0].id
        assert before > 3


async def test_a_node_that_starts_after_compaction_has_the_account_that_won(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (a, b):
        made = await asyncio.gather(
            asyncio.to_thread(a.store.create, "bob", "hash of a", ()),
            asyncio.to_thread(b.store.create, "bob", "hash of b", ()),
            return_exceptions=True,
        )
        won = [one for one in made if isinstance(one, Account)]
        lost = [one for one in made if isinstance(one, UsageError)]
        assert len(won) == 1 and [one.code for one in lost] == ["account.exists"]
        for node in (a, b, later(a)):
            assert node.store.accounts["bob"] == won[0]


async def test_a_late_write_that_lost_hides_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("bob")
        token = await asyncio.to_thread(a.store.make_token, "bob")
        a.holds_writes = a.holds_arrivals = True
        with pytest.raises(StorageError):
            await in_thread(a.store.set_password, "bob", "late")
        identity = b.store.accounts["bob"].tokens[0].id
        await in_thread(b.store.revoke_token, "bob", identity)
        a.heal()
        await settled()
        for node in (a, b, later(b)):
            assert node.store.find_token(token) is None
            assert node.store.accounts["bob"].password is None


async def test_a_change_that_counted_is_not_made_again_because_another_came_with_it(
    tmp_path: Path,
) -> None:
    """Both arrive in one fetch."""
    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("bob")
        a.holds_arrivals = True
        making = asyncio.create_task(asyncio.to_thread(a.store.make_token, "bob"))
        async with asyncio.timeout(10):
            while not b.store.accounts["bob"].tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await in_thread(b.store.set_password, "bob", "hash")
        a.heal()
        token = await making
        assert len(a.store.accounts["bob"].tokens) == 1
        assert b.store.find_token(token) is not None


async def test_entries_that_do_not_count_any_more_disappear(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("bob")
        for number in range(10):
            node = (a, b)[number % 2]
            await in_thread(node.store.set_password, "bob", f"hash {number}")
        await settled()
        left = [one for one in a.cluster.compacted() if one.key.startswith(b"account/bob/")]
        # The last one, and the one before it, which the last change was about to remove.
        assert len(left) <= 2


async def test_an_entry_that_cannot_be_read_goes_with_its_account(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (a, b):
        await a.cluster_table.write([ClusterEntry("account", "bob/x", b"{")])
        assert set(b.store.damaged) == {"bob"}
        await b.accounts.remove("bob")
        for node in (a, b, later(a)):
            assert not node.store.damaged and "bob" not in node.store.accounts


@pytest.mark.parametrize("step", ["begin_delete", "delete_topic", "delete"])
async def test_a_slow_deletion_leaves_an_account_that_was_created_again_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async with cluster(tmp_path) as (a, b):
        for name in ("other", "shop"):
            await a.accounts.create(name)
        apart = a.accounts.apart
        made: list[Account] = []

        async def create_again() -> None:
            await b.accounts.remove("shop")
            made.append(await b.accounts.create("shop", "secret"))
            await in_thread(b.store.grant, "other", "shop", "x", ["subscribe"])

        async def slow(change: Callable[..., Any], *given: Any) -> Any:
            is_now = change.__name__ == step and not made
            if is_now and step == "delete":
                await create_again()
            found = await apart(change, *given)
            if is_now and step != "delete":
                await create_again()
            return found

        monkeypatch.setattr(a.accounts, "apart", slow)
        with pytest.raises(UsageError) as refused:
            await a.accounts.remove("shop")
        assert refused.value.code == "account.unknown"
        await settled()
        for node in (a, b, later(b)):
            assert node.store.accounts["shop"] == made[0] and not node.store.closing
            assert [grant.to for grant in node.store.accounts["other"].grants] == ["shop"]
            assert len([one for one in node.log.topics() if one.startswith("shop/")]) == 3


async def test_two_nodes_delete_an_account_together(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("shop")
        found = await asyncio.gather(
            *(node.accounts.remove("shop") for node in (a, b)), return_exceptions=True
        )
        assert None in found
        assert {one.code for one in found if isinstance(one, UsageError)} <= {"account.unknown"}
        await settled()
        for node in (a, b, later(b)):
            assert "shop" not in node.store.accounts and not node.store.closing
            assert not [one for one in node.log.topics() if one.startswith("shop/")]


async def test_topics_of_a_file_do_not_stop_the_loop_and_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(wanted: object) -> None:
        raise StorageError("log.unreachable", "the brokers are gone")

    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("third")
        write_config(b, 'topics = ["x", "y"]')
        with monkeypatch.context() as broken:
            broken.setattr(b.log, "create_topics", fail)
            await b.accounts._look()
        assert "brokers" in b.accounts.configs.problems["third"]
        await b.accounts._look()
        assert not b.accounts.configs.problems
        for node in (a, b):
            assert {"third/x", "third/y"} <= set(node.log.topics())


async def test_a_topic_that_kafka_refuses_is_not_asked_for_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(wanted: object) -> None:
        asked.append(wanted)
        raise StorageError("log.refused", "a policy of the brokers")

    def fail() -> None:
        raise StorageError("log.unreachable", "the brokers are gone")

    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("third")
        write_config(b, 'topics = ["x"]')
        with monkeypatch.context() as broken:
            broken.setattr(b.log, "create_topics", refuse)
            # What is asked after it must not hide the refusal.
            broken.setattr(b.accounts.store, "catch_up", fail)
            await b.accounts._look()
            await b.accounts._look()
            assert len(asked) == 1
            assert "policy" in b.accounts.configs.problems["third"]
            write_config(b, 'topics = ["x", "y"]')
            await b.accounts._look()
            assert len(asked) == 2
        monkeypatch.setattr(configs, "REFUSED_S", 0.0)
        b.accounts.configs.put_off("third", settings.state_of(b.accounts.store.data, "third"))
        await b.accounts._look()
        assert not b.accounts.configs.problems
        assert {"third/x", "third/y"} <= set(b.log.topics())


async def test_topics_of_a_file_do_not_outlive_an_account_that_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("third")
        write_config(b, 'topics = ["x"]')
        create = b.log.create_topics
        loop = asyncio.get_running_loop()

        def slow(wanted: Any) -> None:
            asyncio.run_coroutine_threadsafe(a.accounts.remove("third"), loop).result()
            create(wanted)

        monkeypatch.setattr(b.log, "create_topics", slow)
        await b.accounts._look()
        await settled()
        for node in (a, b):
            assert not [one for one in node.log.topics() if one.startswith("third/")]
        assert not b.accounts.configs.problems


async def test_a_new_account_gets_nothing_of_files_that_only_another_node_has(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (a, b):
        await a.accounts.create("third")
        write_config(b, CONFIG)
        await b.accounts._look()
        assert "shop" in b.accounts.configs.granted
        # The node with the file cannot write what it severs.
        b.holds_writes = True
        await asyncio.to_thread(a.store.create, "shop", None, ())
        assert "shop" not in b.accounts.configs.granted
        assert b.store.accounts["third"].severed == ()
        await ended(b)
        b._held_writes.clear()
        b.holds_writes = False
        assert b.accounts.configs.excluded() == {"shop"}
        b.accounts._on_sweep()
        await ended(b)
        assert b.accounts.configs.excluded() == set()
        assert "shop" not in b.accounts.configs.granted
        for node in (a, b, later(b)):
            assert node.store.accounts["third"].severed == ("shop",)


async def test_a_node_that_starts_severs_an_account_that_is_being_deleted(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (a, b):
        for name in ("third", "shop"):
            await a.accounts.create(name)
        write_config(b, CONFIG)
        b.kill()
        await in_thread(a.store.begin_delete, "shop")
        started = later(b)
        await started.accounts.start()
        await ended(started)
        assert a.store.accounts["third"].severed == ("shop",)


async def ended(node: FakeNode) -> None:
    """Let it sever what it has begun to."""
    while tasks := list(node.accounts._severing.values()):
        await asyncio.wait(tasks)


async def test_more_changes_at_once_than_there_are_threads_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_table, "WRITE_TIMEOUT_S", 60.0)
    created = [f"account{number}" for number in range(40)]
    async with cluster(tmp_path) as (a, b):
        async with asyncio.timeout(60):
            await asyncio.gather(*map(a.accounts.create, created))
        await settled()
        assert set(created) <= b.store.accounts.keys()


# Deaths at every write


def write_config(node: FakeNode, text: str) -> None:
    folder = node.context.data / "accounts" / "third"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text)


async def prepare(a: FakeNode, b: FakeNode) -> None:
    for name in ("shop", "other", "third"):
        await a.accounts.create(name)
    for topic in ("shop/x", "shop/y", "other/z", "third/z"):
        await in_thread(a.log.create_topic, topic)
    await in_thread(a.store.grant, "other", "shop", "z", ["subscribe"])
    await in_thread(a.store.grant, "shop", "other", "x", ["publish"])
    write_config(b, CONFIG)
    await b.accounts._look()


def check(node: FakeNode, *, is_done: bool) -> None:
    """No topic and no right outlives the account."""
    topics = {one for one in node.log.topics() if one.startswith("shop/")}
    grants = {
        owner
        for owner, one in node.store.accounts.items()
        if any(grant.to == "shop" for grant in one.grants)
    }
    if is_done:
        assert "shop" not in node.store.accounts
    if "shop" not in node.store.accounts:
        assert not topics and not grants
    elif topics != {"shop/x", "shop/y", "shop/$alerts", "shop/$events", "shop/$stats"}:
        # Its deletion has begun, and nobody uses it any more.
        assert "shop" in node.store.closing
        with pytest.raises(UsageError):
            node.accounts.check_topics("shop")
    assert {"other/z", "third/z"} <= set(node.log.topics())


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_node_that_dies_at_any_write_of_a_deletion_leaves_no_topic_and_no_right(
    tmp_path: Path, is_stored: bool
) -> None:
    steps = set()
    for step in itertools.count():
        async with cluster(tmp_path / f"{step}") as (a, b):
            await prepare(a, b)
            a.writes, a.dies_at, a.is_stored = 0, step, is_stored
            is_done = False
            with contextlib.suppress(StorageError, UsageError):
                await a.accounts.remove("shop")
                is_done = True
            died = a.is_dead
            a.kill()
            await settled()
            for node in (b, later(b)):
                check(node, is_done=is_done)
                assert shown(node) == shown(b)
            steps.add(("shop" in b.store.accounts, "shop" in b.store.closing))
            if "shop" in b.store.accounts:
                await b.accounts.remove("shop")
                check(b, is_done=True)
            await b.accounts.create("shop")
            assert "shop" not in b.accounts.configs.granted
        if not died:
            break
    assert steps >= {(True, True), (False, False)}
    assert step > 8


CHANGES: dict[str, Callable[[FakeNode], object]] = {
    "create": lambda node: node.store.create("new", "hash", ()),
    "password": lambda node: node.store.set_password("bob", "other"),
    "grant": lambda node: node.store.grant("bob", "eve", "x", ["publish"]),
    "sever": lambda node: node.store.sever("bob", "eve"),
}


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_node_that_dies_at_any_write_of_a_change_leaves_all_of_it_or_nothing(
    tmp_path: Path, change: str, is_stored: bool
) -> None:
    for step in itertools.count():
        async with cluster(tmp_path / f"{step}") as (a, b):
            await a.accounts.create("bob")
            await a.accounts.create("eve")
            before = shown(b)
            a.writes, a.dies_at, a.is_stored = 0, step, is_stored
            is_done = False
            with contextlib.suppress(StorageError):
                await in_thread(CHANGES[change], a)
                is_done = True
            died = a.is_dead
            a.kill()
            await settled()
            assert shown(later(b)) == shown(b)
            assert is_done <= (shown(b) != before)
            assert (shown(b) != before) == (is_stored or step > 0)
            if not is_done:
                with contextlib.suppress(UsageError):
                    # It may have been done.
                    await in_thread(CHANGES[change], b)
            assert shown(b) != before
        if not died:
            break
    assert step > 0


async def test_a_topic_that_another_node_creates_during_the_deletion_does_not_outlive_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node knows nothing of the deletion while it creates the topic."""
    for seen in (False, True):
        async with cluster(tmp_path / f"{seen}") as (a, b):
            await prepare(a, b)
            b.holds_arrivals = True
            if seen:
                # The deletion finds the topic.
                await in_thread(a.log.create_topic, "shop/late")
                await a.accounts.remove("shop")
            else:
                await a.accounts.remove("shop")
                await in_thread(a.log.create_topic, "shop/late")
            b.heal()
            with pytest.raises(UsageError) as refused:
                await b.accounts.keep_topics("shop", ["shop/late"])
            assert refused.value.code == "account.unknown"
            assert not [one for one in b.log.topics() if one.startswith("shop/")]

    async def nothing(self: object, topics: object) -> None: ...

    async with cluster(tmp_path / "busy") as (a, b):
        await prepare(a, b)
        monkeypatch.setattr(accounts_module.Accounts, "_delete_topics", nothing)
        with pytest.raises(UsageError) as refused:
            await a.accounts.remove("shop")
        assert refused.value.code == "account.in-use"
        assert "shop" in b.store.closing
