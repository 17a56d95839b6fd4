"""Creating and deleting topics on a running bus, and what a cluster does not do yet.

Files change immediately. A cluster takes longer, and the loop does not wait for it: the log
notifies the bus of the change before the call here returns.
"""

import asyncio

from polybus import names
from polybus.bus.bus import Bus
from polybus.errors import UsageError
from polybus.log.interface import TopicSettings


async def create_topic(bus: Bus, name: str, settings: TopicSettings | None = None) -> None:
    """Raises as Bus.create_topic; StorageError, the cluster does not answer."""
    if not bus.is_late:
        bus.create_topic(name, settings)
        return
    await asyncio.to_thread(bus.log.create_topic, bus.check_new(name), settings)


async def delete_topic(bus: Bus, name: str, *, is_admin: bool = False) -> None:
    """Raises as Bus.delete_topic; StorageError, the cluster does not answer."""
    if not bus.is_late:
        bus.delete_topic(name, is_admin=is_admin)
        return
    bus.check_deletable(name, is_admin=is_admin)
    await asyncio.to_thread(bus.log.delete_topic, name)


async def change_settings(bus: Bus, name: str, settings: TopicSettings) -> None:
    """Raises as Log.change_settings."""
    if bus.is_late:
        await asyncio.to_thread(bus.log.change_settings, name, settings)
    else:
        bus.log.change_settings(name, settings)


async def make_account_topics(bus: Bus, account: str) -> None:
    """Create the system topics of an account that do not exist. Raises StorageError."""
    if not bus.is_late:
        bus.make_account_topics(account)
        return
    for name in names.ACCOUNT_SYSTEM_TOPICS:
        try:
            full = names.full(account, name)
            await asyncio.to_thread(bus.log.create_topic, full, bus.system_settings)
        except UsageError as error:
            if error.code != "topic.exists":
                raise


def refuse_in_cluster(bus: Bus, what: str) -> None:
    """Refuse what works on one node only. Raises UsageError `cluster.unsupported`."""
    if bus.is_late:
        text = f"{what} are not available while `log` names a Kafka cluster, only with files"
        raise UsageError("cluster.unsupported", text)
