"""Sessions in state.db and the log: numbers keep their meaning, packs come until confirmed."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from crash_kit import Crash, Run, apart, crashes, kill
from opened_kit import on_node, running_node

from polybus.batch import Batch
from polybus.edges.node import Node
from polybus.log.layout import segments
from polybus.services.sessions import saving
from polybus.services.sessions.session import Session
from polybus.services.state_rows import verify_state
from polybus.wire.msgstream import EMPTY_PACK

pytestmark = pytest.mark.slow


SAVED_S = 0.02
"""After this time what changed was saved, or is being saved."""


class Client:
    """A client of one session, which says what it was promised and shown."""

    def __init__(self, run: Run, node: Node) -> None:
        self.run = run
        self.node = node
        self.inboxes = node.services.inboxes
        self.session: Session

    async def open(self, *topics: str) -> None:
        key = await self.inboxes.create(topics, None, "latest")
        session = self.inboxes.find(key)
        assert session is not None
        self.session = session
        self.run.acknowledge("opened", session.digest.hex())

    def reopen(self) -> bool:
        """Continue with the session that is there, if there is one."""
        for session in self.inboxes.sessions():
            self.session = session
            return True
        return False

    async def publish(self, topic: str, value: str, *, durable: bool = True) -> None:
        self.node.bus.commit([Batch.of(topic, [f'"{value}"'.encode()])], urgent=durable)
        if durable:
            await self.node.context.durability.wait()
            self.run.acknowledge("published", value)

    async def post(self, value: str) -> None:
        await self.inboxes.post([self.session], f'[["direct","{value}"]]'.encode())
        self.run.acknowledge("published", value)

    async def receive(self) -> list[int]:
        packs = await self.inboxes.collect(self.session, 0)
        for number, json in packs:
            self.run.acknowledge("shown", number, json.decode())
        return [number for number, _ in packs]

    async def confirm(self, *numbers: int) -> None:
        """Confirm packs; the confirmation is on disk when this returns."""
        self.run.acknowledge("confirming", list(numbers))
        self.inboxes.confirm(self.session, numbers)
        await asyncio.sleep(SAVED_S)

    async def delete(self) -> None:
        self.run.acknowledge("deleting")
        await self.inboxes.delete(self.session)
        self.run.acknowledge("deleted")


def with_client(run: Run, work: Callable[[Client], Awaitable[None]], **settings: Any) -> None:
    """Writes count from the start of the work on, the stop of the bus included."""

    saving.SAVE_INTERVAL_S = SAVED_S / 4

    async def main() -> None:
        async with running_node(run.data, topics=["a", "b"], **settings) as node:
            run.resume()
            await work(Client(run, node))

    run.pause()
    asyncio.run(main())


def started(run: Run) -> None:
    async def nothing(client: Client) -> None: ...

    with_client(Run(run.data), nothing)


def go_on(run: Run) -> None:
    """A client that comes back publishes, and takes everything that is there."""

    async def work(client: Client) -> None:
        if not client.reopen():
            await client.open("a", "b")
        await client.post("after the crash")
        numbers = await client.receive()
        await client.confirm(*numbers)

    with_client(run, work)


def look(data: Path) -> Any:
    """Each session's packs that are not empty, and the topics it follows."""

    async def shown(node: Node) -> Any:
        found = {}
        for session in node.services.inboxes.sessions():
            packs = await node.services.inboxes.collect(session, 0)
            assert [number for number, _ in packs] == sorted({number for number, _ in packs})
            found[session.digest.hex()] = [
                [
                    [number, json.decode()]
                    for number, json in packs
                    if number and json != EMPTY_PACK
                ],
                sorted(session.follows),
            ]
        return found

    return on_node(shown, data)


