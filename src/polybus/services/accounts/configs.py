"""Each account's own config and quota, as they change while the bus runs."""

import contextlib
import logging
import time
from typing import Any

import msgspec

from polybus import names
from polybus.bus.access import Quota
from polybus.bus.bus import Bus
from polybus.config import Limits
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import TopicSettings
from polybus.services.accounts.edits import seen_config
from polybus.services.accounts.records import Account, Grant
from polybus.services.accounts.settings import (
    UNREAD,
    AccountConfig,
    AccountLimits,
    FileState,
    load,
    state_of,
)
from polybus.services.accounts.storage import AccountStorage
from polybus.services.accounts.store import AccountStore

logger = logging.getLogger("polybus.accounts")
REFUSED_S = 30.0
"""How long to wait before retrying a file after Kafka refused a topic, unless it changes."""


class AccountConfigs:
    """The config files of accounts, combined with the stored accounts.

    Attributes:
        accounts: the stored accounts, with the grants of their files.
        granted: those grants by the account that has them, and by their owner.
        limits, quotas: of every account but the default one.
        storage: how much these accounts store.
        problems: why an account's file, or a part of it, is not used.
    """

    def __init__(self, store: AccountStore, bus: Bus, limits: Limits) -> None:
        self._store = store
        self._bus = bus
        self._bus_limits = limits
        self._files: dict[str, FileState] = {}
        self._put_off: dict[str, tuple[FileState, float]] = {}
        """Files that are not tried again before a monotonic time."""
        self._configs: dict[str, AccountConfig] = {}
        self.accounts: dict[str, Account] = {}
        self.granted: dict[str, dict[str, tuple[Grant, ...]]] = {}
        self.limits: dict[str, AccountLimits] = {}
        self.quotas: dict[str, Quota] = {}
        self.problems: dict[str, str] = {}
        self._excluded: set[tuple[str, str]] = set()
        """Owners, and accounts that their files name, until these grants are severed."""
        self.storage = AccountStorage(bus, self._bytes_max)
        for name in store.accounts:
            if seen_config(store.data, name) is not None:
                # It had a file. The removal of that is a change, too.
                self._files[name] = UNREAD
            self.combine(name)

    def of(self, account: str) -> AccountConfig:
        return self._configs.get(account, AccountConfig())

    def look(self) -> dict[str, FileState | StorageError]:
        """Check the files of all accounts. May block: each has one."""
        found: dict[str, FileState | StorageError] = {}
        for name in list(self._store.accounts):
            if name != names.ACCOUNT:
                try:
                    found[name] = state_of(self._store.data, name)
                except StorageError as error:
                    found[name] = error
        return found

    def is_changed(self, name: str, state: FileState) -> bool:
        """Whether an account's file differs from the one in use, and may be tried now."""
        put_off, until_s = self._put_off.get(name, (UNREAD, 0.0))
        if state == put_off and time.monotonic() < until_s:
            return False
        # The account may have been deleted since the check.
        return name in self._store.accounts and state != self._files.get(name)

    def read(self, name: str, state: FileState) -> AccountConfig:
        """Raises ConfigError."""
        return AccountConfig() if state is None else load(self._store.data, name, state[0])

    def use(self, name: str, state: FileState, config: AccountConfig) -> None:
        """Apply the rest of a file, after its topics were set. Raises StorageError."""
        # The file may later name again an account that it no longer names.
        self._store.keep_severed(name, {grant.to for grant in config.grants()})
        self._files[name] = state
        self._configs[name] = config
        self.problems.pop(name, None)
        self._note_severed(name)

    def put_off(self, name: str, state: FileState) -> None:
        """Kafka refused a topic of a file: delay the retry, so that not every node asks every
        second.
        """
        self._put_off[name] = (state, time.monotonic() + REFUSED_S)

    def refuse(self, name: str, error: PolybusError) -> None:
        """A file is not used for now; it is tried again at the next check.

        The settings in use stay. If the file is then the one that they come from, the problem ends.
        """
        if name not in self._store.accounts:
            return
        self._files[name] = UNREAD
        if self.problems.get(name) != error.text:
            self.problems[name] = error.text
            logger.error("%s: account %s: %s", error.code, name, error.text)

    def missing_topics(self, account: str, config: AccountConfig) -> dict[str, TopicSettings]:
        """The declared topics that do not exist."""
        declared = _settings_of(account, config)
        return {name: one for name, one in declared.items() if not self._bus.has_topic(name)}

    def set_topics(self, account: str, config: AccountConfig) -> None:
        """Create declared topics, and apply changed settings of existing ones.

        A setting that was changed over HTTP stays until the file is read again. Over Kafka this
        waits for the cluster, so the bus's thread must not call it.
        """
        declared, before = _settings_of(account, config), _settings_of(account, self.of(account))
        log = self._bus.log
        missing = self.missing_topics(account, config)
        if self._bus.is_late:
            # The log notifies the bus of them, on the bus's thread.
            log.create_topics(
                {self._bus.check_new(one, len(missing)): missing[one] for one in missing}
            )
        else:
            self._bus.create_topics(missing)
        for name in declared.keys() - missing.keys() - log.frozen.keys():
            settings = declared[name]
            is_new = settings != before.get(name, TopicSettings())
            if is_new and settings != log.settings(name):
                log.change_settings(name, settings)

    def combine(self, name: str) -> dict[str, bool]:
        """An account was created or changed, or its file was.

        Returns the accounts whose grants from it have changed, and whether one was revoked.
        """
        account = self._store.accounts[name]
        permitted = [
            one
            for one in self.of(name).grants()
            if one.to not in account.severed and (name, one.to) not in self._excluded
        ]
        grants = (*account.grants, *permitted)
        self.accounts[name] = msgspec.structs.replace(account, grants=grants)
        by_account: dict[str, tuple[Grant, ...]] = {}
        for grant in grants:
            by_account[grant.to] = (*by_account.get(grant.to, ()), grant)
        changed = {}
        for to in {*by_account, *(one for one, owners in self.granted.items() if name in owners)}:
            before, after = self.granted.get(to, {}).get(name, ()), by_account.get(to, ())
            if before != after:
                changed[to] = not set(before) <= set(after)
                self._give(name, to, after)
        if name != names.ACCOUNT:
            self._limit(name)
        return changed

    def _give(self, owner: str, to: str, grants: tuple[Grant, ...]) -> None:
        owners = self.granted.setdefault(to, {})
        if grants:
            owners[owner] = grants
        else:
            owners.pop(owner, None)
        if not owners:
            del self.granted[to]

    def _limit(self, name: str) -> None:
        limits = self.limits[name] = self.of(name).limits.over(self._bus_limits)
        rates = (limits.messages_per_s_max or 0, limits.bytes_per_s_max or 0)
        quota = self.quotas.get(name)
        if quota is None:
            self.quotas[name] = Quota(*rates)
        else:
            quota.change(*rates)
        self.storage.judge(name)

    def _bytes_max(self, account: str) -> int | None:
        limits = self.limits.get(account)
        return None if limits is None else limits.bytes_max

    def sever(self, name: str) -> None:
        """An account is being deleted or created: a new one must not inherit permissions by its
        name.

        Raises StorageError.
        """
        for owner in self._owners_naming(name):
            with contextlib.suppress(UsageError):
                # The owner may be deleted meanwhile.
                self._store.sever(owner, name)
                self._note_severed(owner)
            account = self._store.accounts.get(owner)
            if account is not None and name in account.severed:
                self._excluded.discard((owner, name))

    def _owners_naming(self, name: str) -> list[str]:
        return [
            owner
            for owner, config in list(self._configs.items())
            if owner != name and any(grant.to == name for grant in config.grants())
        ]

    def exclude(self, name: str) -> list[str]:
        """An account is new: ignore grants to it in files until `sever`; return their owners."""
        found = [
            owner
            for owner in self._owners_naming(name)
            if owner in self._store.accounts and name not in self._store.accounts[owner].severed
        ]
        self._excluded |= {(owner, name) for owner in found}
        return found

    def excluded(self) -> set[str]:
        """The accounts for which `sever` has not succeeded yet."""
        return {name for _, name in list(self._excluded)}

    def _note_severed(self, owner: str) -> None:
        severed = self._store.get(owner).severed
        if severed:
            gone = ", ".join(severed)[:200]
            text = f"its permissions for {gone} are older than the account; write them again"
            self.problems[owner] = text
            logger.warning("config.permissions: account %s: %s", owner, text)

    def forget(self, name: str) -> None:
        """An account was deleted, and with it the grants to it."""
        for owner in self.granted.pop(name, {}):
            if owner in self._store.accounts:
                self.combine(owner)
        for to in [one for one, owners in self.granted.items() if name in owners]:
            self._give(name, to, ())
        known: tuple[dict[str, Any], ...] = (self.accounts, self.limits, self.quotas)
        self._excluded -= {pair for pair in list(self._excluded) if name in pair}
        for one in (*known, self._configs, self._files, self._put_off, self.problems):
            one.pop(name, None)
        self.storage.forget(name)


def _settings_of(account: str, config: AccountConfig) -> dict[str, TopicSettings]:
    """The settings of the declared topics, by full name."""
    return {
        names.full(account, topic.name): TopicSettings(
            retention_age_s=topic.retention.age_s, retention_bytes=topic.retention.bytes
        )
        for topic in config.topic_list()
    }
