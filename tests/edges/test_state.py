"""The state database: what was saved comes back, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polybus.errors import StorageError
from polybus.services.sessions.feeds import Content, direct
from polybus.services.sessions.saving import DELETE_UNUSED, READ_PACKS, SessionChanges
from polybus.services.sessions.session import LostMessages, SessionRow
from polybus.services.state import StateDb

ODD_TOPIC = 'it\'s "odd"; \\ grün 😀 --'
LARGE = (1 << 62) + 1


def row(number: int, **fields: Any) -> SessionRow:
    plain = {
        "number": number,
        "digest": number.to_bytes(16, "big"),
        "ttl_s": 0.5 + number,
        "next_id": 9,
        "mark": 5,
        "follows": [(ODD_TOPIC, LARGE, number)],
        "lost": [],
    }
    return SessionRow(**{**plain, **fields})


def packs(*ids: int) -> list[tuple[int, Content]]:
    return [(one, Content(ODD_TOPIC, LARGE, one, 1, 10)) for one in ids]


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
            await state.write(changes.statements())
    async with opened(data) as state:
        return {found[0]: found for found in await state.read("SELECT * FROM sessions")}


async def saved_packs(data: Path) -> dict[int, list[int]]:
    """The packs of each session."""
    async with opened(data) as state:
        found: dict[int, list[int]] = {}
        for session, number, *place in await state.read(READ_PACKS):
            found.setdefault(session, []).append(number)
            assert place == [ODD_TOPIC, LARGE, number, 1, 10, 0]
        return found


async def test_sessions_and_packs_come_back_as_they_were(tmp_path: Path) -> None:
    lost = [LostMessages(ODD_TOPIC, 1, 2, 3)]
    rows = [row(1, fresh=packs(1, 2, 3)), row(2, lost=lost, fresh=packs(7))]

    found = await save(tmp_path, SessionChanges(rows))

    for one in rows:
        expected = (one.number, one.digest, one.ttl_s, one.next_id, one.mark)
        assert found[one.number][:5] == expected
        encoded = [msgspec.json.encode(one.follows), msgspec.json.encode(one.lost)]
        assert [*found[one.number][5:]] == encoded
    assert await saved_packs(tmp_path) == {1: [1, 2, 3], 2: [7]}


async def test_a_save_changes_only_its_own_sessions_packs(tmp_path: Path) -> None:
    three = SessionChanges([row(n, fresh=packs(1, 2, 3, 4)) for n in (1, 2, 3)])
    later = SessionChanges(
        [
            row(1, next_id=10, first_id=2, confirmed=[3]),
            row(2, rewrite_from=3, fresh=packs(3, 8)),
        ]
    )

    found = await save(tmp_path, three, later)

    assert await saved_packs(tmp_path) == {1: [2, 4], 2: [1, 2, 3, 8], 3: [1, 2, 3, 4]}
    assert found[1][3] == 10


async def test_ended_sessions_are_gone_with_their_packs(tmp_path: Path) -> None:
    two = SessionChanges([row(n, fresh=packs(1)) for n in (1, 2)])

    found = await save(tmp_path, two, SessionChanges(ended=[1]))

    assert [*found] == [2]
    assert await saved_packs(tmp_path) == {2: [1]}


async def test_direct_packs_stay_as_long_as_a_session_has_them(tmp_path: Path) -> None:
    held = direct(b'[["a"]]', order=5)
    others = [direct(b"[]", order=number) for number in (6, 7)]
    changes = SessionChanges([row(1, fresh=[(1, held)])], direct=[held, *others])

    await save(tmp_path, changes, SessionChanges(direct_gone=[6]))

    async with opened(tmp_path) as state:
        await state.write([(DELETE_UNUSED, ())])
        assert await state.read("SELECT * FROM direct") == [(5, b'[["a"]]')]


async def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as state:
        await state.write(SessionChanges([row(1)]).statements())
        broken = Content(ODD_TOPIC, 0, 0, None, 7)  # type: ignore[arg-type]
        with pytest.raises(StorageError):
            changes = SessionChanges([row(2, fresh=[(1, broken)])], ended=[1])
            await state.write(changes.statements())

    assert [*(await save(tmp_path))] == [1]
