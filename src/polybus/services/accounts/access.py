"""What one login may do: the topics of an account, limited by a token, and the names it uses.

The bus and its log know a topic by its full name, `shop/news`. The account `shop` says `news`, all
others say `shop/news`; topics of the default account are `news` to itself, and `default/news` to
others.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from polybus import names
from polybus.bus.access import Access
from polybus.bus.topic import Topic
from polybus.services.accounts.records import RIGHTS, Account, Right, Token, matches

DEFAULT_PREFIX = f"{names.ACCOUNT}/"
ADMIN = "$admin"
"""Where others have the name of their account. No account can have it."""


class Member(Protocol):
    """A peer, logged in or not: a connection, or an address of UDP."""

    @property
    def access(self) -> Access: ...

    def access_changed(self) -> None:
        """Leave the topics that may not be read any more."""
        ...

    def access_ended(self) -> None:
        """The account, password or token is gone: say so and close."""
        ...


class AccountAccess(Access):
    """The rights of an account, or of one of its tokens.

    Attributes:
        topics: those it may publish to, by full name; None if it is all (of the bus itself).
        readable: those it may subscribe to.
    """

    __slots__ = ("_accounts", "_full", "account", "is_ended", "readable", "renames", "token")

    def __init__(
        self, accounts: Mapping[str, Account], account: str, token: Token | None = None
    ) -> None:
        """`accounts` are all that exist, and change while the bus runs."""
        super().__init__({})
        self._accounts = accounts
        self.renames = account != names.ACCOUNT
        """Whether its names for topics are not always the full ones."""
        self.account = account
        self.token = token
        self.is_ended = False
        self.readable: dict[str, Topic] = {}
        self._full: dict[str, str] = {}

    def owner_of(self, topic: str) -> str:
        account, slash, _ = topic.partition("/")
        return account if slash and account in self._accounts else names.ACCOUNT

    def full(self, shown: str) -> str:
        """The full name of what the account calls so; a full name is its own."""
        if (known := self._full.get(shown)) is not None:
            return known
        if not self.renames or "/" in shown:
            return shown.removeprefix(DEFAULT_PREFIX)
        return names.full(self.account, shown)

    def shown(self, topic: str) -> str:
        """What the account calls a topic of this full name."""
        owner = self.owner_of(topic)
        if owner == self.account:
            return names.within(owner, topic)
        if owner != names.ACCOUNT or ("/" in topic and topic not in self.readable):
            # What does not exist keeps its name, so that nobody learns which accounts do.
            return topic
        return DEFAULT_PREFIX + topic

    def rights(self, topic: str) -> set[Right]:
        """What may be done with a topic of this full name, whether it exists or not."""
        owner = self.owner_of(topic)
        found: set[Right] = set()
        if self.is_ended:
            return found
        if owner == self.account:
            found = set(RIGHTS)
        else:
            own = names.within(owner, topic)
            for grant in self._accounts[owner].grants:
                if grant.to == self.account and matches((grant.topics,), own):
                    found |= set(grant.rights)
        if self.token is not None:
            if self.token.rights:
                found &= set(self.token.rights)
            if self.token.topics and not self._is_in_token(self.token, self.shown(topic)):
                found = set()
        if names.is_reserved(names.within(owner, topic)):
            # They tell of all accounts, so no grant shares them.
            found = found & {"subscribe"} if owner == self.account else set()
        return found

    def _is_in_token(self, token: Token, shown: str) -> bool:
        # A pattern without a slash is one of own topics: `o*` is not all that `office` shares.
        patterns = [one for one in token.topics if ("/" in one) == ("/" in shown)]
        return matches(patterns, shown)

    def may_read(self, topic: str) -> bool:
        """Whether a topic of this full name exists and may be subscribed to."""
        return topic in self.readable

    def own(self, name: str) -> str:
        """The full name of a group or producer that the account calls so."""
        return names.full(self.account, name)

    def mine(self, full: str) -> str | None:
        """What the account calls a group or producer; None if it belongs to another."""
        return names.within(self.account, full) if self.owner_of(full) == self.account else None

    def refresh(self, topics: Iterable[Topic]) -> None:
        """Accounts, grants or topics have changed. All dictionaries stay the same objects."""
        assert self.topics is not None
        self.topics.clear()
        self.readable.clear()
        self._full.clear()
        for topic in topics:
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
        """The account or token is gone: requests under way may do nothing more."""
        self.is_ended = True
        self.refresh(())


class AdminAccess(AccountAccess):
    """Everything, by full names: the access of administrators."""

    __slots__ = ("_has_topic",)

    def __init__(self, accounts: Mapping[str, Account], has_topic: Callable[[str], bool]) -> None:
        super().__init__(accounts, ADMIN)
        self._has_topic = has_topic
        self.renames = False
        # Not a dictionary of all topics for this one: they are many.
        self.topics = None

    def full(self, shown: str) -> str:
        return shown

    def shown(self, topic: str) -> str:
        return topic

    def rights(self, topic: str) -> set[Right]:
        return set(RIGHTS)

    def may_read(self, topic: str) -> bool:
        return self._has_topic(topic)

    def own(self, name: str) -> str:
        return name

    def mine(self, full: str) -> str | None:
        return full