def check(crash: Crash) -> None:
    """The promises of a session that hold whatever it does."""
    facts = crash.acknowledged
    names = [name for name, *_ in facts]
    if "deleting" in names:
        assert len(crash.seen) <= 1 and ("deleted" not in names or not crash.seen), crash
        return
    assert "opened" not in names or facts[0][1] in crash.seen, crash
    shown = {number: json for name, *rest in facts if name == "shown" for number, json in [rest]}
    confirming = {number for name, *rest in facts if name == "confirming" for number in rest[0]}
    for packs, _ in crash.seen.values():
        seen = dict(packs)
        for number, json in shown.items():
            if number in seen and number:
                assert seen[number] == json, f"{crash}: a number changed its meaning"
        values = "".join(seen.values())
        for name, *rest in facts:
            if name == "published":
                value = f'"{rest[0]}"'
                told = [number for number, json in shown.items() if value in json]
                if not set(told) & confirming:
                    assert values.count(value) == 1, f"{crash}: {value}"
    assert all(not packs for packs, _ in crash.end.values()), crash


def a_life(run: Run) -> None:
    async def work(client: Client) -> None:
        await client.open("a")
        await client.publish("a", "m1")
        await client.post("d1")
        numbers = await client.receive()
        await client.confirm(numbers[0])
        await client.publish("a", "m2")
        await client.post("d2")
        await client.receive()
        await client.confirm(2, 3)
        await client.receive()

    with_client(run, work)


def test_a_session_keeps_its_packs_until_they_are_confirmed() -> None:
    for crash in crashes(a_life, look, start=started, proceed=go_on, ends=("kill", "cut")):
        check(crash)


def shown_before_it_is_stored(run: Run) -> None:
    """The log writes late, so that state.db is ahead of it."""

    async def work(client: Client) -> None:
        await client.open("a")
        await client.publish("a", "stored")
        await client.publish("a", "lost", durable=False)
        await client.receive()
        await asyncio.sleep(SAVED_S)
        await client.post("d1")

    with_client(run, work, journal={"commit-delay-ms": 60_000})


def publish_and_go_on(run: Run) -> None:
    """Another message gets the offset of the one that the log lost."""

    async def work(client: Client) -> None:
        if not client.reopen():
            await client.open("a", "b")
        await client.publish("a", "another")
        for _, json in await client.inboxes.collect(client.session, 0):
            assert json.count(b'"another"') <= 1
        packs = dict(await client.inboxes.collect(client.session, 0))
        values = b"".join(packs.values())
        assert values.count(b'"another"') == 1, f"it came twice, or not at all: {packs}"

    with_client(run, work)


def test_a_number_that_was_shown_is_not_given_to_another_message() -> None:
    for crash in crashes(
        shown_before_it_is_stored,
        look,
        start=started,
        proceed=publish_and_go_on,
        ends=("kill",),
    ):
        shown = {rest[0]: rest[1] for name, *rest in crash.acknowledged if name == "shown"}
        for packs, _ in [*crash.seen.values(), *crash.end.values()]:
            for number, json in packs:
                assert shown.get(number, json) == json, f"{crash}: a number changed its meaning"


def state_is_ahead_of_the_log(run: Run) -> None:
    """A pack was shown and saved whose message the log has lost."""
    started(run)
    kill(shown_before_it_is_stored, run.data, before="sqlite COMMIT", nth=3)


def test_a_start_corrects_the_sessions_before_the_log_grows() -> None:
    for crash in crashes(
        publish_and_go_on, look, start=state_is_ahead_of_the_log, proceed=go_on, ends=("kill",)
    ):
        published = [rest[0] for name, *rest in crash.acknowledged if name == "published"]
        [(packs, _)] = crash.seen.values()
        values = [json for _, json in packs if json != '[["direct","d1"]]']
        assert values[:1] == ['[["a","stored"]]'], crash
        assert values[1:] == ['[["a","another"]]'] or (not values[1:] and not published), crash
        # The pack that was shown with the message that is lost is its second.
        assert 2 not in dict(packs), crash


