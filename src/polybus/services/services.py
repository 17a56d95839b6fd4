"""All services of one bus, started and stopped in order."""

from collections.abc import Iterable

from polybus.config import System
from polybus.log.interface import TopicSettings
from polybus.services.accounts.accounts import Accounts, AccountWatcher
from polybus.services.blobs.blobs import Blobs
from polybus.services.consumers import ConsumerRegistry
from polybus.services.context import Context
from polybus.services.sessions.inboxes import Inboxes
from polybus.services.state import StateDb
from polybus.services.topics import make_system_topics
from polybus.services.transactions.cluster import ClusterTransactions
from polybus.services.transactions.transactions import Transactions


def system_settings(system: System) -> TopicSettings:
    """The settings of the system topics."""
    return TopicSettings(
        retention_age_s=system.retention_age_s, retention_bytes=system.retention_bytes
    )


class Services(AccountWatcher):
    """Sessions, consumers and transactions over one state.db; blobs in separate files."""

    def __init__(self, context: Context, accounts: Accounts) -> None:
        self._context = context
        self._accounts = accounts
        accounts.watch(self)
        fsync = context.config.durability != "memory"
        self.state = StateDb(context.data, fsync=fsync)
        self.inboxes = Inboxes(context, self.state, accounts)
        self.consumers = ConsumerRegistry(context, self.state)
        self.blobs = Blobs(context, accounts)
        cluster = context.log.cluster
        given = (context, self.state, accounts, self.blobs)
        if cluster is None:
            self.transactions = Transactions(*given)
        else:
            self.transactions = ClusterTransactions(*given, cluster)

    async def start(self) -> None:
        """Restore what was saved, and finish transactions. Raises StorageError."""
        # Before the system topics: if they exist without a state.db, that was removed.
        await self.state.open()
        settings = system_settings(self._context.config.system)
        await make_system_topics(self._context.bus, settings, self._accounts.store.accounts)
        await self.blobs.start()
        await self.inboxes.start()
        await self.consumers.start()
        await self.transactions.start()

    def used_names(self) -> Iterable[str]:
        return self.consumers.groups()

    def access_lost(self, account: str) -> None:
        self.inboxes.access_lost(account)

    def token_ended(self, token: str) -> None:
        self.inboxes.end_of_token(token)

    def account_deleted(self, account: str) -> None:
        self.inboxes.end_all(account)
        for group in self.consumers.groups():
            if self._accounts.admin.owner_of(group) == account:
                self.consumers.forget(group)

    async def forget_account(self, account: str) -> None:
        """Remove the remaining state of a deleted account durably. Raises StorageError."""
        await self.inboxes.saved()
        await self.consumers.save()
        await self.transactions.forget_account(account)

    async def close(self) -> None:
        """Save everything; call this when no peer is connected any more."""
        await self.transactions.close()
        await self.blobs.close()
        await self.consumers.close()
        await self.inboxes.close()
        await self.state.close()
