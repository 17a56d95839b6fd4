"""Sessions of two nodes: numbers keep their meaning, and packs come once, whatever is lost.

Nodes are cut off, lose answers and die, and the order of their writes is that of a fake cluster.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from model_kit import run_model, stepped
from model_life import VirtualLoop
from shared_kit import FakeCluster, FakeNode

from polybus.errors import StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.log.memory import MemoryLog
from polybus.services.sessions.session import Session

CLIENTS_MAX = 2
nodes = st.integers(0, 1)
slots = st.integers(0, CLIENTS_MAX - 1)


class Client:
    """A client of one session: what it was promised, and what it has seen."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.promised: dict[str, bool] = {}
        """By the value of a pack: whether it must come; it may otherwise."""
        self.numbers: dict[str, int] = {}
        self.packs: dict[int, bytes] = {}
        self.may_be_gone = False

    def see(self, packs: list[tuple[int, bytes]]) -> None:
        for number, pack in packs:
            assert number, f"a notice: {pack!r}"
            assert self.packs.setdefault(number, pack) == pack
            for _, value in json.loads(pack):
                assert value in self.promised, f"{value} was for somebody else"
                at = self.numbers.setdefault(value, number)
                assert at == number, f"{value} has the numbers {at} and {number}"

    def check(self) -> None:
        """Everything has come that must."""
        missing = {one for one, is_sure in self.promised.items() if is_sure} - self.numbers.keys()
        assert not missing, f"{missing} did not come: {self.numbers}"
        assert sorted(self.packs) == [*range(1, len(self.packs) + 1)]