def topic_is_deleted(run: Run) -> None:
    async def work(client: Client) -> None:
        await client.open("a", "b")
        await client.publish("a", "m1")
        await client.post("d1")
        await client.receive()
        run.acknowledge("deleting topic")
        client.node.bus.delete_topic("a")
        run.acknowledge("topic deleted")
        await client.publish("b", "m2")
        await client.receive()
        await client.confirm(2, 3)

    with_client(run, work)


def test_a_session_hears_once_that_its_topic_is_deleted() -> None:
    for crash in crashes(
        topic_is_deleted, look, start=started, proceed=go_on, ends=("kill", "cut")
    ):
        names = [name for name, *_ in crash.acknowledged]
        for packs, follows in crash.seen.values():
            notices = "".join(json for _, json in packs).count("topic.deleted")
            if "topic deleted" in names:
                told = [rest for rest in crash.acknowledged if "topic.deleted" in str(rest)]
                assert notices == 1 or told, crash
                assert "a" not in follows, crash
            elif "deleting topic" not in names:
                assert notices == 0, crash
            assert notices <= 1, crash


def overflow(run: Run) -> None:
    async def work(client: Client) -> None:
        await client.open("a", "b")
        for number in range(3):
            await client.post(f"d{number}")
            await client.publish("a", f"m{number}")
        await client.receive()
        await client.post("d3")
        await client.post("d4")
        client.node.bus.delete_topic("a")
        await client.receive()
        await client.post("d5")

    with_client(run, work, msgstream={"session-packs-max": 4})


def test_a_session_that_overflows_starts_again_with_its_newest_packs() -> None:
    for crash in crashes(overflow, look, start=started, proceed=go_on, ends=("kill", "cut")):
        shown = {rest[0]: rest[1] for name, *rest in crash.acknowledged if name == "shown"}
        published = [rest[0] for name, *rest in crash.acknowledged if name == "published"]
        for packs, _ in crash.seen.values():
            for number, json in packs:
                assert shown.get(number, json) in (json, "[]"), crash
            if published and published[-1].startswith("d"):
                assert published[-1] in "".join(json for _, json in packs), crash


def a_short_life(run: Run) -> None:
    async def work(client: Client) -> None:
        await client.open("a")
        await client.post("d1")
        await client.publish("a", "m1")
        await client.delete()

    with_client(run, work)


def test_a_deleted_session_does_not_come_back() -> None:
    for crash in crashes(a_short_life, look, start=started, proceed=go_on, ends=("kill", "cut")):
        check(crash)


def change_topics(run: Run) -> None:
    async def work(client: Client) -> None:
        await client.open("a")
        await client.publish("a", "m1")
        run.acknowledge("changing")
        await client.inboxes.replace_topics(client.session, ["b"])
        run.acknowledge("changed")
        await client.publish("b", "m2")
        await client.receive()

    with_client(run, work)


def test_a_session_follows_its_old_topics_or_its_new_ones() -> None:
    for crash in crashes(change_topics, look, start=started, proceed=go_on, ends=("kill", "cut")):
        check(crash)
        names = [name for name, *_ in crash.acknowledged]
        for _, follows in crash.seen.values():
            assert follows == ["b"] or (follows == ["a"] and "changed" not in names), crash
            assert follows == ["a"] or "changing" in names, crash


def several(run: Run) -> None:
    """One direct pack in two sessions: the second of them may be saved later."""

    async def work(client: Client) -> None:
        await client.open("a")
        first = client.session
        await client.open("a")
        await client.inboxes.broadcast(b'[["direct","all"]]')
        run.acknowledge("broadcast")
        for session in (first, client.session):
            client.session = session
            await client.inboxes.collect(session, 0)
            client.inboxes.confirm(session, [1])
        await client.post("next")
        await asyncio.sleep(SAVED_S)

    with_client(run, work)


def test_a_direct_pack_of_several_sessions_goes_with_the_last_of_them() -> None:
    for crash in crashes(several, look, start=started, proceed=go_on, ends=("kill", "cut")):
        assert all(len(packs) <= 2 for packs, _ in crash.seen.values()), crash


