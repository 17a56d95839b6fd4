"""The accounts of a running bus: logins, and what each login may do while things change.

Who connects without a login is the default account, if the config says so (`accounts.default`).
Everything that changes an account saves it first, then everybody who is logged in follows.
"""

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

from polybus import names
from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.errors import UsageError
from polybus.services.accounts import passwords
from polybus.services.accounts.access import ADMIN, AccountAccess, AdminAccess, Member
from polybus.services.accounts.configs import AccountConfigs
from polybus.services.accounts.records import Account, Token, account_name
from polybus.services.accounts.store import AccountStore
from polybus.services.accounts.throttle import DELAY_S_MIN, Throttle

T = TypeVar("T")
SWEEP_S = 1.0
NETWORK_BITS = 64
NOBODY = "$nobody"
"""Where others have the name of their account. No account can have it."""
MEASURE_SWEEPS = 10
WAITING_PER_SOURCE_MAX = 10
"""Logins from one address that wait for their turn."""
SOURCES_MAX = 1000
"""Addresses whose logins are checked or delayed at a time."""
FAILED = "the user, password or token is wrong"
NEEDED = "log in first"


class AccountWatcher(Protocol):
    """Keeps something for accounts: their sessions and consumers."""

    def accounts_changed(self) -> None:
        """Accounts or grants have changed: some topics may not be read any more."""
        ...

    def account_deleted(self, account: str) -> None:
        """An account is being deleted; its topics are still there."""
        ...


