"""Which topics a transaction may write; its files have the account's own names."""

from collections.abc import Iterable, Sequence

from polybus import names
from polybus.batch import Batch
from polybus.bus.bus import Bus, unknown_topic
from polybus.errors import UsageError
from polybus.services.accounts.access import ADMIN, AccountAccess
from polybus.services.transactions.commits import TOPIC


def check_topics(bus: Bus, access: AccountAccess, topics: Iterable[str]) -> None:
    """Raises UsageError `topic.unknown`, `topic.reserved`, `auth.denied` or `account.bytes`."""
    for shown in sorted(topics):
        topic = access.full(shown)
        check_system(topic, may=access.account == ADMIN)
        # Both checks for every name: a forbidden topic takes as long as one that does not exist.
        rights, exists = access.rights(topic), bus.has_topic(topic)
        if "publish" not in rights or not exists:
            if "subscribe" in rights and exists:
                raise UsageError("auth.denied", f"you may read '{shown}', but not publish to it")
            raise unknown_topic(shown)
        full = bus.refusal(topic)
        if full is not None and not names.is_reserved(topic):
            raise full.copy()


def check_system(topic: str, *, may: bool) -> None:
    """Refuse to write to a system topic. Raises UsageError `topic.reserved`."""
    if names.is_reserved(topic) and (topic == TOPIC or not may):
        text = f"'{topic}' is a system topic: writing to it needs the administrator's token"
        raise UsageError("topic.reserved", text)


def check_quota(access: AccountAccess, now_us: int) -> None:
    """Raises UsageError `account.rate`."""
    refusal = access.quota.refusal(now_us) if access.quota is not None else None
    if refusal is not None:
        raise refusal.copy()


def charge(access: AccountAccess, batches: Sequence[Batch]) -> None:
    """Count what was published towards the account's quota."""
    if access.quota is not None:
        access.quota.charge(sum(map(len, batches)), sum(one.value_bytes for one in batches))


def give_full_names(batches: Sequence[Batch], access: AccountAccess) -> None:
    for batch in batches:
        full = access.full(batch.topic)
        if full != batch.topic:
            batch.rename(full)
