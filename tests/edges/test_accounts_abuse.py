"""Floods of logins: they cost the attacker time, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from accounts_kit import PASSWORD, SPEAKERS, bus_with_accounts, peer_of
from edge_kit import TIMEOUT_S

from polybus.errors import PolybusError
from polybus.services.accounts import login_turns, passwords
from polybus.services.accounts.throttle import Throttle
from polybus.testing import ScriptedPeer

FRAMES = SPEAKERS["boson-frames"]
pytestmark = pytest.mark.slow


async def test_a_flood_of_logins_leaves_others_their_turn_and_costs_few_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed = 0
    verify = passwords._verify

    def counted(stored: str, password: str) -> bool:
        nonlocal hashed
        hashed += 1
        return verify(stored, password)

    monkeypatch.setattr(passwords, "_verify", counted)
    async with bus_with_accounts() as node, contextlib.AsyncExitStack() as stack:
        office = await stack.enter_async_context(peer_of(node, FRAMES, "office"))
        async with peer_of(node, FRAMES, "shop"):
            pass
        before = hashed
        attackers = [ScriptedPeer(node.tcp_port, timeout_s=TIMEOUT_S) for _ in range(100)]
        for number, attacker in enumerate(attackers):
            await stack.enter_async_context(attacker)
            user = ("shop", "nobody")[number % 2]
            await attacker.send(FRAMES.login(user, f"guess {number}") * 50)
        for _ in range(50):
            await office.send(FRAMES.publish("news", "x"))
            assert (await FRAMES.hear(office))[0] == "receipt"
        # The right password of each account is known: a wrong one needs no hash.
        assert hashed == before
        assert node.bad_peers.counts["auth.failed"] < 5000
        assert len(node.tcp.connections) == 101
        # Nobody is locked out, not even at the address of the attack.
        async with peer_of(node, FRAMES, "shop"):
            pass


async def test_logins_of_one_address_wait_for_each_other_and_others_for_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(login_turns, "WAITING_PER_SOURCE_MAX", 3)
    async with bus_with_accounts() as node:
        accounts = node.accounts
        # Known from here on.
        await accounts.log_in("shop", PASSWORD, "192.0.2.1")
        guesses = [
            asyncio.create_task(accounts.log_in("shop", f"guess {number}", f"2001:db8::{number:x}"))
            for number in range(9)
        ]
        await asyncio.sleep(0)
        assert len(accounts._turns) == 3, "all of one IPv6 network"
        # Not even at the same address.
        assert await accounts.log_in("shop", PASSWORD, "2001:db8::1") is accounts.of("shop")
        token = accounts.store.make_token("shop")
        assert (await accounts.log_in_by_token(token, "2001:db8::1")).account == "shop"
        answers = await asyncio.gather(*guesses, return_exceptions=True)
        codes = sorted(one.code for one in answers if isinstance(one, PolybusError))
        assert codes == ["auth.busy"] * 6 + ["auth.failed"] * 3
        assert not accounts._turns


async def test_a_password_that_is_not_known_yet_gets_in_beside_guesses_from_many_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(login_turns, "SOURCES_MAX", 5)
    async with bus_with_accounts() as node:
        accounts = node.accounts
        guesses = [
            asyncio.create_task(accounts.log_in("nobody", "guess", f"192.0.2.{number}"))
            for number in range(5)
        ]
        await asyncio.sleep(0)
        assert (await accounts.log_in("shop", PASSWORD, "198.51.100.1")).account == "shop"
        answers = await asyncio.gather(*guesses, return_exceptions=True)
        codes = sorted(one.code for one in answers if isinstance(one, PolybusError))
        assert codes == ["auth.busy"] + ["auth.failed"] * 4
        assert not accounts._turns


async def test_a_password_that_is_not_known_yet_gets_in_beside_guesses_from_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(login_turns, "WAITING_PER_SOURCE_MAX", 3)
    monkeypatch.setattr(Throttle, "delay_s", lambda *_: 0.0)
    async with bus_with_accounts() as node:
        accounts = node.accounts

        async def guess() -> None:
            with pytest.raises(PolybusError):
                await accounts.log_in("office", "guess", "192.0.2.1")

        # The place of each that is answered is taken at once.
        flood = [asyncio.create_task(guess()) for _ in range(3)]
        for _ in range(100):
            await asyncio.sleep(0)
            try:
                access = await accounts.log_in("shop", PASSWORD, "192.0.2.1")
            except PolybusError as error:
                assert error.code == "auth.busy"
                flood.append(asyncio.create_task(guess()))
            else:
                break
        assert access.account == "shop"
        await asyncio.gather(*flood)


async def test_a_failure_takes_as_long_for_an_unknown_account_as_for_a_wrong_password() -> None:
    loop = asyncio.get_running_loop()
    async with bus_with_accounts() as node:
        took = {}
        for user, address in (("shop", "192.0.2.1"), ("nobody", "192.0.2.2")):
            began = loop.time()
            with pytest.raises(Exception, match=r"auth\.failed"):
                await node.accounts.log_in(user, "guess", address)
            took[user] = loop.time() - began
        assert took["shop"] >= 0.5 and took["nobody"] >= 0.5
        # The hash of the first took its time within the half second.
        assert abs(took["shop"] - took["nobody"]) < 0.3


async def test_failures_of_others_slow_an_account_down_but_not_where_it_was_before() -> None:
    async with bus_with_accounts() as node:
        throttle = node.accounts._throttle
        throttle.succeeded("192.0.2.1", "shop")
        for number in range(100):
            throttle.failed(f"198.51.100.{number}", "shop")
        assert throttle.delay_s("192.0.2.1", "shop") == 0
        assert throttle.delay_s("192.0.2.2", "shop") == 5.0
        assert throttle.delay_s("192.0.2.2", "office") == 0
        for _ in range(3):
            throttle.failed("192.0.2.1", "office")
        # An own account does not make the guesses for others faster.
        throttle.succeeded("192.0.2.1", "shop")
        assert throttle.delay_s("192.0.2.1", "shop") == 1.0
        # A token belongs to no account here.
        for number in range(9):
            throttle.failed(f"198.51.100.{number}", "")
        assert throttle.delay_s("192.0.2.9", "") == 0
