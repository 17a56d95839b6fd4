"""When sessions are saved: rarely enough to be cheap, and always before it matters."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterable

import pytest
from http_kit import Http, http_bus, recv

from polybus.config import Msgstream
from polybus.errors import StorageError
from polybus.services.sessions.contents import Receiver
from polybus.services.sessions.saving import SAVE_INTERVAL_S, SAVE_INTERVAL_S_MAX, Saver
from polybus.services.sessions.session import Session
from polybus.services.state import SqlStatement, StateDb


async def test_a_session_in_steady_use_does_not_wait_for_the_disk_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = 0
    raise_mark = Saver.raise_mark

    def counted(saver: Saver, session: Session) -> bool:
        nonlocal waits
        waits += 1
        return raise_mark(saver, session)

    monkeypatch.setattr(Saver, "raise_mark", counted)
    async with http_bus("news") as http:
        key = await http.open_session("news")
        async with http.websocket(key) as websocket:
            for number in range(1, 41):
                await http.publish("news", b"%d" % number)
                assert await recv(websocket) == {str(number): [["news", number]]}
                await websocket.send(str(number))

    # Each save reserves as many numbers as were shown before.
    assert 1 <= waits <= 7


async def test_the_first_pack_of_a_session_does_not_wait_for_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("news") as http:
        key = await http.open_session("news")
        session = http.node.services.inboxes.find(key)
        assert session is not None
        write = StateDb.write
        disk_goes_on = asyncio.Event()

        async def stuck(state: StateDb, statements: Iterable[SqlStatement]) -> None:
            await disk_goes_on.wait()
            await write(state, statements)

        monkeypatch.setattr(StateDb, "write", stuck)
        poll = await http.hanging_poll(key)
        await http.publish("news", b"1")
        assert (await poll).json() == {"1": [["news", 1]]}
        poll = asyncio.create_task(http.poll(key, "1", hang=True))
        await http.publish("news", b"2")
        await http.until(lambda: session.next_id == 3)
        assert not poll.done()
        disk_goes_on.set()
        assert (await poll).json() == {"2": [["news", 2]]}


async def sessions_on_disk(http: Http) -> int:
    """How many sessions a restart would restore, when everything is saved."""
    await asyncio.sleep(2 * SAVE_INTERVAL_S)
    with contextlib.closing(sqlite3.connect(http.node.data / "state.db")) as db:
        count: int = db.execute("SELECT count(*) FROM sessions").fetchone()[0]
    return count


async def test_a_session_that_is_deleted_during_a_poll_stays_deleted() -> None:
    async with http_bus("news") as http:
        await http.publish("news", b"1")
        for _ in range(5):
            key = await http.open_session("news", **{"from": "earliest"})
            poll = asyncio.create_task(http.poll(key, hang=True))
            await asyncio.sleep(0)
            assert (await http.client.delete(f"/v1/sessions/{key}")).status_code == 204
            await poll
        assert await sessions_on_disk(http) == 0


async def test_a_session_that_is_deleted_while_it_gets_a_pack_stays_deleted() -> None:
    async with http_bus("news") as http:
        inboxes = http.node.services.inboxes
        session = inboxes.find(await http.open_session("news"))
        assert session is not None
        post = asyncio.create_task(inboxes.post([session], b'[["late",1]]'))
        await inboxes.delete(session)
        await post
        await inboxes.post([session], b'[["later",1]]')
        assert await sessions_on_disk(http) == 0


async def test_a_session_that_ended_during_a_failed_save_stays_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with http_bus("news") as http:
        inboxes = http.node.services.inboxes
        session = inboxes.find(await http.open_session("news"))
        assert session is not None
        write = StateDb.write
        failed = asyncio.Event()

        async def fails_once(state: StateDb, statements: Iterable[SqlStatement]) -> None:
            if not failed.is_set():
                await asyncio.sleep(0.05)
                failed.set()
                raise StorageError("state.failed", "the disk is full")
            await write(state, statements)

        monkeypatch.setattr(StateDb, "write", fails_once)
        post = asyncio.create_task(inboxes.post([session], b'[["late",1]]'))
        await asyncio.sleep(0.01)
        inboxes.end(session)
        with pytest.raises(StorageError):
            await post
        assert await sessions_on_disk(http) == 0


class SlowState:
    """Takes its time for each save, as a disk with very many sessions does."""

    def __init__(self) -> None:
        self.save_s = 0.0

    async def write(self, statements: Iterable[SqlStatement]) -> None:
        await asyncio.sleep(self.save_s)


@pytest.mark.parametrize(
    ("save_s", "least_s", "most_s"),
    [
        (0.0, SAVE_INTERVAL_S, SAVE_INTERVAL_S),
        (0.03, 0.3, SAVE_INTERVAL_S_MAX),
        (0.15, SAVE_INTERVAL_S_MAX, SAVE_INTERVAL_S_MAX),
    ],
)
async def test_slow_saves_come_less_often_but_not_too_seldom(
    save_s: float, least_s: float, most_s: float
) -> None:
    state = SlowState()
    saver = Saver(state, asyncio.get_running_loop(), Receiver.wake)  # type: ignore[arg-type]
    session = Session(1, bytes(16), 60.0, Msgstream(session_packs_max=10, session_bytes_max=1000))
    state.save_s = save_s

    await saver.save([session])

    assert least_s <= saver._interval_s <= most_s
    await saver.close([])
