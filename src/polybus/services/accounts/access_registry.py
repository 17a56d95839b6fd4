"""The permissions of all logins. An update costs only as much as has changed.

A new or deleted topic affects the logins of its owner, and of the accounts that have grants of the
owner. A grant affects the logins of one account and the topics of one owner.
"""

from collections.abc import Callable, Iterable

from polybus import names
from polybus.bus.bus import Bus
from polybus.bus.subscriptions import TopicWatcher
from polybus.bus.topic import Topic
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.configs import AccountConfigs
from polybus.services.accounts.records import Token


class AccessRegistry(TopicWatcher):
    """The accesses of all accounts and tokens that have logged in, and the topics by owner."""

    def __init__(self, bus: Bus, configs: AccountConfigs) -> None:
        self._bus = bus
        self._configs = configs
        self._by_account: dict[str, dict[str, AccountAccess]] = {}
        self._owned: dict[str, dict[str, Topic]] = {}
        for topic in bus.topics(system=True):
            self._owned.setdefault(self.owner_of(topic.name), {})[topic.name] = topic
        bus.watch(self)

    def owner_of(self, name: str) -> str:
        """The owner of the topic, group or producer with this full name."""
        account, slash, _ = name.partition("/")
        return account if slash and account in self._configs.accounts else names.ACCOUNT

    def get(self, account: str, token: Token | None, key: str) -> AccountAccess:
        """The access of an account or its token; `key` distinguishes those of an account."""
        known = self._by_account.setdefault(account, {})
        found = known.get(key)
        if found is None:
            found = known[key] = AccountAccess(self._configs, account, token)
            found.quota = self._configs.quotas.get(account)
            found.fill(self._owned)
        return found

    def known(self, account: str, key: str) -> AccountAccess | None:
        """The access of this key, if a login has used it and it is still valid."""
        return self._by_account.get(account, {}).get(key)

    def topics_of(self, owner: str) -> list[str]:
        """The full names of an account's topics, system topics included."""
        return list(self._owned.get(owner, ()))

    # The bus calls these

    def topic_created(self, topic: str) -> None:
        owner, made = self.owner_of(topic), self._bus.topic(topic)
        self._owned.setdefault(owner, {})[topic] = made
        for access in self._concerned(owner):
            access.add(made)

    def topic_deleted(self, topic: str) -> None:
        owner = self.owner_of(topic)
        self._owned.get(owner, {}).pop(topic, None)
        for access in self._concerned(owner):
            access.remove(topic)

    def _concerned(self, owner: str) -> Iterable[AccountAccess]:
        """The accesses that may use some topics of an owner."""
        grants = self._configs.accounts[owner].grants
        for account in {owner, *(grant.to for grant in grants)}:
            yield from self._by_account.get(account, {}).values()

    # Changes

    def grants_changed(self, owner: str, to: str) -> set[AccountAccess]:
        """Grants of an owner to an account have changed; return the accesses of that account."""
        topics = list(self._owned.get(owner, {}).values())
        concerned = set(self._by_account.get(to, {}).values())
        for access in concerned:
            access.refresh(topics)
        return concerned

    def limits_changed(self, account: str) -> None:
        """An account's limits may have changed."""
        for access in self._by_account.get(account, {}).values():
            access.quota = self._configs.quotas.get(account)

    def end(
        self, is_over: Callable[[AccountAccess], bool], account: str | None = None
    ) -> set[AccountAccess]:
        """End the accesses that match, of one account or of all; return them."""
        ended = set()
        for name in [account] if account is not None else list(self._by_account):
            known = self._by_account.get(name, {})
            for key in [key for key, access in known.items() if is_over(access)]:
                access = known.pop(key)
                access.end()
                ended.add(access)
            if not known:
                self._by_account.pop(name, None)
        return ended

    def forget(self, account: str) -> None:
        """An account was deleted, after its topics."""
        self._owned.pop(account, None)