class Nodes(RuleBasedStateMachine):
    """The rules."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="polybus-nodes-"))
        self.loop = VirtualLoop()
        self.values = (f"v{number}" for number in itertools.count(1))
        self.clients: list[Client] = []
        self.gone: list[str] = []
        # Broadcasts that may come late, and so to sessions that are newer.
        self.unsure: list[str] = []

    def do(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Run it; False if the cluster could not be reached."""
        asyncio.set_event_loop(self.loop)

        async def done() -> bool:
            try:
                await work()
            except StorageError:
                return False
            return True

        return self.loop.run_until_complete(done())

    @initialize()
    def set_up(self) -> None:
        async def work() -> None:
            self.cluster = FakeCluster()
            self.nodes = [await self.started() for _ in range(2)]
            for topic in ("a", "b"):
                await asyncio.sleep(0)
                self.create(topic)

        assert self.do(work)
        self.open(0)

    def create(self, topic: str) -> None:
        def happen(node: FakeNode) -> None:
            MemoryLog.create_topics(node.log, {topic: TopicSettings()})
            node.bus.topic_changed(topic, exists=True)

        self.cluster.happen(happen)

    async def started(self) -> FakeNode:
        self.cluster.compact()
        return await FakeNode(self.cluster, self.folder / f"{next(self.cluster.names)}").start()

    def client(self, slot: int) -> Client:
        return self.clients[slot % len(self.clients)]

    async def session(self, node: FakeNode, client: Client) -> Session | None:
        found = await node.inboxes.find_anywhere(client.key)
        if found is None:
            assert client.may_be_gone, "the session is gone"
            self.clients.remove(client)
        return found

    # Clients

    @precondition(lambda self: len(self.clients) < CLIENTS_MAX)
    @rule(at=nodes)
    def open(self, at: int) -> None:
        async def work() -> None:
            key = await self.nodes[at].inboxes.create(["a", "b"], None, "latest")
            client = Client(key)
            client.promised |= dict.fromkeys(self.unsure, False)
            self.clients.append(client)

        self.do(work)

    @precondition(lambda self: self.clients)
    @rule(at=nodes, slot=slots, confirms=st.booleans())
    def poll(self, at: int, slot: int, confirms: bool) -> None:
        client, node = self.client(slot), self.nodes[at]

        async def work() -> None:
            session = await self.session(node, client)
            if session is not None:
                packs = await node.inboxes.collect(session, 0)
                client.see(packs)
                if confirms and packs:
                    node.inboxes.confirm(session, [packs[0][0]])

        self.do(work)

    @precondition(lambda self: self.clients)
    @rule(at=nodes, slot=slots)
    def post(self, at: int, slot: int) -> None:
        client, node, value = self.client(slot), self.nodes[at], next(self.values)

        async def work() -> None:
            session = await self.session(node, client)
            if session is not None:
                client.promised[value] = False
                await node.inboxes.post([session], f'[["direct","{value}"]]'.encode())
                client.promised[value] = not client.may_be_gone

        self.do(work)

    @rule(at=nodes)
    def broadcast(self, at: int) -> None:
        node, value = self.nodes[at], next(self.values)
        for client in self.clients:
            client.promised[value] = False

        async def work() -> None:
            count = await node.inboxes.broadcast(f'[["all","{value}"]]'.encode())
            assert count >= sum(not one.may_be_gone for one in self.clients)
            for client in self.clients:
                client.promised[value] = True

        if not self.do(work):
            self.unsure.append(value)

    @rule(topic=st.sampled_from(("a", "b")))
    def publish(self, topic: str) -> None:
        value = next(self.values)

        async def work() -> None:
            self.cluster.publish(topic, f'"{value}"')

        for client in self.clients:
            client.promised[value] = True
        self.do(work)

    @precondition(lambda self: len(self.clients) > 1)
    @rule(at=nodes, slot=slots)
    def end(self, at: int, slot: int) -> None:
        client, node = self.client(slot), self.nodes[at]

        async def work() -> None:
            session = await self.session(node, client)
            if session is not None:
                client.may_be_gone = True
                await node.inboxes.delete(session)
                self.clients.remove(client)
                self.gone.append(client.key)

        self.do(work)

    # Faults

    @rule(at=nodes, arrivals=st.booleans(), writes=st.booleans())
    def cut(self, at: int, arrivals: bool, writes: bool) -> None:
        self.nodes[at].holds_arrivals |= arrivals
        self.nodes[at].holds_writes |= writes

    @rule(at=nodes)
    def heal(self, at: int) -> None:
        async def work() -> None:
            self.nodes[at].heal()
            await asyncio.sleep(0)

        self.do(work)

    @rule(at=nodes)
    def kill(self, at: int) -> None:
        async def work() -> None:
            self.nodes[at].kill()
            self.nodes[at] = await self.started()

        self.do(work)

    @rule(seconds=st.sampled_from((0.2, 20.0)))
    def wait(self, seconds: float) -> None:
        async def work() -> None:
            await asyncio.sleep(seconds)

        self.do(work)

    def teardown(self) -> None:
        try:
            if hasattr(self, "cluster"):
                self.check_all()
        finally:
            self.do(self.end_all)
            self.loop.close()
            asyncio.set_event_loop(None)
            shutil.rmtree(self.folder, ignore_errors=True)

    async def end_all(self) -> None:
        for node in self.nodes:
            node.kill()
        # What dead nodes wait for never comes.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def check_all(self) -> None:
        """Everything is whole again: nothing is missing at any node, and none comes twice."""

        async def work() -> None:
            for node in self.nodes:
                node.heal()
            await asyncio.sleep(30)
            self.nodes.append(await self.started())
            for node, _ in itertools.product(self.nodes, range(3)):
                for client in list(self.clients):
                    session = await self.session(node, client)
                    if session is not None:
                        client.see(await node.inboxes.collect(session, 0))
            for client in self.clients:
                client.check()
            for node, key in itertools.product(self.nodes, self.gone):
                assert await node.inboxes.find_anywhere(key) is None

        assert self.do(work)
        versions: dict[bytes, int] = {}
        for record in self.cluster.history:
            if record.key.startswith(b"session/") and record.value is not None:
                version = msgspec.msgpack.decode(record.value)[0]
                # Compaction keeps the last one, which must not be another that lost to the first.
                assert versions.get(record.key, 0) < version
                versions[record.key] = version


@pytest.mark.slow
def test_two_nodes_give_every_client_its_packs_once_whatever_is_lost() -> None:
    run_model(Nodes, examples=100, steps=20)


@contextmanager
def model() -> Iterator[Nodes]:
    with stepped(Nodes) as state:
        state.set_up()
        yield state


def test_a_save_counts_only_if_it_is_what_the_cluster_stored() -> None:
    """The first save comes late, together with a later one of the same session."""
    with model() as nodes:
        nodes.cut(0, arrivals=False, writes=True)
        nodes.post(0, 0)
        nodes.post(0, 0)
        nodes.heal(0)
        nodes.poll(0, 0, confirms=False)
        nodes.poll(1, 0, confirms=False)
        nodes.kill(1)
        nodes.poll(1, 0, confirms=False)


def test_an_end_counts_only_if_it_is_what_the_cluster_stored() -> None:
    with model() as nodes:
        nodes.open(0)
        nodes.cut(0, arrivals=False, writes=True)
        nodes.post(0, 1)
        nodes.end(0, 1)
        nodes.heal(0)
        nodes.wait(20.0)
        nodes.end(1, 1)


