"""The state database: what was saved comes back, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from polybus.errors import StorageError
from polybus.services.state import PackRow, SavedSessions, SessionChanges, SessionRow, StateDb

ODD_TOPIC = 'it\'s "odd"; \\ grün 😀 --'
LARGE = (1 << 62) + 1


def row(number: int, **fields: object) -> SessionRow:
    follows = msgspec.json.encode([(ODD_TOPIC, LARGE, number)])
    plain = {
        "number": number,
        "digest": number.to_bytes(16, "big"),
        "ttl_s": 0.5 + number,
        "next_id": 9,
        "mark": 5,
        "follows": follows,
        "lost": b"[]",
    }
    return SessionRow(**{**plain, **fields})  # type: ignore[arg-type]


def packs(number: int, *ids: int) -> list[PackRow]:
    return [(number, one, ODD_TOPIC, LARGE, one, 1, 10, 0) for one in ids]


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[StateDb, SavedSessions]]:
    state = StateDb(path, fsync=False)
    saved = await state.open()
    try:
        yield state, saved
    finally:
        await state.close()


async def save(path: Path, *all_changes: SessionChanges) -> dict[int, SessionRow]:
    """Save changes one after the other; return what a new start finds."""
    async with opened(path) as (state, _):
        for changes in all_changes:
            await state.save(changes)
    async with opened(path) as (_, saved):
        return {session.number: session for session in saved.sessions}


async def test_sessions_and_packs_come_back_as_they_were(tmp_path: Path) -> None:
    first = row(1, packs=packs(1, 1, 2, 3))
    second = row(2, lost=msgspec.json.encode([(ODD_TOPIC, 1, 2, 3)]), packs=packs(2, 7))

    found = await save(tmp_path / "state.db", SessionChanges(sessions=[first, second]))

    assert found == {1: first, 2: second}


async def test_a_save_changes_only_its_own_sessions_packs(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    three = SessionChanges(sessions=[row(n, packs=packs(n, 1, 2, 3, 4)) for n in (1, 2, 3)])
    later = SessionChanges(
        sessions=[
            row(1, next_id=10, first_id=2, confirmed=[3]),
            row(2, rewrite_from=3, packs=packs(2, 3, 8)),
        ]
    )

    found = await save(path, three, later)

    assert {n: [pack[1] for pack in one.packs] for n, one in found.items()} == {
        1: [2, 4],
        2: [1, 2, 3, 8],
        3: [1, 2, 3, 4],
    }
    assert found[1].next_id == 10


async def test_ended_sessions_are_gone_with_their_packs(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    two = SessionChanges(sessions=[row(n, packs=packs(n, 1)) for n in (1, 2)])

    found = await save(path, two, SessionChanges(ended=[1]), SessionChanges(sessions=[row(1)]))

    assert found[1].packs == []
    assert len(found[2].packs) == 1


async def test_direct_packs_stay_as_long_as_a_session_has_them(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    held: PackRow = (1, 1, "", 0, 0, 1, 7, 5)
    changes = SessionChanges(
        sessions=[row(1, packs=[held])], direct=[(5, b'[["a"]]'), (6, b"[]"), (7, b"[]")]
    )

    await save(path, changes, SessionChanges(direct_gone=[6]))

    async with opened(path) as (_, saved):
        assert saved.direct == {5: b'[["a"]]'}


async def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    async with opened(path) as (state, _):
        await state.save(SessionChanges(sessions=[row(1)]))
        broken: PackRow = (2, 1, None, 0, 0, 1, 7, 0)  # type: ignore[assignment]
        with pytest.raises(StorageError):
            await state.save(SessionChanges(sessions=[row(2, packs=[broken])], ended=[1]))

    assert [*(await save(path))] == [1]
