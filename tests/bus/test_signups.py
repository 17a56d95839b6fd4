"""How many strangers may sign up in an hour."""

from __future__ import annotations

import pytest

from polybus.config import Limits
from polybus.errors import UsageError
from polybus.services.accounts.signups import HOUR_S, SignUps

LIMITS = Limits(signups_per_address_hour_max=2, signups_per_hour_max=3)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def counted(signups: SignUps, address: str) -> bool:
    try:
        signups.count(address)
    except UsageError as error:
        assert error.code == "signup.too-many"
        return False
    return True


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("unknown", "unknown", True),
    ],
)
def test_an_address_has_its_own_limit(first: str, second: str, is_same: bool) -> None:
    signups = SignUps(LIMITS, Clock())
    assert counted(signups, first) and counted(signups, first)
    assert counted(signups, second) is not is_same


def test_all_together_have_a_limit_and_an_hour_ends_it() -> None:
    clock = Clock()
    signups = SignUps(LIMITS, clock)
    assert [counted(signups, f"192.0.2.{number}") for number in range(4)] == [True] * 3 + [False]
    clock.now_s = HOUR_S - 1
    assert not counted(signups, "192.0.2.9")
    clock.now_s = HOUR_S
    assert [counted(signups, "192.0.2.1") for _ in range(3)] == [True, True, False]