def test_a_pack_that_was_saved_before_its_session_moved_is_not_posted_again() -> None:
    """The save and the claim of another node arrive together."""
    with model() as nodes:
        client, (a, b) = nodes.clients[0], nodes.nodes

        async def work() -> None:
            session = await a.inboxes.find_anywhere(client.key)
            assert session is not None
            a.holds_arrivals = True
            client.promised["once"] = True
            posting = asyncio.create_task(a.inboxes.post([session], b'[["direct","once"]]'))
            await asyncio.sleep(0.5)
            assert await b.inboxes.find_anywhere(client.key) is not None
            a.heal()
            await posting

        assert nodes.do(work)


def test_a_broadcast_reaches_a_session_whose_node_dies_before_it_saves_it() -> None:
    with model() as nodes:
        nodes.open(1)
        nodes.cut(0, arrivals=True, writes=False)
        nodes.broadcast(1)
        nodes.kill(0)
        nodes.poll(1, 0, confirms=False)
        nodes.poll(1, 1, confirms=True)
        nodes.broadcast(0)
        nodes.poll(0, 0, confirms=False)


def test_a_broadcast_disappears_when_every_session_has_heard_it() -> None:
    with model() as nodes:
        nodes.broadcast(1)
        nodes.kill(1)
        assert any(one.key.startswith(b"broadcast/") for one in nodes.cluster.compacted())

        async def wait() -> None:
            for _ in range(90):
                await asyncio.sleep(10)
                # Its client is there.
                await nodes.nodes[0].inboxes.find_anywhere(nodes.clients[0].key)

        assert nodes.do(wait)
        assert not any(one.key.startswith(b"broadcast/") for one in nodes.cluster.compacted())


async def packs_of(node: FakeNode, key: str) -> list[str]:
    session = await node.inboxes.find_anywhere(key)
    assert session is not None
    return [json.loads(pack)[0][1] for _, pack in await node.inboxes.collect(session, 0)]


def stored(cluster: FakeCluster) -> list[str]:
    found = [one.value for one in cluster.compacted() if one.key.startswith(b"broadcast/")]
    return [json.loads(msgspec.msgpack.decode(one)[1])[0][1] for one in found if one]


async def two_nodes(folder: Path, packs_max: int) -> tuple[FakeNode, FakeNode]:
    cluster = FakeCluster()
    limits: dict[str, Any] = {"msgstream": {"session-packs-max": packs_max}}
    a, b = [await FakeNode(cluster, folder / f"{one}", **limits).start() for one in range(2)]
    return a, b


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(work())
    finally:
        loop.close()
        asyncio.set_event_loop(None)


def test_broadcasts_beyond_what_a_session_holds_disappear(tmp_path: Path) -> None:
    async def work() -> None:
        a, b = await two_nodes(tmp_path, packs_max=2)
        # It hears nothing, so that no broadcast disappears because all have heard it.
        await b.inboxes.create([], None, "latest")
        b.holds_arrivals = b.holds_writes = True
        for number in range(5):
            await a.inboxes.broadcast(b'[["all","a%d"]]' % number)
        await asyncio.sleep(30)
        assert stored(a.cluster) == ["a3", "a4"]
        a.kill()
        b.kill()

    in_virtual_time(work)


