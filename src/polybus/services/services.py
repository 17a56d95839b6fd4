"""All services of one bus, started and stopped in order."""

from polybus.log.interface import TopicSettings
from polybus.services.accounts.accounts import Accounts, AccountWatcher
from polybus.services.consumers import ConsumerBook
from polybus.services.context import Context
from polybus.services.sessions.inboxes import Inboxes
from polybus.services.state import StateDb
from polybus.services.transactions.transactions import Transactions


class Services(AccountWatcher):
    """Sessions, consumers and transactions over one state.db."""

    def __init__(self, context: Context, accounts: Accounts) -> None:
        self._context = context
        self._accounts = accounts
        accounts.watch(self)
        fsync = context.config.durability != "memory"
        self.state = StateDb(context.data, fsync=fsync)
        self.inboxes = Inboxes(context, self.state, accounts)
        self.consumers = ConsumerBook(context, self.state)
        self.transactions = Transactions(context, self.state, accounts)

    async def start(self) -> None:
        """Restore what was saved, and finish transactions. Raises StorageError."""
        # Before the system topics: where these are, a missing state.db was removed.
        await self.state.open()
        system = self._context.config.system
        self._context.bus.make_system_topics(
            TopicSettings(
                retention_age_s=system.retention_age_s, retention_bytes=system.retention_bytes
            )
        )
        await self.inboxes.start()
        await self.consumers.start()
        await self.transactions.start()

    def accounts_changed(self) -> None:
        self.inboxes.accounts_changed()

    def account_deleted(self, account: str) -> None:
        self.inboxes.end_all(account)
        for group in self.consumers.groups():
            if self._accounts.admin.owner_of(group) == account:
                self.consumers.forget(group)

    async def forget_account(self, account: str) -> None:
        """Make durable that nothing is left of a deleted account. Raises StorageError."""
        await self.inboxes.saved()
        await self.consumers.save()
        await self.transactions.forget_account(account)

    async def close(self) -> None:
        """Save everything; call this when nothing is connected any more."""
        await self.transactions.close()
        await self.consumers.close()
        await self.inboxes.close()
        await self.state.close()
