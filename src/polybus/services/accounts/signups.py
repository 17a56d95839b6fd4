"""Limits sign-ups: a few per hour from each address, and a total per hour.

Failed attempts count too, because each reveals whether an account of that name exists.
"""

from collections import Counter, deque
from collections.abc import Callable

from polybus.config import Limits
from polybus.errors import UsageError
from polybus.services.accounts.accounts import source_of

HOUR_S = 3600.0


class SignUps:
    """The attempts of the last hour."""

    def __init__(self, limits: Limits, clock_s: Callable[[], float]) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._attempts: deque[tuple[float, str]] = deque()
        self._by_source: Counter[str] = Counter()

    def count(self, address: str) -> None:
        """Count an attempt from an IP address. Raises UsageError `signup.too-many`."""
        now_s = self._clock_s()
        while self._attempts and self._attempts[0][0] <= now_s - HOUR_S:
            _, gone = self._attempts.popleft()
            self._by_source[gone] -= 1
            if not self._by_source[gone]:
                del self._by_source[gone]
        source = source_of(address)
        limits = self._limits
        if self._by_source[source] >= limits.signups_per_address_hour_max:
            raise _too_many(limits.signups_per_address_hour_max, "signups-per-address-hour-max")
        if len(self._attempts) >= limits.signups_per_hour_max:
            raise _too_many(limits.signups_per_hour_max, "signups-per-hour-max")
        self._attempts.append((now_s, source))
        self._by_source[source] += 1


def _too_many(limit: int, name: str) -> UsageError:
    text = f"over {limit} sign-ups within an hour ({name}); try again later"
    return UsageError("signup.too-many", text)