def test_a_broadcast_disappears_although_an_older_one_of_another_node_stays(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        a, b = await two_nodes(tmp_path, packs_max=10)
        await b.inboxes.broadcast(b'[["all","b"]]')
        b.kill()
        await a.inboxes.broadcast(b'[["all","a"]]')
        await asyncio.sleep(30)
        assert stored(a.cluster) == ["b"]
        await asyncio.sleep(600)
        assert stored(a.cluster) == []
        a.kill()

    in_virtual_time(work)


def test_a_node_forgets_a_broadcast_that_another_has_removed(tmp_path: Path) -> None:
    async def work() -> None:
        a, b = await two_nodes(tmp_path, packs_max=10)
        await a.inboxes.broadcast(b'[["all","a"]]')
        assert b.inboxes._broadcasts.since(0, "default")
        await asyncio.sleep(30)
        assert stored(a.cluster) == []
        assert not b.inboxes._broadcasts.since(0, "default")
        a.kill()
        b.kill()

    in_virtual_time(work)


def test_a_flood_of_one_account_takes_no_broadcast_from_another(tmp_path: Path) -> None:
    async def work() -> None:
        a, b = await two_nodes(tmp_path, packs_max=3)
        key = await b.inboxes.create([], None, "latest")
        # Its node dies before it has heard of any.
        b.holds_arrivals = b.holds_writes = True
        await a.inboxes.broadcast(b'[["all","mine"]]', "default")
        for number in range(10):
            await a.inboxes.broadcast(b'[["all","%d"]]' % number, "other")
        b.kill()
        assert await packs_of(a, key) == ["mine"]
        a.kill()

    in_virtual_time(work)


def test_a_delete_during_an_outage_is_not_undone_by_a_poll() -> None:
    with model() as nodes:
        client, a = nodes.clients.pop(), nodes.nodes[0]

        async def work() -> None:
            session = await a.inboxes.find_anywhere(client.key)
            assert session is not None
            a.holds_writes = True
            deleting = asyncio.create_task(a.inboxes.delete(session))
            await asyncio.sleep(0.1)
            assert await a.inboxes.find_anywhere(client.key) is None
            a.heal()
            await deleting
            nodes.gone.append(client.key)

        assert nodes.do(work)


# Deaths at every write


def save(nodes: Nodes) -> None:
    nodes.post(0, 0)
    nodes.poll(0, 0, confirms=True)
    nodes.publish("a")
    nodes.poll(0, 0, confirms=False)
    nodes.broadcast(0)
    nodes.poll(0, 0, confirms=True)
    nodes.wait(0.2)


def claim(nodes: Nodes) -> None:
    nodes.post(1, 0)
    nodes.poll(1, 0, confirms=True)
    nodes.post(0, 0)
    nodes.poll(0, 0, confirms=False)
    nodes.poll(1, 0, confirms=False)


def end(nodes: Nodes) -> None:
    nodes.open(0)
    nodes.post(1, 1)
    nodes.end(0, 1)


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(("life", "dying"), [(save, 0), (claim, 0), (claim, 1), (end, 0), (end, 1)])
def test_a_node_that_dies_at_any_write_leaves_what_its_client_may_have_seen(
    life: Callable[[Nodes], None], dying: int, is_stored: bool
) -> None:
    for step in itertools.count():
        with model() as nodes:
            node = nodes.nodes[dying]
            node.writes, node.dies_at, node.is_stored = 0, step, is_stored
            life(nodes)
            is_over = not node.is_dead
            nodes.kill(dying)
            for client in list(nodes.clients):
                # The answer to a dead node's write is not known.
                nodes.poll(1 - dying, nodes.clients.index(client), confirms=False)
        if is_over:
            break
    assert step > 0


# Limits


async def refusal(node: FakeNode) -> str:
    with pytest.raises(UsageError) as refused:
        await node.inboxes.create([], None, "latest")
    return refused.value.code


@pytest.mark.asyncio
async def test_the_limit_of_sessions_counts_those_of_all_nodes(tmp_path: Path) -> None:
    cluster = FakeCluster()
    limits: dict[str, Any] = {"msgstream": {"sessions-max": 3}}
    a, b = [await FakeNode(cluster, tmp_path / f"{one}", **limits).start() for one in range(2)]
    keys = [await node.inboxes.create([], None, "latest") for node in (a, b)]
    # A session that moves counts once.
    assert await b.inboxes.find_anywhere(keys[0]) is not None
    both = await asyncio.gather(
        *(a.inboxes.create([], None, "latest") for _ in range(2)), return_exceptions=True
    )
    assert sorted(isinstance(one, UsageError) for one in both) == [False, True]
    assert [await refusal(node) for node in (a, b)] == ["session.too-many"] * 2
    found = await a.inboxes.find_anywhere(keys[1])
    assert found is not None
    await a.inboxes.delete(found)
    await b.inboxes.create([], None, "latest")
    for node in (a, b):
        node.kill()


@pytest.mark.asyncio
async def test_large_sessions_are_saved_apart_from_others(tmp_path: Path) -> None:
    """Entries that are too large for one message of the cluster are several."""
    cluster = FakeCluster()
    limits: dict[str, Any] = {"limits": {"message-bytes-max": 2 << 20}}
    a, b = [await FakeNode(cluster, tmp_path / f"{one}", **limits).start() for one in range(2)]
    sizes: list[int] = []
    write = a.write

    def measured(batch: Any) -> None:
        sizes.append(batch.value_bytes)
        write(batch)

    a.write = measured  # type: ignore[method-assign]
    keys = [await a.inboxes.create([], None, "latest") for _ in range(4)]
    pack = b'[["direct","%s"]]' % (b"x" * 900_000)
    sessions = [await a.inboxes.find_anywhere(key) for key in keys]
    for _ in range(4):
        await a.inboxes.post([one for one in sessions if one is not None], pack)
    # Two packs fit into a message, so a session keeps two.
    assert 1_800_000 < max(sizes) < (2 << 20) + 10_000
    for key in keys:
        session = await b.inboxes.find_anywhere(key)
        assert session is not None
        assert [one[1] for one in await b.inboxes.collect(session, 0)][-2:] == [pack] * 2
    for node in (a, b):
        node.kill()
