"""The state database: what was saved comes back, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polybus.errors import StorageError
from polybus.services.sessions.changes import LostMessages, SessionChanges
from polybus.services.sessions.contents import Content, direct
from polybus.services.sessions.saving import DELETE_UNUSED, READ_PACKS, statements
from polybus.services.state import StateDb
from polybus.services.state_rows import verify_state

ODD_TOPIC = 'it\'s "odd"; \\ grün 😀 --'
LARGE = (1 << 62) + 1
LOST = LostMessages(ODD_TOPIC, 1, 2, 3)


def changes_of(*numbers: int, fresh: Sequence[int] = (), **changes: Any) -> SessionChanges:
    """A save of these sessions, each with these packs."""
    rows: list[tuple[object, ...]] = [
        (n, 0.5 + n, 9, 5, [(ODD_TOPIC, LARGE, n)], [LOST], 1, len(fresh), "shop", "t")
        for n in numbers
    ]
    packs = [((n, one), Content(ODD_TOPIC, LARGE, one, 1, 10)) for n in numbers for one in fresh]
    return SessionChanges(rows, [n.to_bytes(16, "big") for n in numbers], fresh=packs, **changes)


@asynccontextmanager
async def opened(data: Path) -> AsyncIterator[StateDb]:
    state = StateDb(data, fsync=False)
    await state.open()
    try:
        yield state
    finally:
        await state.close()


async def save(data: Path, *all_changes: SessionChanges) -> dict[int, tuple[Any, ...]]:
    """Save changes one after the other; return each session's row."""
    async with opened(data) as state:
        for changes in all_changes:
            await state.write(statements(changes))
    async with opened(data) as state:
        return {found[0]: found for found in await state.read("SELECT * FROM sessions")}


async def saved_packs(data: Path) -> dict[int, list[int]]:
    """The packs of each session."""
    async with opened(data) as state:
        found: dict[int, list[int]] = {}
        for session, number, *place in await state.read(READ_PACKS):
            found.setdefault(session, []).append(number)
            assert place[:-1] == [ODD_TOPIC, LARGE, number, 1, 10, 0]
        return found


async def test_sessions_and_packs_come_back_as_they_were(tmp_path: Path) -> None:
    found = await save(tmp_path, changes_of(1, 2, fresh=[1, 2, 7]))

    for number in (1, 2):
        follows, lost = [(ODD_TOPIC, LARGE, number)], [LOST]
        fixed = (number, number.to_bytes(16, "big"), 0.5 + number, 9, 5)
        encoded = (msgspec.json.encode(follows), msgspec.json.encode(lost))
        assert found[number][:-1] == (*fixed, *encoded, 1, 3, "shop", "t")
    assert verify_state(tmp_path) == []
    assert await saved_packs(tmp_path) == {1: [1, 2, 7], 2: [1, 2, 7]}


async def test_a_save_changes_only_its_own_sessions_packs(tmp_path: Path) -> None:
    three = changes_of(1, 2, 3, fresh=[1, 2, 3, 4])
    first = changes_of(1, first=[(1, 2)], confirmed=[(1, 3)])
    second = changes_of(2, renumbered=[(2, 3)], fresh=[3, 8])

    await save(tmp_path, three, first, second)

    assert await saved_packs(tmp_path) == {1: [2, 4], 2: [1, 2, 3, 8], 3: [1, 2, 3, 4]}


async def test_ended_sessions_are_gone_with_their_packs(tmp_path: Path) -> None:
    found = await save(tmp_path, changes_of(1, 2, fresh=[1]), changes_of(ended=[1]))

    assert [*found] == [2]
    assert await saved_packs(tmp_path) == {2: [1]}


async def test_direct_packs_stay_as_long_as_a_session_has_them(tmp_path: Path) -> None:
    held = direct(b'[["a"]]', order=5)
    changes = changes_of(1, direct=[held, *(direct(b"[]", order=number) for number in (6, 7))])
    changes.fresh.append(((1, 1), held))

    await save(tmp_path, changes, changes_of(direct_gone=[6]))

    async with opened(tmp_path) as state:
        await state.write([(DELETE_UNUSED, ())])
        assert await state.read("SELECT number, json FROM direct") == [(5, b'[["a"]]')]


async def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as state:
        await state.write(statements(changes_of(1)))
        changes = changes_of(2, ended=[1])
        changes.fresh.append(((2, 1), Content(None, 0, 0, 1, 7)))  # type: ignore[arg-type]
        with pytest.raises(StorageError):
            await state.write(statements(changes))

    assert [*(await save(tmp_path))] == [1]


async def test_a_request_that_outlives_the_bus_is_told_so(tmp_path: Path) -> None:
    state = StateDb(tmp_path, fsync=True)
    await state.open()
    await state.close()
    with pytest.raises(StorageError) as caught:
        await state.read("SELECT 1")
    assert caught.value.code == "log.closed"
