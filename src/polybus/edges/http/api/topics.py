"""/v1/topics: an account sees the topics that it may read, under its own names for them."""

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from polybus import names
from polybus.edges.http.calls import JSON, Call, denied
from polybus.errors import StorageError, UsageError
from polybus.log.history.retention import limits_of
from polybus.log.interface import Bounds, Log, TopicSettings
from polybus.services.accounts.access import AccountAccess
from polybus.services.accounts.storage import stored_bytes
from polybus.services.consumers import TopicConsumer
from polybus.services.events import iso_time
from polybus.services.topics import change_settings, create_topic, delete_topic

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
PositiveBytes = Annotated[int, msgspec.Meta(gt=0, le=1 << 62)]
SLASH = "the name of a topic must not contain /"
ENDS_MAX = 8
SLICE_TOPICS = 500
"""Topics per piece: some milliseconds of work, then other tasks run."""


class NewTopic(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A topic to create; the bus's retention applies unless it sets its own."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    retention_age_s: Positive | None = None
    retention_bytes: PositiveBytes | None = None


class TopicRetention(msgspec.Struct, rename="kebab"):
    """The retention of a topic: its own, where null is that of the bus, or what is in effect."""

    retention_age_s: float | None
    retention_bytes: int | None


class TopicState(msgspec.Struct, rename="kebab", omit_defaults=True, kw_only=True):
    """A topic holds the offsets `start` (inclusive) to `stop` (exclusive) of its epoch.

    For a `damaged` topic epoch, start and stop are 0. Messages and bytes are counted since the bus
    started; `published_on` names the protocols on which they came in, `last_time` is when the last
    did. `lag` is the largest of any consumer, `history_bytes` the size of its history on disk.
    `stored_bytes` adds what is not history yet, which is an estimate; blobs are not in it.
    `retention` is how much is kept, by its own settings or those of the bus.
    """

    name: str
    epoch: int
    start: int
    stop: int
    messages_in: int
    messages_out: int
    published_on: list[str]
    subscribers: int
    lag: int | None
    bytes_in: int
    bytes_out: int
    in_per_s: float
    out_per_s: float
    bytes_in_per_s: float
    bytes_out_per_s: float
    history_bytes: int
    stored_bytes: int
    last_time: str | None
    retention: TopicRetention
    damaged: str = ""


class TopicChange(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Omitted fields keep their values; null means the retention of the bus."""

    retention_age_s: Positive | None | msgspec.UnsetType = msgspec.UNSET
    retention_bytes: PositiveBytes | None | msgspec.UnsetType = msgspec.UNSET


class TopicDetail(TopicState, rename="kebab", omit_defaults=True, kw_only=True):
    """A topic, its settings, the times of its messages, the size of its history, its consumers."""

    settings: TopicRetention
    first_time: str | None
    history_files: int
    handed_over: int | msgspec.UnsetType = msgspec.UNSET
    memory_bytes: int | msgspec.UnsetType = msgspec.UNSET
    consumers: list[TopicConsumer]


class ListQuery(msgspec.Struct, forbid_unknown_fields=True):
    """With `durable` the answer waits until all messages that it counts are durable."""

    system: bool = False
    durable: bool = False


class TopicList(msgspec.Struct):
    topics: list[TopicState]


def state_of(call: Call, name: str, lag: int | None = None, *, in_list: bool = False) -> TopicState:
    """Raises StorageError if the topic is damaged, except in a list, where it would hide the
    others.
    """
    bounds, damaged = Bounds(0, 0, 0), ""
    try:
        bounds = call.state.bus.log.bounds(name)
    except StorageError as error:
        if not in_list:
            raise
        damaged = error.text
    topic = call.state.bus.topic(name)
    delivered = call.state.delivered(topic).values()
    rate = call.state.figures.of_topic(name)
    per_s = (0.0, 0.0, 0.0, 0.0) if rate is None else rate.rates
    limits = limits_of(call.state.bus.log.settings(name), call.state.consumers.retention)
    return TopicState(
        name=call.access.shown(name),
        epoch=bounds.epoch,
        start=bounds.start,
        stop=bounds.stop,
        messages_in=topic.messages_in,
        messages_out=sum(one.messages for one in delivered),
        bytes_in=sum(one.value_bytes for one in topic.taken.values()),
        bytes_out=sum(one.value_bytes for one in delivered),
        in_per_s=per_s[0],
        bytes_in_per_s=per_s[1],
        out_per_s=per_s[2],
        bytes_out_per_s=per_s[3],
        history_bytes=call.state.bus.log.describe(name)["history-bytes"],
        stored_bytes=stored_bytes(call.state.bus, name),
        last_time=iso_time(rate.last_us) if rate is not None and rate.last_us else None,
        published_on=sorted(topic.taken),
        subscribers=len(topic.subscribers),
        lag=lag,
        retention=TopicRetention(limits.age_s, limits.bytes),
        damaged=damaged,
    )


async def list_topics(call: Call, query: ListQuery) -> Annotated[Response, TopicList]:
    """All topics that may be read; system topics too with system=true."""
    access = call.access
    pieces = []
    cluster = call.state.bus.log.cluster
    if query.durable and cluster is not None:
        # An end must never move back, whichever node is asked next.
        await asyncio.to_thread(cluster.catch_up_all)
    lags = call.state.consumers.lags()
    async for found in _in_order(access, call.state.bus.topic_names(system=query.system)):
        # Some may have been deleted since.
        topics = [
            state_of(call, name, lags.get(name), in_list=True)
            for _, name in found
            if access.may_read(name)
        ]
        if topics:
            pieces.append(msgspec.json.encode(topics)[1:-1])
    if query.durable:
        await call.state.context.durability.wait()
    # A TopicList, joined from pieces that were encoded one by one.
    return Response(b'{"topics":[' + b",".join(pieces) + b"]}", media_type=JSON)


async def _in_order(
    access: AccountAccess, found: list[str]
) -> AsyncIterator[list[tuple[str, str]]]:
    """Readable topics, each with its shown name, sorted by it, in pieces.

    Other tasks run between pieces and while sorting.
    """
    runs: list[list[tuple[str, str]]] = []
    for first in range(0, len(found), SLICE_TOPICS):
        piece = found[first : first + SLICE_TOPICS]
        runs.append(sorted((access.shown(name), name) for name in piece if access.may_read(name)))
        await asyncio.sleep(0)
    merged = heapq.merge(*runs)
    while some := list(islice(merged, SLICE_TOPICS)):
        yield some
        await asyncio.sleep(0)


async def create(call: Call, body: NewTopic) -> TopicState:
    """Create a topic."""
    settings = TopicSettings(
        retention_age_s=body.retention_age_s, retention_bytes=body.retention_bytes
    )
    name = _new_name(call, names.canonical(body.name))
    owner = call.access.owner_of(name)
    await create_topic(call.state.bus, name, settings)
    if owner != names.ACCOUNT:
        await call.state.accounts.keep_topics(owner, [name])
    call.changes(name, msgspec.structs.asdict(settings))
    return state_of(call, name)


def _new_name(call: Call, shown: str) -> str:
    """The full name of a topic to create.

    Raises UsageError `topic.invalid`, `topic.reserved`, `auth.denied`, `account.topics`; never
    whether it exists.
    """
    access = call.access
    if access.renames and "/" in shown:
        # The answer must not reveal whether the topic exists.
        raise UsageError("topic.invalid", SLASH)
    name = access.full(shown)
    owner = access.owner_of(name)
    if owner != names.ACCOUNT:
        _check_own(names.within(owner, name))
    is_reserved = names.is_reserved(name)
    if not is_reserved and owner != access.account and not call.is_admin:
        raise denied(f"'{shown}' would belong to another account")
    if not is_reserved and "administer" not in access.rights(name):
        raise denied("you may not create this topic")
    call.state.accounts.check_topics(owner)
    return name


def _check_own(own: str) -> None:
    """Refuse names that a named account may not use, as the bus does for the default account."""
    if "/" in own:
        raise UsageError("topic.invalid", SLASH)
    if names.is_reserved(own):
        raise UsageError("topic.reserved", f"'{own}': names that begin with $ are reserved")
    names.check_creatable(names.canonical(own))


async def show(call: Call, topic: str) -> TopicDetail:
    """One topic."""
    found = call.state.consumers.of_topic(topic)
    lag = max((one.lag or 0 for one in found), default=None)
    consumers = [
        msgspec.structs.replace(one, group=group)
        for one in found
        if (group := call.access.mine(one.group)) is not None
    ]
    log = call.state.bus.log
    settings = log.settings(topic)
    figures: dict[str, Any] = {
        name.replace("-", "_"): value for name, value in log.describe(topic).items()
    }
    first_time, last_time = await asyncio.to_thread(_times, log, topic)
    figures |= msgspec.structs.asdict(state_of(call, topic, lag)) | {"last_time": last_time}
    return TopicDetail(
        settings=TopicRetention(settings.retention_age_s, settings.retention_bytes),
        first_time=first_time,
        consumers=consumers,
        **figures,
    )


def _times(log: Log, topic: str) -> tuple[str | None, str | None]:
    """When the first and the last message that the topic holds came in. May block."""
    bounds = log.bounds(topic)
    if bounds.start == bounds.stop:
        return None, None
    # The last offsets may be the ends of transactions, without a message.
    ends = range(bounds.stop - 1, max(bounds.start, bounds.stop - ENDS_MAX) - 1, -1)
    return _time(log, topic, (bounds.start,)), _time(log, topic, ends)


def _time(log: Log, topic: str, offsets: Iterable[int]) -> str | None:
    """The time of the first message at or after any of these offsets, in order."""
    for offset in offsets:
        # Retention, or a deletion, may be faster.
        with contextlib.suppress(UsageError):
            if batches := log.read(topic, offset, bytes_max=1):
                return iso_time(batches[0].timestamp_us)
    return None


async def change(call: Call, topic: str, body: TopicChange) -> TopicDetail:
    """Change the retention of a topic."""
    before = call.state.bus.log.settings(topic)
    given = {
        name: value
        for name, value in msgspec.structs.asdict(body).items()
        if value is not msgspec.UNSET
    }
    settings = msgspec.structs.replace(before, **given)
    await change_settings(call.state.bus, topic, settings)
    call.changes(topic, msgspec.structs.asdict(settings))
    return await show(call, topic)


async def delete(call: Call, topic: str) -> None:
    """Delete a topic and its messages; a damaged system topic needs the administrator's token."""
    await delete_topic(call.state.bus, topic, is_admin=call.is_admin)
    call.changes(topic)
