"""Slows down failed logins, by address and by account, without locking anyone out.

A login is checked after a delay that doubles with each failure and expires after a while. The last
correct password, and a valid token, are accepted without a delay. A token has no account here.
Failures from other addresses delay an account's logins too, but not from an address that has logged
in to it before, and never for longer than DELAY_S_MAX.
"""

from collections import OrderedDict
from collections.abc import Callable

DELAY_S_MIN, DELAY_S_MAX = 0.25, 5.0
FORGET_S = 60.0
KEYS_MAX = 10_000


class Throttle:
    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        # Failures and the time of the last, for addresses and accounts, oldest first.
        self._failures: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        self._welcome: OrderedDict[tuple[str, str], None] = OrderedDict()

    def delay_s(self, address: str, account: str) -> float:
        """How long to wait before a login is checked; 0 without failures."""
        count = self._count(("address", address))
        if account and (address, account) not in self._welcome:
            count = max(count, self._count(("account", account)))
        return min(DELAY_S_MIN * 2 ** (count - 1), DELAY_S_MAX) if count else 0.0

    def failed(self, address: str, account: str) -> None:
        now_s = self._clock_s()
        keys = [("address", address)]
        if account:
            keys.append(("account", account))
        for key in keys:
            # Count only as many as lead to the longest delay.
            count = min(self._count(key) + 1, 16)
            self._failures[key] = (count, now_s)
            self._failures.move_to_end(key)
        while len(self._failures) > KEYS_MAX:
            self._failures.popitem(last=False)

    def succeeded(self, address: str, account: str) -> None:
        self._welcome[address, account] = None
        self._welcome.move_to_end((address, account))
        if len(self._welcome) > KEYS_MAX:
            self._welcome.popitem(last=False)

    def _count(self, key: tuple[str, str]) -> int:
        count, last_s = self._failures.get(key, (0, 0.0))
        return count if self._clock_s() - last_s < FORGET_S else 0
