"""How many bytes each account stores, and which accounts have reached their limit.

Its topics (`stored_bytes`) and its blobs count, including unfinished payloads.
Staged files and sessions have limits of their own. The log is measured every few seconds, in steps.
The other sizes are always known, so a payload can be refused while it arrives.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from polybus.bus.bus import Bus
from polybus.errors import StorageError, UsageError

STEP = 500
"""Topics and history files that are measured before other tasks run."""


def stored_bytes(bus: Bus, topic: str) -> int:
    """The size of a topic, as `Log.stored_bytes`: its history and its part of the journal.

    Raises UsageError `topic.unknown`.
    """
    counted = bus.topic(topic).taken.values()
    messages = sum(one.messages for one in counted)
    return bus.log.stored_bytes(topic, messages, sum(one.value_bytes for one in counted))


class AccountStorage:
    """The stored bytes of the accounts that have a limit."""

    def __init__(self, bus: Bus, limit_of: Callable[[str], int | None]) -> None:
        self._bus = bus
        self._limit_of = limit_of
        self._in_log: dict[str, int] = {}
        self.other_bytes: Callable[[str], int] = lambda account: 0
        """The bytes that an account stores in addition to its messages."""

    def bytes_of(self, account: str) -> int:
        return self._in_log.get(account, 0) + self.other_bytes(account)

    def check(self, account: str, more: int = 0) -> None:
        """Whether an account may store more. Raises UsageError `account.bytes`."""
        limit = self._limit_of(account)
        if limit is not None and self.bytes_of(account) + more >= limit:
            # Without the size: all who publish to its topics may read this.
            text = f"the account {account!r} is at its limit of storage (account-bytes-max)"
            raise UsageError("account.bytes", f"{text}; delete topics or shorten their retention")

    def judge(self, account: str) -> None:
        """Apply its limit: accept or refuse messages for the topics of an account."""
        try:
            self.check(account)
        except UsageError as error:
            self._bus.full_accounts[account] = error.without_traceback()
        else:
            self._bus.full_accounts.pop(account, None)

    async def measure(self, owned: Mapping[str, Iterable[str]]) -> None:
        """Measure the topics of these accounts."""
        seen = 0
        for account, topics in owned.items():
            total = 0
            for topic in topics:
                found, files = self._measure_one(topic)
                total += found
                seen += 1 + files
                if seen >= STEP:
                    seen = 0
                    await asyncio.sleep(0)
            # It may have been deleted meanwhile.
            if self._limit_of(account) is not None:
                self._in_log[account] = total
                self.judge(account)

    def _measure_one(self, topic: str) -> tuple[int, int]:
        """The bytes of a topic in the log, and how many files its history has."""
        try:
            files = self._bus.log.describe(topic).get("history-files", 0)
            return stored_bytes(self._bus, topic), files
        except (StorageError, UsageError):
            return 0, 0  # Deleted meanwhile.

    def forget(self, account: str) -> None:
        """An account was deleted."""
        self._in_log.pop(account, None)
        self._bus.full_accounts.pop(account, None)
