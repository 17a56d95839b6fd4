"""The accounts of a cluster: entries that all nodes share, in place of files.

An entry has a version and the whole account, or none if it was deleted. It counts if its version is
above the one before it, in the cluster's order. A node writes the version that follows the entry
that it changes; if another node was faster, it repeats the change on that node's entry (optimistic
concurrency). So no node reverts the change of another, and every node knows a change when its entry
arrives.

Each write has a key of its own, because Kafka keeps the last entry of each key: an entry that lost
must not hide the one that won. An entry that does not count, or no longer counts, never will again,
so the next change of the account removes all of these.

Order of writes; each entry has come back before the next step:

create   1. Grants to the name that an earlier account left are removed.
         2. The entry.
         3. The system topics of the account; the next start creates those that are missing.
         4. At other nodes: the records of accounts whose config file there names it (`severed`).
            From the arrival of 2 on, such a node leaves out what the file permits.
change   1. The entry with the change.
         2. Superseded entries are removed. Any that remain do not count.
delete   1. The entry of an account that is being closed: it has no password, tokens or grants. From
its
            arrival on, no node creates a topic of it or grants it anything.
         2. The records of accounts whose config file at some node names it (`severed`).
         3. Its topics, until none is left that any node has created.
         4. The records of accounts with grants to it.
         5. The entry without an account, whose version follows that of 1: the name may be another
            account's by now, if another node has finished the deletion. 3 ends then, too.

A node that dies in the middle of `delete` leaves an account that is closing, and its topics belong
to nobody else. Nobody can log in; deleting it again continues, at any node. A node that creates a
topic checks afterwards whether the account still exists, and removes the topic if it does not. If
it dies before, and the deletion did not see the topic either, an empty topic is left, and no new
account can take the name (`account.taken`) until an administrator deletes that topic.

The methods that change something block until the entry has come back, so they run on threads other
than the loop's. An entry that cannot be read is treated like a damaged file: nobody can log in to
that account.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polybus import names
from polybus.errors import StorageError, UsageError
from polybus.services.accounts.records import Account
from polybus.services.accounts.store import DAMAGED, AccountStore
from polybus.services.cluster_table import ClusterEntry, ClusterTable
from polybus.structs import decode

logger = logging.getLogger("polybus.accounts")
KIND = "account"
TRIES = 20
CLOSING = "its deletion has begun; delete it again to finish that"


class AccountEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The value of an entry."""

    version: int
    account: Account | None
    is_closing: bool = False


class CountedEntry(NamedTuple):
    """The entry of an account that counts, with the id of its write."""

    entry: AccountEntry
    write: str


NEVER = CountedEntry(AccountEntry(0, None), "")


def read_entry(name: str, value: bytes) -> AccountEntry:
    """Decode an entry. Raises ValueError if it is invalid, or of another account."""
    found = decode(value, AccountEntry)
    if found.account is not None and found.account.name != name.partition("/")[0]:
        raise ValueError(f"it names account {found.account.name!r}")
    return found