class Accounts:
    """Logs in, and keeps the access of everybody who is logged in up to date."""

    def __init__(
        self,
        store: AccountStore,
        bus: Bus,
        config: Config,
        loop: asyncio.AbstractEventLoop,
        members: Callable[[], Iterable[Member]] = tuple,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """`members` are all peers now."""
        self.store = store
        self._members = members
        self._bus = bus
        self._settings = config.accounts
        self._loop = loop
        self._clock_s = clock_s
        self._throttle = Throttle(loop.time)
        self._passwords = passwords.PasswordChecker(loop)
        self._waiting: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Lock] = {}
        self._accesses: dict[tuple[str, str], AccountAccess] = {}
        self._connections: Counter[str] = Counter()
        self.configs = AccountConfigs(store, bus, config.limits)
        self._sweep: asyncio.TimerHandle | None = None
        self._sweeps = 0
        self._watchers: list[AccountWatcher] = []
        self.default = self._access(names.ACCOUNT)
        self.admin = AdminAccess(self.configs.accounts, bus.has_topic)
        self.nobody = AccountAccess(self.configs.accounts, NOBODY)
        """The access of peers that have not logged in: no topic at all."""
        bus.watch(self)

    def watch(self, watcher: AccountWatcher) -> None:
        """Tell a watcher of everything that changes who may read what."""
        self._watchers.append(watcher)

    def start(self) -> None:
        """Follow the accounts' own files from now on. Raises StorageError."""
        self.configs.reload()
        self._refresh()
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        self._passwords.close()

    # Logins

    def without_login(self, address: str) -> AccountAccess | None:
        """The access of a peer that has not logged in, by its IP address; None if it must."""
        allowed = self._settings.default
        if allowed == "open" or (allowed == "loopback" and is_loopback(address)):
            return self.default
        return None

    def by_certificate(self, name: str | None) -> AccountAccess | None:
        """The access of a peer whose verified certificate names an account."""
        account = (name or "").lower()
        is_known = names.is_account(account) and account in self.store.accounts
        return self._access(account) if is_known and account not in self.store.damaged else None

    def of_queue(self, account: str, address: str) -> AccountAccess | None:
        """The access of a queue connector of an account; None if a peer may not use it."""
        if account == names.ACCOUNT:
            return self.without_login(address)
        return self._access(account) if account in self.store.accounts else None

    async def log_in(self, user: str, password: str, address: str) -> AccountAccess:
        """Raises UsageError `auth.failed`, after a delay; `auth.busy`."""
        name = user.lower()
        stored = self._password_of(name)
        if stored is not None and self._passwords.is_known(password, stored):
            # Nobody who floods the bus with logins delays this one.
            return self._by_password(name)

        async def check() -> AccountAccess | None:
            stored = self._password_of(name)
            if stored is None or not await self._passwords.is_right(password, stored):
                return None
            # It may have been changed or deleted meanwhile.
            return self._by_password(name) if self._password_of(name) == stored else None

        return await self._checked(address, name, check)

    def _password_of(self, name: str) -> str | None:
        account = self.store.accounts.get(name)
        return None if account is None else account.password

    def _by_password(self, name: str) -> AccountAccess:
        # Who is the default account without a login stays so when its password changes.
        return self._access(name, is_apart=name == names.ACCOUNT)

    async def log_in_by_token(self, text: str, address: str) -> AccountAccess:
        """Raises as `log_in`."""
        known = self.by_token(text)
        if known is not None:
            return known

        async def check() -> AccountAccess | None:
            return self.by_token(text)

        return await self._checked(address, "", check)

    def by_token(self, text: str) -> AccountAccess | None:
        """The access of a valid token."""
        found = self.store.find_token(text)
        if found is None or self._is_expired(found[1]):
            return None
        return self._access(*found)

    def of(self, account: str) -> AccountAccess | None:
        """The access of an account, or of administrators; None if there is no such account."""
        if account == ADMIN:
            return self.admin
        return self._access(account) if account in self.store.accounts else None

    async def _checked(
        self, address: str, name: str, check: Callable[[], Awaitable[AccountAccess | None]]
    ) -> AccountAccess:
        """Check a login that is not known to be right, one at a time from each source."""
        source = source_of(address)
        if self._waiting[source] >= WAITING_PER_SOURCE_MAX or len(self._turns) >= SOURCES_MAX:
            raise UsageError("auth.busy", "too many logins at a time; try again later")
        self._waiting[source] += 1
        turn = self._turns.setdefault(source, asyncio.Lock())
        try:
            async with turn:
                await asyncio.sleep(self._throttle.delay_s(source, name))
                began_s = self._loop.time()
                access = await check()
                if access is not None:
                    self._throttle.succeeded(source, name)
                    return access
                self._throttle.failed(source, name)
                # An unknown account takes as long as a wrong password.
                await asyncio.sleep(max(0.0, began_s + 2 * DELAY_S_MIN - self._loop.time()))
                raise UsageError("auth.failed", FAILED)
        finally:
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._waiting[source], self._turns[source]

    def _access(
        self, account: str, token: Token | None = None, *, is_apart: bool = False
    ) -> AccountAccess:
        """The access of an account or token; `is_apart`: another than that without a login."""
        key = (account, token.id if token is not None else "apart" if is_apart else "")
        found = self._accesses.get(key)
        if found is None:
            found = self._accesses[key] = AccountAccess(self.configs.accounts, account, token)
            found.quota = self.configs.quotas.get(account)
            found.refresh(self._bus.topics(system=True))
        return found

    def _is_expired(self, token: Token) -> bool:
        return token.expires is not None and token.expires <= self._clock_s()

    def _on_sweep(self) -> None:
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)
        self._end(lambda access: access.token is not None and self._is_expired(access.token))
        self._sweeps += 1
        if self._sweeps % MEASURE_SWEEPS == 0:
            self.configs.measure()
        if self.configs.reload():
            self._refresh()

    # Who is here

    def join(self, access: AccountAccess) -> None:
        """A connection enters. Raises UsageError `account.connections`."""
        account = access.account
        limits = self.configs.limits.get(account)
        if limits is not None and self._connections[account] >= (limits.connections_max or 0):
            text = f"your account has {limits.connections_max} connections"
            raise UsageError("account.connections", f"{text} (account-connections-max)")
        self._connections[account] += 1

    def check_topics(self, account: str) -> None:
        """Whether an account may have one more topic. Raises UsageError `account.topics`."""
        limits, access = self.configs.limits.get(account), self.of(account)
        if limits is None or access is None:
            return
        count = sum(access.owner_of(topic) == account for topic in access.readable)
        if count >= (limits.topics_max or 0):
            text = f"account {account!r} has {count} topics (account-topics-max)"
            raise UsageError("account.topics", text)

    def leave(self, access: AccountAccess) -> None:
        self._connections[access.account] -= 1

    # The bus calls these

    def topic_created(self, topic: str) -> None:
        for access in self._accesses.values():
            access.add(self._bus.topic(topic))

    def topic_deleted(self, topic: str) -> None:
        for access in self._accesses.values():
            access.remove(topic)

    # Changes, by administrators

    async def create(self, name: str, password: str | None = None) -> Account:
        """Create an account. Raises UsageError and StorageError, as the store does."""
        account_name(name)
        hashed = await self._in_thread(passwords.hash_of, password) if password else None
        account = self.store.create(name, hashed, self._bus.topic_names())
        self._refresh()
        return account

    async def set_password(self, name: str, password: str | None) -> None:
        """Replace a password; who logged in by the old one is logged out."""
        before = self.store.get(name).password
        hashed = await self._in_thread(passwords.hash_of, password) if password else None
        self.store.set_password(name, hashed)
        self._passwords.forget(before)
        self._end(
            lambda access: (
                access.account == name and access.token is None and access is not self.default
            )
        )

    def delete(self, name: str) -> None:
        """Delete an account with all its topics and messages."""
        if account_name(name) not in self.store.damaged:
            self.store.get(name)
        self._end(lambda access: access.account == name)
        for watcher in self._watchers:
            watcher.account_deleted(name)
        for topic in self._bus.topic_names(system=True):
            if self.default.owner_of(topic) == name:
                self._bus.delete_topic(topic, is_admin=True)
        self.store.delete(name)
        self._refresh()

    def grant(self, owner: str, to: str, topics: str, rights: Iterable[str]) -> None:
        self.store.grant(owner, to, topics, rights)
        self._refresh()

    def revoke(self, owner: str, to: str, topics: str) -> None:
        self.store.revoke(owner, to, topics)
        self._refresh()

    def revoke_token(self, name: str, identity: str) -> None:
        self.store.revoke_token(name, identity)
        self._end(lambda access: access.token is not None and access.token.id == identity)

    def _refresh(self) -> None:
        """Accounts or grants have changed."""
        self.configs.combine()
        topics = self._bus.topics(system=True)
        for access in self._accesses.values():
            access.quota = self.configs.quotas.get(access.account)
            access.refresh(topics)
        for member in list(self._members()):
            member.access_changed()
        for watcher in self._watchers:
            watcher.accounts_changed()

    def _end(self, is_over: Callable[[AccountAccess], bool]) -> None:
        over = {key: access for key, access in self._accesses.items() if is_over(access)}
        if not over:
            return
        for key, access in over.items():
            del self._accesses[key]
            access.end()
        for member in list(self._members()):
            if member.access in over.values():
                member.access_ended()

    async def _in_thread(self, work: Callable[..., T], *given: Any) -> T:
        return await self._loop.run_in_executor(None, work, *given)


def source_of(address: str) -> str:
    """Who is behind an IP address, for limits: whoever has one of IPv6 has its whole network."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), NETWORK_BITS), strict=False))


def is_loopback(address: str) -> bool:
    """Whether an IP address is one of this machine's loopback; a Unix socket counts as one."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return not address
