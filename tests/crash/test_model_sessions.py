"""Sessions against what each client must be given (model_client.py), with ends at any write."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from disk_kit import End
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from model_client import Client, Following, Listener
from model_kit import Model, ends, run_model, stepped, topics
from model_life import TOPICS

pytestmark = pytest.mark.slow

SESSIONS_MAX = 2
TTL_S = 60.0
SAVED_S = 1.1

slots = st.integers(0, SESSIONS_MAX - 1)
some_topics = st.lists(topics, unique=True, max_size=len(TOPICS))
writes = st.integers(0, 12)


class Sessions(Model):
    """The rules."""

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.gone: list[str] = []

    @initialize(packs_max=st.sampled_from((3, 6, 1000)), is_small=st.booleans())
    def set_up(self, packs_max: int, is_small: bool) -> None:
        self.begin(
            msgstream={"session-packs-max": packs_max, "session-ttl-s": TTL_S},
            retention={"bytes": 1} if is_small else {},
        )
        self.open(list(TOPICS), "latest", 0)

    # Sessions

    @precondition(lambda self: len(self.clients) < SESSIONS_MAX)
    @rule(
        names=some_topics,
        where=st.sampled_from(("latest", "earliest", "position")),
        at=st.integers(0, 5),
    )
    def open(self, names: list[str], where: str, at: int) -> None:
        names = [one for one in names if one in self.epochs]
        if where == "position":
            del names[1:]
            where = where if names else "latest"

        async def work() -> None:
            inboxes = self.life.services.inboxes
            followed = []
            for topic in names:
                bounds = self.life.log.bounds(topic)
                offset = {"latest": bounds.stop, "earliest": bounds.start}.get(where)
                if offset is None:
                    offset = min(max(at, bounds.start), bounds.stop)
                followed.append(Following((topic, bounds.epoch), offset))
            text = f"{self.epochs[names[0]]}:{at}" if where == "position" else where
            key = await inboxes.create(names, None, text)
            self.clients.append(Client(key, followed))

        self.do(work)

    @precondition(lambda self: self.clients)
    @rule(slot=slots, names=some_topics)
    def follow(self, slot: int, names: list[str]) -> None:
        client = self.client(slot)
        names = [one for one in names if one in self.epochs]

        async def work() -> None:
            session = self.session(client)
            client.may_follow = names
            await self.life.services.inboxes.replace_topics(session, names)
            self.changed(client)

        self.do(work)

    def changed(self, client: Client) -> None:
        """The client follows the topics that it wanted."""
        assert client.may_follow is not None
        for one in client.followed:
            if one.stop is None and one.key[0] not in client.may_follow:
                one.stop = len(self.sent[one.key])
                # What it would have caught up with from the log does not come any more.
                one.is_left = True
        for topic in client.may_follow:
            if topic not in client.topics():
                key = (topic, self.epochs[topic])
                client.followed.append(Following(key, len(self.sent[key])))
        client.may_follow = None

    @precondition(lambda self: self.clients)
    @rule(slot=slots)
    def end(self, slot: int) -> None:
        client = self.client(slot)

        async def work() -> None:
            client.is_ending = True
            await self.life.services.inboxes.delete(self.session(client))
            self.gone.append(client.key)
            self.forget(client)

        self.do(work)

    # Messages

    @rule(
        batches=st.lists(st.tuples(topics, st.integers(1, 3)), min_size=1, max_size=3),
        receipt=st.booleans(),
    )
    def send(self, batches: list[tuple[str, int]], receipt: bool) -> None:
        batches = [one for one in batches if one[0] in self.epochs]

        async def work() -> None:
            if batches:
                await self.publish(batches, receipt=receipt)

        if self.do(work):
            self.check_woken({topic for topic, _ in batches})

    @rule(slot=slots, is_all=st.booleans())
    def post(self, slot: int, is_all: bool) -> None:
        clients = [one for one in self.clients if is_all or one is self.client(slot)]
        (value,) = self.new_values(1)

        async def work() -> None:
            inboxes = self.life.services.inboxes
            sessions = [self.session(one) for one in clients]
            for one in clients:
                one.posted[value] = False
            content = f'[["direct","{value}"]]'.encode()
            if is_all:
                assert await inboxes.broadcast(content) >= len(clients)
            else:
                await inboxes.post(sessions, content)
            for one in clients:
                one.posted[value] = True
                assert one.listener is None or one.listener.is_woken

        if clients:
            self.do(work)

    @rule(topic=topics)
    def delete_topic(self, topic: str) -> None:
        if topic not in self.epochs:
            return

        async def work() -> None:
            await self.delete(topic)

        epoch = self.epochs[topic]
        if self.do(work):
            self.topic_left(topic, epoch)

    def topic_left(self, topic: str, epoch: int) -> None:
        for client in self.clients:
            for one in client.followed:
                if one.key[0] == topic and one.stop is None:
                    one.stop = len(self.sent[one.key])
                    client.deletions[topic] += 1
                if one.key == (topic, epoch):
                    # What it has not taken yet is gone with the topic, and the notice says so.
                    one.is_left = True

    # Connections

    @precondition(lambda self: self.clients)
    @rule(slot=slots)
    def connect(self, slot: int) -> None:
        client = self.client(slot)
        client.listener = Listener()
        client.sent_to = 0
        self.life.services.inboxes.attach(self.session(client), client.listener)

    @precondition(lambda self: self.clients)
    @rule(slot=slots)
    def disconnect(self, slot: int) -> None:
        client = self.client(slot)
        if client.listener is not None:
            self.life.services.inboxes.detach(self.session(client), client.listener)
            client.listener = None

    @precondition(lambda self: self.clients)
    @rule(slot=slots, arrives=st.booleans(), quick=st.booleans())
    def receive(self, slot: int, arrives: bool, quick: bool) -> None:
        client = self.client(slot)

        async def work() -> None:
            await self.collect(client, arrives=arrives, quick=quick)

        self.do(work)

    async def collect(self, client: Client, *, arrives: bool = True, quick: bool = False) -> bool:
        """Whether something came that the client did not have."""
        inboxes = self.life.services.inboxes
        session = self.session(client)
        after = client.sent_to if client.listener is not None else 0
        packs = inboxes.collect_now(session, after) if quick else None
        if packs is None:
            packs = await inboxes.collect(session, after)
        if not arrives:
            # The connection is lost, and what was on it: also a notice, which is sent once.
            if packs and not packs[0][0]:
                client.take_notice(json.loads(packs[0][1]))
            if client.listener is not None:
                inboxes.detach(session, client.listener)
                client.listener = None
            return False
        before = client.taken
        client.take(packs, self.sent)
        if client.listener is not None:
            client.listener.is_woken = False
        if not after:
            client.is_restored = False
        client.check(self.sent, is_all=False)
        return client.taken > before

    @precondition(lambda self: self.clients)
    @rule(
        slot=slots, picked=st.lists(st.integers(0, 20), min_size=1, max_size=4), odd=st.booleans()
    )
    def confirm(self, slot: int, picked: list[int], odd: bool) -> None:
        client = self.client(slot)

        async def work() -> None:
            if client.is_restored:
                await self.collect(client)
            numbers = [client.taken - one for one in picked if client.taken - one > 0]
            wrong = [0, -1, client.taken + 1000, 1 << 50] if odd else []
            self.life.services.inboxes.confirm(self.session(client), [*wrong, *numbers])
            for number in numbers:
                client.confirmed.setdefault(number, False)

        self.do(work)

    # Time, stops and ends

    @rule(seconds=st.sampled_from((0.0, 0.01, SAVED_S, 12.0)))
    def wait(self, seconds: float) -> None:
        async def work() -> None:
            await self.pass_time(seconds + 3 * self.state_delay_s)
            if seconds >= SAVED_S:
                self.stopped()

        self.do(work)

    def stopped(self) -> None:
        """Everything was saved."""
        for client in self.clients:
            client.confirmed = dict.fromkeys(client.confirmed, True)
            client.firm = set(client.meaning)

    @rule()
    def expire(self) -> None:
        async def work() -> None:
            await self.pass_time(2 * TTL_S)

        self.clients = [one for one in self.clients if one.listener is not None]
        self.do(work)

    @precondition(lambda self: self.clients and self.epochs)
    @rule(slot=slots, count=st.integers(1, 3), quick=st.booleans(), end=ends)
    def kill_after_showing(self, slot: int, count: int, quick: bool, end: End) -> None:
        """What was shown is neither saved nor, perhaps, stored; other messages come after it."""
        topic = min(self.epochs)
        for _ in range(count):
            self.send([(topic, 1)], receipt=False)
            if self.clients:
                self.receive(slot, arrives=True, quick=quick)
        self.crash(end)
        self.send([(topic, 1)], receipt=True)
        if self.clients:
            self.receive(slot, arrives=True, quick=quick)

    @rule(first=writes, end=ends, again=st.none() | writes)
    def kill_later(self, first: int, end: End, again: int | None) -> None:
        self.arm((first, end), *([(again, end)] if again is not None else []))

    @rule()
    def stop_and_start(self) -> None:
        for client in self.clients:
            client.listener = None
        self.restart()

    def restarted(self) -> None:
        inboxes = self.life.services.inboxes
        for client in list(self.clients):
            client.listener = None
            client.is_restored = True
            client.sent_to = 0
            # The others may come again.
            client.confirmed = {number: True for number, sure in client.confirmed.items() if sure}
            session = inboxes.find(client.key)
            if client.is_ending and session is None:
                self.gone.append(client.key)
                self.forget(client)
                continue
            client.is_ending = False
            assert session is not None, "the session is gone"
            if client.may_follow is not None:
                if set(session.follows) != set(client.topics()):
                    self.changed(client)
                client.may_follow = None
            assert set(session.follows) == set(client.topics()), client
        for key in self.gone:
            assert inboxes.find(key) is None, "a deleted session came back"
        for client in self.clients:
            for one in client.followed:
                if one.stop is not None:
                    one.stop = min(one.stop, len(self.sent[one.key]))
                one.start = min(one.start, len(self.sent[one.key]))

    def topic_is_gone(self, topic: str, epoch: int) -> None:
        self.topic_left(topic, epoch)

    # What must hold

    def do(self, work: Callable[[], Awaitable[None]]) -> bool:
        for client in self.clients:
            # Only `expire` lets sessions expire.
            self.life.services.inboxes.find(client.key)
        return super().do(work)

    def client(self, slot: int) -> Client:
        return self.clients[slot % len(self.clients)]

    def forget(self, client: Client) -> None:
        self.clients = [one for one in self.clients if one is not client]

    def session(self, client: Client) -> Any:
        session = self.life.services.inboxes.find(client.key)
        assert session is not None, "the session is gone"
        return session

    def check_woken(self, names: set[str]) -> None:
        async def turn() -> None:
            await self.pass_time(0.001)

        self.do(turn)
        for client in self.clients:
            if client.listener is not None and names.intersection(client.topics()):
                assert client.listener.is_woken, "a connection was not woken"

    @precondition(lambda self: self.clients)
    @rule(slot=slots)
    def drain(self, slot: int) -> None:
        """A client takes and confirms everything: nothing is missing."""
        client = self.client(slot)

        self.disconnect(slot)

        async def work() -> None:
            is_more = True
            while is_more:
                is_more = await self.collect(client)
                numbers = list(client.meaning)
                self.life.services.inboxes.confirm(self.session(client), numbers)
                for number in numbers:
                    client.confirmed.setdefault(number, False)
                is_more |= await self.collect(client)
            assert not client.waits_for, f"pack {client.waits_for} is missing"
            client.check(self.sent, is_all=True)

        self.do(work)

    def teardown(self) -> None:
        try:
            if hasattr(self, "life"):
                self.arm()
                for slot in range(len(self.clients)):
                    self.drain(slot)
        finally:
            super().teardown()


def test_sessions_keep_their_promises_whatever_happens() -> None:
    run_model(Sessions, examples=60, steps=40)


def test_a_client_without_the_answer_is_sent_dropped_numbers_again() -> None:
    """Also after a restart; else it would wait for them forever."""
    for restart in (False, True):
        with stepped(Sessions) as state:
            state.set_up(packs_max=3, is_small=False)
            state.send([("a", 1)] * 3, receipt=True)
            state.receive(0, arrives=False, quick=False)
            state.send([("a", 1)] * 2, receipt=True)
            state.receive(0, arrives=False, quick=False)
            if restart:
                state.stop_and_start()
            state.receive(0, arrives=True, quick=False)
            assert list(state.clients[0].meaning) == [1, 2, 3, 4, 5]


def test_a_confirmed_number_between_dropped_ones_does_not_come_again() -> None:
    """Also after a restart, which knows the dropped numbers only as a range."""
    with stepped(Sessions) as state:
        state.set_up(packs_max=3, is_small=False)
        for _ in range(2):
            state.post(0, is_all=False)
            state.receive(0, arrives=True, quick=False)
        state.confirm(0, picked=[0], odd=False)
        for _ in range(3):
            state.post(0, is_all=False)
        state.stop_and_start()
        state.receive(0, arrives=True, quick=False)
        assert list(state.clients[0].meaning) == [1, 2, 3, 4, 5]


def test_a_confirmation_that_a_crash_undoes_keeps_what_its_client_has() -> None:
    """The pack is then dropped by the numbers that the crash has used up: it comes empty."""
    with stepped(Sessions) as state:
        state.set_up(packs_max=3, is_small=False)
        for _ in range(2):
            state.post(0, is_all=False)
        state.stop_and_start()
        state.confirm(0, picked=[0], odd=False)
        state.kill_after_showing(0, count=1, quick=False, end="kill")
        state.stop_and_start()
