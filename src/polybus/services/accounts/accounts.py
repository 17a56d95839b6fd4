"""The accounts of a running bus: who logs in, and what administrators change.

A peer without a login uses the default account, if the config allows it (`accounts.default`). A
change of an account is saved first, then applied to everybody who is logged in.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Protocol, TypeVar

from polybus import names
from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.services.accounts import passwords
from polybus.services.accounts.access import ADMIN, AccountAccess, AdminAccess, Member
from polybus.services.accounts.access_registry import AccessRegistry
from polybus.services.accounts.configs import AccountConfigs
from polybus.services.accounts.edits import ConfigEdits
from polybus.services.accounts.login_turns import LoginTurns
from polybus.services.accounts.records import Account, Token, account_name
from polybus.services.accounts.settings import AccountConfig, FileState
from polybus.services.accounts.store import AccountStore
from polybus.services.accounts.throttle import DELAY_S_MIN, Throttle
from polybus.services.topics import make_account_topics

logger = logging.getLogger("polybus.accounts")
T = TypeVar("T")
SWEEP_S = 1.0
NETWORK_BITS = 64
NOBODY = "$nobody"
"""The account of peers that have not logged in. No account can have this name."""
MEASURE_SWEEPS = 10
CHECKS_MAX = 8
"""Logins that are checked concurrently; their hashes are computed one at a time."""
TOPICS_TRIES = 5
"""How many times the deletion of an account checks for topics that other nodes were creating."""
CHANGES_MAX = 8
"""Concurrent changes in a cluster; each occupies a thread until its entry has come back."""
FAILED = "the user, password or token is wrong"
NEEDED = "log in first"


class AccountWatcher(Protocol):
    """Keeps state for accounts: their sessions and consumers."""

    def used_names(self) -> Iterable[str]:
        """Full names of its objects: a new account whose name begins one of them would own it."""
        ...

    def access_lost(self, account: str) -> None:
        """The account may no longer read some topics."""
        ...

    def token_ended(self, token: str) -> None:
        """The token of this id was revoked or has expired, which is saved."""
        ...

    def account_deleted(self, account: str) -> None:
        """An account is being deleted; its topics still exist."""
        ...


class Accounts:
    """Logs peers in, and keeps the access of all logins up to date."""

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
        self._turns = LoginTurns()
        self._checks = asyncio.Semaphore(CHECKS_MAX)
        self._connections: Counter[str] = Counter()
        self.configs = AccountConfigs(store, bus, config.limits)
        self.edits = ConfigEdits(store.data, loop)
        self._registry = AccessRegistry(bus, self.configs)
        self._sweep: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        # In a cluster it may take long, and no other task may set the same topics meanwhile.
        self._reloads = asyncio.Lock()
        self._measuring: asyncio.Task[None] | None = None
        self._sweeps = 0
        self._watchers: list[AccountWatcher] = []
        self._severing: dict[str, asyncio.Task[None]] = {}
        # Changes wait for work of the loop's default executor, so they must not occupy its threads.
        self._threads = ThreadPoolExecutor(CHANGES_MAX, thread_name_prefix="polybus-accounts")
        store.changed = self._changed
        self.default = self._access(names.ACCOUNT)
        self.admin = AdminAccess(self.configs, bus.has_topic)
        self.nobody = AccountAccess(self.configs, NOBODY)
        """The access of peers that have not logged in: no topics."""

    def watch(self, watcher: AccountWatcher) -> None:
        """Notify a watcher of every change of read permissions."""
        self._watchers.append(watcher)

    async def start(self) -> None:
        """Follow the accounts' own files from now on."""
        await self._reload(self.configs.look())
        for name in self.store.closing:
            self._sever_soon(name)
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for task in (self._looking, self._measuring):
            if task is not None:
                task.cancel()
        self.edits.close()
        self._passwords.close()
        self._threads.shutdown(wait=False)

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
            # A flood of other logins does not delay this one.
            return self._by_password(name)

        async def check() -> AccountAccess | None:
            stored = self._password_of(name)
            if stored is None or not await self._passwords.is_right(password, stored):
                return None
            # The account may have been changed or deleted meanwhile.
            return self._by_password(name) if self._password_of(name) == stored else None

        return await self._checked(address, name, check)

    def _password_of(self, name: str) -> str | None:
        account = self.store.accounts.get(name)
        return None if account is None else account.password

    def _by_password(self, name: str) -> AccountAccess:
        # Peers that use the default account without a login keep it when its password changes.
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

    def of(self, account: str, token: str = "") -> AccountAccess | None:
        """The access of an account, of its token, or of administrators; None if no longer valid."""
        if account == ADMIN:
            return self.admin
        found = self.store.accounts.get(account)
        if found is None:
            return None
        if not token or account in self.store.damaged:
            # The tokens of a damaged account are unknown: their objects stay, owned by the account.
            return self._access(account)
        known = self._registry.known(account, token)
        if known is not None:
            return known
        valid = (one for one in found.tokens if one.id == token and not self._is_expired(one))
        return next((self._access(account, one) for one in valid), None)

    async def _checked(
        self, address: str, name: str, check: Callable[[], Awaitable[AccountAccess | None]]
    ) -> AccountAccess:
        """Check a login that was not verified before, one at a time from each source."""
        source = source_of(address)
        async with self._turns.turn(source) as turn:
            await turn.sleep(self._throttle.delay_s(source, name))
            # Few at a time, so that their hashes take less time than a failure's delay: otherwise
            # answers for existing accounts would take longer than for others.
            async with self._checks:
                began_s = self._loop.time()
                access = await check()
            if access is not None:
                self._throttle.succeeded(source, name)
                return access
            self._throttle.failed(source, name)
            # An unknown account takes as long as a wrong password.
            await turn.sleep(max(0.0, began_s + 2 * DELAY_S_MIN - self._loop.time()))
            raise UsageError("auth.failed", FAILED)

    def _access(
        self, account: str, token: Token | None = None, *, is_apart: bool = False
    ) -> AccountAccess:
        """The access of an account or token; `is_apart`: distinct from that without a login."""
        key = token.id if token is not None else "apart" if is_apart else ""
        return self._registry.get(account, token, key)

    def _is_expired(self, token: Token) -> bool:
        return token.expires is not None and token.expires <= self._clock_s()

    def _on_sweep(self) -> None:
        self._sweep = self._loop.call_later(SWEEP_S, self._on_sweep)
        self._end(lambda access: access.token is not None and self._is_expired(access.token))
        for name in self.configs.excluded():
            self._sever_soon(name)
        is_measuring = self._measuring is not None and not self._measuring.done()
        if self._sweeps % MEASURE_SWEEPS == 0 and not is_measuring:
            self._measuring = self._loop.create_task(self.measure())
        self._sweeps += 1
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._look())

    async def measure(self) -> None:
        """Compare what the accounts store with their limits."""
        limited = list(self.configs.limits)
        await self.configs.storage.measure({one: self._registry.topics_of(one) for one in limited})

    async def _look(self) -> None:
        async with self._reloads:
            await self._reload(await self._in_thread(self.configs.look))

    async def _reload(self, files: Mapping[str, FileState | StorageError]) -> None:
        """Apply the files that have changed; an invalid one is tried again later."""
        for name, state in files.items():
            if isinstance(state, StorageError):
                self.configs.refuse(name, state)
                continue
            # Create nothing for an account that is being deleted.
            if name in self.store.closing or not self.configs.is_changed(name, state):
                continue
            try:
                config = self.configs.read(name, state)
                await self._set_topics(name, state, config)
                if name in self.store.accounts:
                    self.configs.use(name, state, config)
                    self._combine(name)
                    self.edits.used(name)
            except PolybusError as error:
                self.configs.refuse(name, error)

    async def _set_topics(self, name: str, state: FileState, config: AccountConfig) -> None:
        """Set the topics of a file. Raises the first PolybusError, after setting all others."""
        missing = self.configs.missing_topics(name, config)
        first: PolybusError | None = None
        try:
            await self.apart(self.configs.set_topics, name, config)
        except PolybusError as error:
            first = error
            if self._bus.is_late and error.code != "log.unreachable":
                self.configs.put_off(name, state)
        # Some were created even if another one was refused.
        if missing and (first is None or missing.keys() & set(self._bus.log.topics())):
            try:
                await self.keep_topics(name, filter(self._bus.has_topic, missing))
            except PolybusError as error:
                first = first or error
        if first is not None:
            raise first

    # Connections

    def join(self, access: AccountAccess) -> None:
        """A connection enters. Raises UsageError `account.connections`."""
        account = access.account
        limits = self.configs.limits.get(account)
        if limits is not None and self._connections[account] >= (limits.connections_max or 0):
            text = f"your account is at its limit of {limits.connections_max} connections"
            raise UsageError("account.connections", f"{text} (account-connections-max)")
        self._connections[account] += 1

    def check_topics(self, account: str) -> None:
        """Whether an account may have one more topic.

        Raises UsageError `account.topics`; `account.damaged` if it is being deleted.
        """
        if account in self.store.closing:
            raise UsageError(
                "account.damaged", f"account {account!r}: {self.store.damaged[account]}"
            )
        limits = self.configs.limits.get(account)
        if limits is None:
            return
        count = sum(not names.is_reserved(topic) for topic in self._registry.topics_of(account))
        if count >= (limits.topics_max or 0):
            text = f"account {account!r} is at its limit of {count} topics (account-topics-max)"
            raise UsageError("account.topics", text)

    def leave(self, access: AccountAccess) -> None:
        self._connections[access.account] -= 1
        if not self._connections[access.account]:
            del self._connections[access.account]

    # Changes, by administrators

    async def create(self, name: str, password: str | None = None) -> Account:
        """Create an account. Raises UsageError and StorageError, as the store does."""
        account_name(name)
        hashed = await self._in_thread(passwords.hash_of, password) if password else None
        if name.lower() not in self.store.accounts:
            # Config files may grant rights to a name before its account exists, or after it was
            # deleted. These grants must not apply to a new account of that name, perhaps from a
            # sign-up.
            await self._look()
            await self.apart(self.configs.sever, name.lower())
        names_now = chain(self._bus.topic_names(), *(one.used_names() for one in self._watchers))
        used = list(names_now) if self._bus.is_late else names_now
        account = await self.apart(self.store.create, name, hashed, used)
        try:
            await make_account_topics(self._bus, account.name)
        except StorageError as error:
            # The account exists; the next start creates the topics.
            logger.error("account %s has no system topics yet: %s", name, error)
        else:
            made = [names.full(account.name, one) for one in names.ACCOUNT_SYSTEM_TOPICS]
            await self.keep_topics(account.name, made)
        return account

    async def keep_topics(self, account: str, topics: Iterable[str]) -> None:
        """Topics of an account were created: keep them only if the account still exists.

        In a cluster another node may have deleted it before it knew of these topics.

        Raises UsageError `account.unknown`; StorageError if that is unknown.
        """
        if not self._bus.is_late:
            return
        await self.store.catch_up()
        if account not in self.store.accounts or account in self.store.closing:
            await self._delete_topics(topics)
            raise UsageError("account.unknown", f"account {account!r} was deleted meanwhile")

    async def set_password(self, name: str, password: str | None) -> None:
        """Replace a password; peers that logged in with the old one are logged out."""
        self.store.get(name)
        hashed = await self._in_thread(passwords.hash_of, password) if password else None
        await self.apart(self.store.set_password, name, hashed)

    async def apart(self, change: Callable[..., T], *given: Any, **named: Any) -> T:
        """Run a change: directly for files; on a thread for a cluster, where it takes longer."""
        if self._bus.is_late:
            work = functools.partial(change, *given, **named)
            return await self._loop.run_in_executor(self._threads, work)
        return change(*given, **named)

    async def remove(self, name: str) -> None:
        """Delete an account, in files or in a cluster."""
        cluster = self._bus.log.cluster
        # This also severs a permission that a file has got meanwhile.
        await self._look()
        if cluster is None:
            self.delete(name)
            return
        self._check_deletable(name)
        deletion = await self.apart(self.store.begin_delete, name)
        await self.apart(self.configs.sever, name)
        self._end_account(name)
        for _ in range(TOPICS_TRIES):
            await asyncio.to_thread(cluster.catch_up_all)
            left = [one for one in self._bus.log.topics() if one.startswith(f"{name}/")]
            if not left:
                break
            for topic in left:
                # The name may belong to a new account by now.
                self.store.check_deleting(name, deletion)
                await self._delete_topics([topic])
        else:
            text = f"other nodes are creating topics of account {name!r}; delete the account again"
            raise UsageError("account.in-use", text)
        await self.apart(self.store.delete, name, deletion)

    async def _delete_topics(self, topics: Iterable[str]) -> None:
        for topic in topics:
            with contextlib.suppress(UsageError):
                # Another node may have deleted it.
                await self.apart(self._bus.log.delete_topic, topic)

    def delete(self, name: str) -> None:
        """Delete an account with all its topics and messages, in files."""
        self._check_deletable(name)
        self.configs.sever(name)
        self._end_account(name)
        for topic in self._registry.topics_of(name):
            self._bus.delete_account_topic(topic)
        self.store.delete(name)

    def _check_deletable(self, name: str) -> None:
        if account_name(name) not in self.store.damaged:
            self.store.get(name)

    def _end_account(self, name: str) -> None:
        """End all logins of an account, and remove the state that watchers keep for it."""
        self._passwords.forget(self._password_of(name))
        self._end(lambda access: True, name)
        for watcher in self._watchers:
            watcher.account_deleted(name)

    def grant(self, owner: str, to: str, topics: str, rights: Iterable[str]) -> None:
        self.store.grant(owner, to, topics, rights)

    def revoke(self, owner: str, to: str, topics: str) -> None:
        self.store.revoke(owner, to, topics)

    def revoke_token(self, name: str, identity: str) -> None:
        self.store.revoke_token(name, identity)

    def _changed(self, before: Account | None, after: Account | None) -> None:
        """An account was saved, by this node or another: update the logins that it affects."""
        if after is None:
            assert before is not None
            self._end_account(before.name)
            self._registry.forget(before.name)
            self.configs.forget(before.name)
            self._follow_number()
            return
        name = after.name
        if before is None:
            self.configs.combine(name)
            # Files of this node may name it; the node that created it does not know them.
            owners = self.configs.exclude(name)
            for owner in owners:
                self._combine(owner)
            if owners:
                self._sever_soon(name)
            self._follow_number()
            return
        if before.password != after.password:
            self._passwords.forget(before.password)
            self._end(
                lambda access: (
                    access.account == name and access.token is None and access is not self.default
                ),
                name,
            )
        gone = {token.id for token in before.tokens} - {token.id for token in after.tokens}
        if gone:
            self._end(lambda access: access.token is not None and access.token.id in gone, name)
        if (before.grants, before.severed) != (after.grants, after.severed):
            self._combine(name)
        if name in self.store.closing:
            self._sever_soon(name)

    def _sever_soon(self, name: str) -> None:
        """Some node creates or deletes an account that config files of this node may name."""
        if name in self._severing:
            return
        self._severing[name] = task = self._loop.create_task(self.apart(self.configs.sever, name))
        task.add_done_callback(functools.partial(self._severed, name))

    def _severed(self, name: str, task: asyncio.Task[None]) -> None:
        del self._severing[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            # For a new account the next sweep tries again.
            logger.error("permissions for account %s may be left in files: %s", name, error)

    def _combine(self, name: str) -> None:
        """An account's grants or limits have changed: update the logins that they affect."""
        changed = self.configs.combine(name)
        self._registry.limits_changed(name)
        for to, is_reduced in changed.items():
            self._share(name, to, is_reduced=is_reduced)

    def _share(self, owner: str, to: str, *, is_reduced: bool) -> None:
        concerned = self._registry.grants_changed(owner, to)
        if not is_reduced:
            return
        for member in list(self._members()):
            if member.access in concerned:
                member.access_changed()
        for watcher in self._watchers:
            watcher.access_lost(to)

    def _follow_number(self) -> None:
        """An account was created or deleted: the default one sees the bus while it is alone."""
        if len(self.store.accounts) <= 2:
            is_reduced = not self.default.is_alone
            self._share(names.ACCOUNT, names.ACCOUNT, is_reduced=is_reduced)

    def _end(self, is_over: Callable[[AccountAccess], bool], account: str | None = None) -> None:
        over = self._registry.end(is_over, account)
        if over:
            for member in list(self._members()):
                if member.access in over:
                    member.access_ended()
        for token in [one.token for one in over if one.token is not None]:
            for watcher in self._watchers:
                watcher.token_ended(token.id)

    async def _in_thread(self, work: Callable[..., T], *given: Any) -> T:
        return await self._loop.run_in_executor(None, work, *given)


def source_of(address: str) -> str:
    """The source of requests, for limits: an IPv4 address, or the network of an IPv6 address.

    One host can use all addresses of its IPv6 network.
    """
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
        # A name: only the address of a connector can be one.
        return address in ("", "localhost")
