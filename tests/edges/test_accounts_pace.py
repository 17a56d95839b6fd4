"""Changes that wait for the disk: an account's own wait for each other, those of others do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from polybus.services.accounts.pace import PAUSE_S_MAX, PAUSE_SHARE, ChangePace


class ManualLoop:
    """A clock and timers that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.timers.append((delay_s, call, arguments))

    def ring(self) -> float:
        delay_s, call, arguments = self.timers.pop(0)
        call(*arguments)
        return delay_s


async def change(pace: ChangePace, loop: ManualLoop, account: str, lasts_s: float = 0.1) -> None:
    async with pace.turn(account):
        loop.now_s += lasts_s


async def test_the_next_change_of_an_account_waits_and_those_of_others_do_not() -> None:
    loop = ManualLoop()
    pace = ChangePace(cast(asyncio.AbstractEventLoop, loop))
    await change(pace, loop, "shop")
    second = asyncio.create_task(change(pace, loop, "shop"))
    await change(pace, loop, "office")
    assert not second.done()
    assert loop.ring() == pytest.approx(0.1 * PAUSE_SHARE)
    await second
    await change(pace, loop, "slow", lasts_s=60)
    assert [loop.ring() for _ in range(3)][2] == PAUSE_S_MAX
    assert not pace._turns and not pace._users, "nothing is kept of accounts without changes"


async def test_a_change_that_is_cancelled_or_fails_holds_up_nobody() -> None:
    loop = ManualLoop()
    pace = ChangePace(cast(asyncio.AbstractEventLoop, loop))
    with pytest.raises(ValueError, match="no"):
        async with pace.turn("shop"):
            raise ValueError("no")
    waiting = asyncio.create_task(change(pace, loop, "shop"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    loop.ring()
    await change(pace, loop, "shop")
    loop.ring()

    assert not pace._turns
