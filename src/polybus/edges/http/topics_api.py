"""/v1/topics: an account sees the topics that it may read, under its own names for them."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from itertools import islice
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from polybus import names
from polybus.edges.http.calls import JSON, Call, denied
from polybus.errors import StorageError, UsageError
from polybus.log.interface import Bounds, TopicSettings
from polybus.services.accounts.access import AccountAccess
from polybus.services.consumers import TopicConsumer

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
PositiveBytes = Annotated[int, msgspec.Meta(gt=0, le=1 << 62)]
SLICE_TOPICS = 500
"""Topics per piece: some milliseconds of work, then others run."""


class NewTopic(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A topic to create; the bus's retention applies unless it sets its own."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    retention_age_s: Positive | None = None
    retention_bytes: PositiveBytes | None = None


class TopicState(msgspec.Struct, rename="kebab", omit_defaults=True, kw_only=True):
    """A topic holds the offsets `start` (inclusive) to `stop` (exclusive) of its epoch.

    For a `damaged` topic epoch, start and stop are 0. Messages are counted since the bus started;
    `published_on` names the protocols on which they came in. `lag` is the largest of any consumer.
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
    damaged: str = ""


class TopicRetention(msgspec.Struct, rename="kebab"):
    """A topic's own retention; null is that of the bus."""

    retention_age_s: float | None
    retention_bytes: int | None


class TopicDetail(TopicState, rename="kebab", omit_defaults=True, kw_only=True):
    """A topic, its settings, the size of its history, and its consumers."""

    settings: TopicRetention
    history_files: int
    history_bytes: int
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
    """Raises StorageError, the topic is damaged; not in a list, where it would hide the others."""
    bounds, damaged = Bounds(0, 0, 0), ""
    try:
        bounds = call.state.bus.log.bounds(name)
    except StorageError as error:
        if not in_list:
            raise
        damaged = error.text
    topic = call.state.bus.topic(name)
    return TopicState(
        name=call.access.shown(name),
        epoch=bounds.epoch,
        start=bounds.start,
        stop=bounds.stop,
        messages_in=topic.messages_in,
        messages_out=sum(one.messages for one in call.state.delivered(topic).values()),
        published_on=sorted(topic.taken),
        subscribers=len(topic.subscribers),
        lag=lag,
        damaged=damaged,
    )


async def list_topics(call: Call, query: ListQuery) -> Annotated[Response, TopicList]:
    """All topics that may be read; system topics too with system=true."""
    access = call.access
    pieces = []
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

    Others run between pieces and while sorting.
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
    call.state.bus.create_topic(name, settings)
    return state_of(call, name)


def _new_name(call: Call, shown: str) -> str:
    """The full name of a topic to create.

    Raises UsageError `topic.invalid`, `topic.reserved`, `auth.denied`, `account.topics`; never
    whether it exists.
    """
    access = call.access
    if access.renames and "/" in shown:
        # Of others or of its own: the answer tells nothing about them.
        raise UsageError("topic.invalid", "the name of a topic has no / in it")
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
    """Refuse what a named account may not call a topic, as the bus does for the default one."""
    if "/" in own:
        raise UsageError("topic.invalid", "the name of a topic has no / in it")
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
    return TopicDetail(
        **msgspec.structs.asdict(state_of(call, topic, lag)),
        settings=TopicRetention(settings.retention_age_s, settings.retention_bytes),
        consumers=consumers,
        **figures,
    )


async def delete(call: Call, topic: str) -> None:
    """Delete a topic and its messages; a damaged system topic needs the administrator's token."""
    call.state.bus.delete_topic(topic, is_admin=call.is_admin)