class ClusterAccountStore(AccountStore):
    """The accounts of all nodes of a cluster."""

    def __init__(self, data: Path, table: ClusterTable, loop: asyncio.AbstractEventLoop) -> None:
        self._table = table
        self._loop = loop
        self._counted: dict[str, CountedEntry] = {}
        # By account, writes that do not or no longer count and still exist.
        self._old: dict[str, set[str]] = {}
        # Writes of this node with waiting callers, and whether they counted when they arrived.
        self._open: dict[str, bool] = {}
        self._numbers = itertools.count()
        super().__init__(data)

    def _load_all(self) -> None:
        self._table.watch(KIND, self._on_entry)

    def _on_entry(self, entry: ClusterEntry) -> None:
        name, _, write = entry.name.partition("/")
        old = self._old.setdefault(name, set())
        if not entry.value:
            old.discard(write)
            return
        try:
            found = read_entry(entry.name, entry.value)
        except ValueError as error:
            old.add(write)
            if name not in self.accounts and names.is_account(name):
                logger.error("%s: no one can log in to %r: %s", DAMAGED, name, error)
                self.damaged[name] = f"its entry in the cluster: {error}"
                self.accounts[name] = Account(name=name, created="")
                self.changed(None, self.accounts[name])
            return
        counted = self._counted.get(name, NEVER)
        if found.version <= counted.entry.version:
            old.add(write)
            return
        if counted is not NEVER:
            old.add(counted.write)
        self._counted[name] = CountedEntry(found, write)
        if write in self._open:
            self._open[write] = True
        self._take(name, found)

    def _take(self, name: str, found: AccountEntry) -> None:
        self.closing.discard(name)
        self.damaged.pop(name, None)
        if found.is_closing:
            self.closing.add(name)
            self.damaged[name] = CLOSING
        if found.account is not None:
            self._keep(found.account)
        elif name in self.accounts:
            self._drop(name)

    async def catch_up(self) -> None:
        await self._table.catch_up()

    # On other threads than the loop's

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _share(self, name: str, entry: AccountEntry) -> bool:
        """Whether this was the next version. Raises StorageError if that is unknown."""
        write = f"{self._table.node}.{next(self._numbers)}"
        value = msgspec.json.encode(entry)
        self._open[write] = False
        try:
            self._wait(self._table.write([ClusterEntry(KIND, f"{name}/{write}", value)]))
        finally:
            is_counted = self._open.pop(write)
        return is_counted

    def _repeat(
        self,
        name: str,
        make: Callable[[Account | None], Account | None],
        *,
        is_closing: bool = False,
    ) -> int:
        """Write the result of `make` for the account, until it follows the last entry.

        Returns its version.
        """
        for _ in range(TRIES):
            counted = self._counted.get(name, NEVER).entry
            before = counted.account
            if before is None and name == names.ACCOUNT:
                before = Account(name=name, created="")
            entry = AccountEntry(counted.version + 1, make(before), is_closing)
            is_same = (entry.account, is_closing) == (before, counted.is_closing)
            # An unreadable entry does not count.
            is_there = is_same and (is_closing or name not in self.damaged)
            if is_there or self._share(name, entry):
                self._forget_old(name)
                return counted.version if is_there else entry.version
        raise StorageError("state.failed", f"other nodes change account {name!r}; try again")

    def _forget_old(self, name: str) -> None:
        # At once: the loop's thread changes the set.
        writes = list(self._old.get(name, ()))
        if not writes:
            return
        try:
            old = [ClusterEntry(KIND, f"{name}/{write}", b"") for write in writes]
            self._wait(self._table.forget(old))
        except StorageError as error:
            # The next change tries again.
            logger.warning("old entries of account %r stay for now: %s", name, error)

    def _make(self, account: Account) -> None:
        def new(before: Account | None) -> Account:
            if before is not None:
                raise UsageError("account.exists", f"account {account.name!r} already exists")
            return account

        self._wait(self.catch_up())
        self._end_grants(account.name)
        self._repeat(account.name, new)

    def begin_delete(self, name: str) -> int:
        def closed(before: Account | None) -> Account:
            created = "" if before is None else before.created
            return Account(name=name, created=created)

        return self._repeat(name, closed, is_closing=True)

    def check_deleting(self, name: str, deletion: int) -> None:
        if self._counted.get(name, NEVER).entry.version != deletion:
            raise UsageError("account.unknown", f"another node has deleted account {name!r}")

    def _remove(self, name: str, deletion: int) -> None:
        self.check_deleting(name, deletion)
        if not self._share(name, AccountEntry(deletion + 1, None)):
            # Another entry followed.
            self.check_deleting(name, deletion)
        self._forget_old(name)

    def _change(self, name: str, change: Callable[[Account], Account]) -> None:
        def make(before: Account | None) -> Account:
            if name in self.damaged:
                text = f"account {name!r}: {self.damaged[name]}; delete it and create it again"
                raise UsageError("account.damaged", text)
            return change(self.get(name) if before is None else before)

        self._repeat(name, make)

    def keep_severed(self, owner: str, named: Collection[str]) -> None:
        """Does nothing: the file of another node may still name the deleted accounts."""
