"""What one login may do: the topics of an account, limited by a token, and the names it uses.

The bus and its log know a topic by its full name, `shop/news`. The account `shop` uses the name
`news`, all others use `shop/news`. A topic of the default account is `news` for itself, and
`default/news` for others.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from polybus import names
from polybus.bus.access import Access
from polybus.bus.topic import Topic
from polybus.services.accounts.records import RIGHTS, Account, Grant, Right, Token, matches

DEFAULT_PREFIX = f"{names.ACCOUNT}/"
ADMIN = "$admin"
"""The account of administrators. No account can have this name."""


class Member(Protocol):
    """A peer, logged in or not: a connection, or a UDP address."""

    @property
    def access(self) -> Access: ...

    def access_changed(self) -> None:
        """Leave the topics that may no longer be read."""
        ...

    def access_ended(self) -> None:
        """The account, password or token is no longer valid: report it and close."""
        ...


class Directory(Protocol):
    """All accounts, as they are now."""

    accounts: dict[str, Account]
    granted: dict[str, dict[str, tuple[Grant, ...]]]
    """By account, the grants that it has from other accounts."""


class AccountAccess(Access):
    """The rights of an account, or of one of its tokens.

    Attributes:
        topics: those it may publish to, by full name; None if it is all (of the bus itself).
        readable: those it may subscribe to.
    """

    __slots__ = ("_directory", "_full", "account", "is_ended", "readable", "renames", "token")

    def __init__(self, directory: Directory, account: str, token: Token | None = None) -> None:
        super().__init__({})
        self._directory = directory
        self.renames = account != names.ACCOUNT
        """Whether its names for topics may differ from the full ones."""
        self.account = account
        self.token = token
        self.is_ended = False
        self.readable: dict[str, Topic] = {}
        self._full: dict[str, str] = {}

    @property
    def is_alone(self) -> bool:
        """Whether the default account is the only one, so that it sees the bus as a whole."""
        return len(self._directory.accounts) == 1

    def owner_of(self, topic: str) -> str:
        account, slash, _ = topic.partition("/")
        return account if slash and account in self._directory.accounts else names.ACCOUNT

    def full(self, shown: str) -> str:
        """The full name of a topic by the account's name for it; a full name stays as it is."""
        if (known := self._full.get(shown)) is not None:
            return known
        if not self.renames or "/" in shown:
            return shown.removeprefix(DEFAULT_PREFIX)
        return names.full(self.account, shown)

    def shown(self, topic: str) -> str:
        """The account's name for a topic, from its full name."""
        owner = self.owner_of(topic)
        if owner == self.account:
            return names.within(owner, topic)
        if owner != names.ACCOUNT or ("/" in topic and topic not in self.readable):
            # A topic that does not exist keeps its name, so that no caller learns which accounts
            # exist.
            return topic
        return DEFAULT_PREFIX + topic

    def rights(self, topic: str) -> set[Right]:
        """The rights to a topic of this full name, whether or not it exists."""
        owner = self.owner_of(topic)
        found: set[Right] = set()
        if self.is_ended:
            return found
        if owner == self.account:
            found = set(RIGHTS)
        else:
            own = names.within(owner, topic)
            for grant in self._directory.granted.get(self.account, {}).get(owner, ()):
                if matches((grant.topics,), own):
                    found |= set(grant.rights)
        if self.token is not None:
            if self.token.rights:
                found &= set(self.token.rights)
            if self.token.topics and not self._is_in_token(self.token, self.shown(topic)):
                found = set()
        if names.is_reserved(topic):
            # System topics show what the account does, so no grant shares them. Those of the bus
            # show what other accounts do, as soon as there are others.
            is_own = names.within(owner, topic) in names.ACCOUNT_SYSTEM_TOPICS or self.is_alone
            found = found & {"subscribe"} if owner == self.account and is_own else set()
        return found

    def _is_in_token(self, token: Token, shown: str) -> bool:
        # A pattern without a slash matches own topics only: `o*` does not match topics of `office`.
        patterns = [one for one in token.topics if ("/" in one) == ("/" in shown)]
        return matches(patterns, shown)

    def may_read(self, topic: str) -> bool:
        """Whether a topic of this full name exists and may be subscribed to."""
        return topic in self.readable

    def may_manage(self, topics: Collection[str]) -> bool:
        """Whether it may end something of its account that uses these topics, by full name.

        The account may, and so may a token with the right `administer`. A token that is limited to
        topics may end only what uses no other topics.
        """
        token = self.token
        if token is None:
            return not self.is_ended
        if self.is_ended or (token.rights and "administer" not in token.rights):
            return False
        if not token.topics:
            return True
        return bool(topics) and all(self._is_in_token(token, self.shown(one)) for one in topics)

    def own(self, name: str) -> str:
        """The full name of a group or producer by the account's name for it."""
        return names.full(self.account, name)

    def mine(self, full: str) -> str | None:
        """The account's name for a group or producer; None if it belongs to another account."""
        return names.within(self.account, full) if self.owner_of(full) == self.account else None

    def may_hold(self, topic: str) -> bool:
        """Whether retention waits for its consumers, regardless of its token."""
        if self.is_ended or self.owner_of(topic) == self.account:
            return not self.is_ended
        whole = AccountAccess(self._directory, self.account)
        return "administer" in whole.rights(topic)

    def fill(self, owned: Mapping[str, Mapping[str, Topic]]) -> None:
        """Fill its empty dictionaries with the topics that it may use, by their owners."""
        for owner in (self.account, *self._directory.granted.get(self.account, ())):
            for topic in owned.get(owner, {}).values():
                self.add(topic)

    def refresh(self, topics: Iterable[Topic]) -> None:
        """Update its rights to these topics. All dictionaries stay the same objects."""
        for topic in topics:
            self.remove(topic.name)
            self.add(topic)

    def add(self, topic: Topic) -> None:
        """A topic was created."""
        assert self.topics is not None
        rights = self.rights(topic.name)
        if rights:
            self._full[self.shown(topic.name)] = topic.name
        if "publish" in rights:
            self.topics[topic.name] = topic
        if "subscribe" in rights:
            self.readable[topic.name] = topic

    def remove(self, topic: str) -> None:
        """A topic was deleted."""
        assert self.topics is not None
        self.topics.pop(topic, None)
        self.readable.pop(topic, None)
        self._full.pop(self.shown(topic), None)

    def end(self) -> None:
        """The account or token is no longer valid: pending requests lose all rights."""
        assert self.topics is not None
        self.is_ended = True
        for one in (self.topics, self.readable, self._full):
            one.clear()


class AdminAccess(AccountAccess):
    """Everything, by full names: the access of administrators."""

    __slots__ = ("_has_topic",)

    def __init__(self, directory: Directory, has_topic: Callable[[str], bool]) -> None:
        super().__init__(directory, ADMIN)
        self._has_topic = has_topic
        self.renames = False
        # No dictionary here: there may be many topics.
        self.topics = None

    def full(self, shown: str) -> str:
        return shown

    def shown(self, topic: str) -> str:
        return topic

    def rights(self, topic: str) -> set[Right]:
        return set(RIGHTS)

    def may_read(self, topic: str) -> bool:
        return self._has_topic(topic)

    def may_hold(self, topic: str) -> bool:
        return True

    def own(self, name: str) -> str:
        return name

    def mine(self, full: str) -> str | None:
        return full