def with_damaged_rows(run: Run) -> None:
    """Two sessions with two direct packs each; one of the first and all of the second damaged."""

    async def work(client: Client) -> None:
        for number in (1, 2):
            await client.open("a")
            await client.post(f"whole {number}")
            await client.post(f"damaged {number}")

    with_client(Run(run.data), work)
    with contextlib.closing(sqlite3.connect(run.data / "state.db")) as db:
        db.execute("UPDATE direct SET json = 'other' WHERE number = 2")
        db.execute("UPDATE sessions SET mark = 1000 WHERE number = 2")
        db.commit()


def start_and_stop(run: Run) -> None:
    look(run.data)


def test_a_start_that_sets_damaged_rows_aside_may_be_killed() -> None:
    for crash in crashes(
        *(start_and_stop, look),
        start=with_damaged_rows,
        ends=("kill", "cut"),
        verified=False,
    ):
        assert list(crash.seen.values()) == [[[[1, '[["direct","whole 1"]]']], ["a"]]], crash
        assert crash.end == crash.seen, crash


def with_lost_saves(run: Run) -> None:
    """A session with five packs after a kill, and a flipped bit in its first saves."""
    names = [f"state.db{end}" for end in ("", "-wal", "-shm")]
    killed: dict[str, bytes] = {}

    async def work(client: Client) -> None:
        await client.open("a")
        for number in range(5):
            await client.post(f"pack {number}")
        killed.update({name: (run.data / name).read_bytes() for name in names})

    with_client(Run(run.data), work)
    wal = bytearray(killed["state.db-wal"])
    page_bytes = int.from_bytes(wal[8:12], "big")
    frames = (len(wal) - 32) // (24 + page_bytes)
    wal[32 + (24 + page_bytes) * (frames // 2) + 100] ^= 1
    for name, content in {**killed, "state.db-wal": bytes(wal)}.items():
        (run.data / name).write_bytes(content)


def look_at_lost(data: Path) -> Any:
    """Whether the proof of the damage is where it was or set aside, and what a start shows."""
    is_named = "saves are damaged" in str(verify_state(data))
    is_aside = any(data.glob("state.db.damaged-*-wal"))
    return [is_named or is_aside, look(data), any(data.glob("state.db.damaged-*-shm"))]


def test_a_start_that_finds_lost_saves_may_be_killed() -> None:
    for crash in crashes(
        *(start_and_stop, look_at_lost),
        start=with_lost_saves,
        ends=("kill", "cut"),
        verified=False,
    ):
        assert crash.seen == crash.end == [True, {}, True], crash


def lose_a_segment(data: Path) -> None:
    async def publish(client: Client) -> None:
        await client.open("a", "b")
        await client.publish("a", "m1")
        await client.receive()

    async def go_on_with_b(client: Client) -> None:
        assert set(client.node.bus.log.frozen) >= {"a"}
        assert client.reopen()
        assert list(client.session.follows) == ["a", "b"]
        await client.publish("b", "m2")
        packs = await client.inboxes.collect(client.session, 0)
        assert [json for _, json in packs][-1] == b'[["b","m2"]]', packs

    with_client(Run(data), publish)
    segments(data)[-1].unlink()
    with_client(Run(data), go_on_with_b)


def test_a_damaged_topic_keeps_neither_the_bus_nor_its_sessions_from_starting(
    tmp_path: Path,
) -> None:
    apart(lose_a_segment, tmp_path)


def test_a_session_goes_on_when_the_log_was_in_memory_before(tmp_path: Path) -> None:
    data = tmp_path / "data"

    async def create(node: Node) -> str:
        return await node.services.inboxes.create(["a"], None, "latest")

    key = on_node(create, data, topics=["a"], durability="memory")

    async def followed(node: Node) -> list[str]:
        session = node.services.inboxes.find(key)
        assert session is not None
        return list(session.follows)

    assert on_node(followed, data, topics=["a"], durability="fsync") == ["a"]
