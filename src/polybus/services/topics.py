"""Creates and deletes topics on a running bus, and refuses what a cluster does not support yet.

Files change immediately. A cluster takes longer, so the call runs on another thread: the log
notifies the bus of the change before the call returns.
"""

import asyncio
from collections.abc import Iterable, Mapping

from polybus import names
from polybus.bus.bus import Bus
from polybus.errors import UsageError
from polybus.log.interface import Log, TopicSettings


async def create_topic(bus: Bus, name: str, settings: TopicSettings | None = None) -> None:
    """Create a topic. Raises as Bus.create_topic; StorageError if the cluster does not answer."""
    if not bus.is_late:
        bus.create_topic(name, settings)
        return
    await asyncio.to_thread(bus.log.create_topic, bus.check_new(name), settings)


async def create_topics(bus: Bus, wanted: Mapping[str, TopicSettings]) -> None:
    """Create topics together; another node may be faster. Raises as `create_topic` does."""
    if bus.is_late:
        checked = {bus.check_new(name, len(wanted)): one for name, one in wanted.items()}
        await create_missing(bus.log, checked)
    else:
        bus.create_topics(wanted)


async def create_missing(log: Log, wanted: Mapping[str, TopicSettings]) -> None:
    """Create those topics of a cluster that no node has created. Raises as `create_topic` does."""
    while missing := {name: wanted[name] for name in wanted.keys() - set(log.topics())}:
        try:
            await asyncio.to_thread(log.create_topics, missing)
        except UsageError as error:
            if error.code != "topic.exists":
                raise


async def delete_topic(bus: Bus, name: str, *, is_admin: bool = False) -> None:
    """Delete a topic. Raises as Bus.delete_topic; StorageError if the cluster does not answer."""
    if not bus.is_late:
        bus.delete_topic(name, is_admin=is_admin)
        return
    bus.check_deletable(name, is_admin=is_admin)
    await asyncio.to_thread(bus.log.delete_topic, name)


async def change_settings(bus: Bus, name: str, settings: TopicSettings) -> None:
    """Raises as Log.change_settings does."""
    if bus.is_late:
        await asyncio.to_thread(bus.log.change_settings, name, settings)
    else:
        bus.log.change_settings(name, settings)


async def make_system_topics(bus: Bus, settings: TopicSettings, accounts: Iterable[str]) -> None:
    """Raises as Bus.make_system_topics does."""
    if bus.is_late:
        bus.system_settings = settings
        wanted = [*names.SYSTEM_TOPICS, *(one for name in accounts for one in _topics_of(name))]
        await create_missing(bus.log, dict.fromkeys(wanted, settings))
    else:
        bus.make_system_topics(settings, accounts)


async def make_account_topics(bus: Bus, account: str) -> None:
    """Create the system topics of an account that do not exist. Raises StorageError."""
    if bus.is_late:
        await create_missing(bus.log, dict.fromkeys(_topics_of(account), bus.system_settings))
    else:
        bus.make_account_topics(account)


def _topics_of(account: str) -> list[str]:
    return [names.full(account, name) for name in names.ACCOUNT_SYSTEM_TOPICS]


def refuse_in_cluster(bus: Bus, what: str) -> None:
    """Refuse what works only on a single node. Raises UsageError `cluster.unsupported`."""
    if bus.is_late:
        text = f"{what} are not available while `log` names a Kafka cluster, only with files"
        raise UsageError("cluster.unsupported", text)
