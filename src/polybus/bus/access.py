"""Which topics a publisher may publish to, and how fast."""

from typing import Any

from polybus import names
from polybus.errors import PolybusError, UsageError


class Quota:
    """How much the publishers of one account may publish together.

    Each second allows its rate of messages and bytes, and an account that has published nothing may
    spend one second at once. A batch is taken whole while nothing is owed, and may leave a debt; no
    other is taken until the debt is paid.
    """

    __slots__ = (
        "_bytes_left",
        "_messages_left",
        "_paid_us",
        "bytes_per_s",
        "messages_per_s",
    )

    def __init__(self, messages_per_s: float, bytes_per_s: float) -> None:
        self.messages_per_s = self._messages_left = messages_per_s
        self.bytes_per_s = self._bytes_left = bytes_per_s
        self._paid_us = 0

    def change(self, messages_per_s: float, bytes_per_s: float) -> None:
        """Set other rates. A debt stays."""
        self.messages_per_s, self.bytes_per_s = messages_per_s, bytes_per_s

    def refusal(self, now_us: int) -> PolybusError | None:
        """Why a batch is not taken now; None if it is."""
        passed_s = max(0, now_us - self._paid_us) / 1e6
        self._paid_us = now_us
        self._messages_left = min(
            self.messages_per_s, self._messages_left + passed_s * self.messages_per_s
        )
        self._bytes_left = min(self.bytes_per_s, self._bytes_left + passed_s * self.bytes_per_s)
        if self._messages_left < 0:
            limit = f"{self.messages_per_s:g} messages a second (account-messages-per-s-max)"
        elif self._bytes_left < 0:
            limit = f"{self.bytes_per_s:g} bytes a second (account-bytes-per-s-max)"
        else:
            return None
        return UsageError("account.rate", f"your account publishes over {limit}; slow down")

    def charge(self, messages: int, value_bytes: int) -> None:
        self._messages_left -= messages
        self._bytes_left -= value_bytes


class Access:
    """The topics that its holders may publish to, by name; None means all but system topics.

    The bus looks names up here, so that a topic that one may not publish to does not exist.
    """

    __slots__ = ("quota", "topics")
    account = names.ACCOUNT
    """Whose names for topics its holders use."""

    # The values are bus.topic.Topic, which knows its subscribers, and they know publishers.
    def __init__(self, topics: dict[str, Any] | None = None) -> None:
        self.topics = topics
        self.quota: Quota | None = None


EVERYTHING = Access()
