"""Each account's own config and quota, as they change while the bus runs."""

import logging

import msgspec

from polybus import names
from polybus.bus.access import Quota
from polybus.bus.bus import Bus
from polybus.config import Limits
from polybus.errors import PolybusError, UsageError
from polybus.log.interface import TopicSettings
from polybus.services.accounts.records import Account
from polybus.services.accounts.settings import (
    AccountConfig,
    AccountLimits,
    FileState,
    load,
    state_of,
)
from polybus.services.accounts.store import AccountStore

logger = logging.getLogger("polybus.accounts")


class AccountConfigs:
    """What the accounts' files say, combined with what is stored.

    Attributes:
        accounts: the stored accounts, with the grants of their files.
        limits, quotas: of every account but the default one.
        problems: why an account's file is not used.
    """

    def __init__(self, store: AccountStore, bus: Bus, limits: Limits) -> None:
        self._store = store
        self._bus = bus
        self._bus_limits = limits
        self._files: dict[str, FileState] = {}
        self._configs: dict[str, AccountConfig] = {}
        self.accounts: dict[str, Account] = {}
        self.limits: dict[str, AccountLimits] = {}
        self.quotas: dict[str, Quota] = {}
        self.problems: dict[str, str] = {}
        self.combine()

    def of(self, account: str) -> AccountConfig:
        return self._configs.get(account, AccountConfig())

    def reload(self) -> bool:
        """Read the files that have changed; return whether there was one."""
        is_changed = False
        for name in list(self._store.accounts):
            if name == names.ACCOUNT:
                continue
            state = state_of(self._store.data, name)
            if state != self._files.get(name):
                self._files[name] = state
                is_changed = True
                self._reload(name, state)
        return is_changed

    def _reload(self, name: str, state: FileState) -> None:
        try:
            config = AccountConfig() if state is None else load(self._store.data, name, state[0])
            self._create_topics(name, config)
            self._configs[name] = config
        except PolybusError as error:
            self.problems[name] = error.text
            logger.error("%s: account %s: %s", error.code, name, error.text)
        else:
            self.problems.pop(name, None)

    def _create_topics(self, account: str, config: AccountConfig) -> None:
        for topic in config.topic_list():
            name = names.full(account, topic.name)
            if not self._bus.has_topic(name):
                retention = topic.retention
                settings = TopicSettings(
                    retention_age_s=retention.age_s, retention_bytes=retention.bytes
                )
                self._bus.create_topic(name, settings)

    def combine(self) -> None:
        """Accounts were created, changed or deleted, or their files have changed."""
        stored = self._store.accounts
        # The same object: every access refers to it.
        self.accounts.clear()
        for name, account in stored.items():
            grants = (*account.grants, *self.of(name).grants())
            self.accounts[name] = msgspec.structs.replace(account, grants=grants)
        for name in self.limits.keys() - stored.keys():
            del self.limits[name], self.quotas[name]
            self._configs.pop(name, None)
            self._files.pop(name, None)
            self.problems.pop(name, None)
        for name in stored.keys() - {names.ACCOUNT}:
            limits = self.limits[name] = self.of(name).limits.over(self._bus_limits)
            rates = (limits.messages_per_s_max or 0, limits.bytes_per_s_max or 0)
            quota = self.quotas.get(name)
            if quota is None or (quota.messages_per_s, quota.bytes_per_s) != rates:
                self.quotas[name] = Quota(*rates)

    def measure(self) -> None:
        """Compare the accounts' history with their limit of bytes."""
        if not self.limits:
            return
        sizes = dict.fromkeys(self.limits, 0)
        log = self._bus.log
        for topic in self._bus.topic_names():
            account, slash, _ = topic.partition("/")
            if slash and account in sizes:
                sizes[account] += log.describe(topic).get("history-bytes", 0)
        for name, size in sizes.items():
            limit = self.limits[name].bytes_max or 0
            error = UsageError(
                "account.bytes", f"your account has {limit} bytes (account-bytes-max)"
            )
            self.quotas[name].full = error if size >= limit else None
