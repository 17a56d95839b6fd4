"""/v1/topics, and /v1/consumers: the programs that read topics, with their position and lag."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from itertools import islice
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from polybus import names
from polybus.edges.http.calls import JSON, Call
from polybus.errors import StorageError
from polybus.log.interface import Bounds, TopicSettings
from polybus.services.consumers import ConsumerView, Report, TopicConsumer

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


class ConsumerList(msgspec.Struct):
    consumers: list[ConsumerView]


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
        name=name,
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
    """All topics; system topics too with system=true."""
    bus = call.state.bus
    pieces = []
    lags = call.state.consumers.lags()
    async for found in _in_order(bus.topic_names(system=query.system)):
        # Some may have been deleted since.
        topics = [
            state_of(call, name, lags.get(name), in_list=True)
            for name in found
            if bus.has_topic(name)
        ]
        if topics:
            pieces.append(msgspec.json.encode(topics)[1:-1])
    if query.durable:
        await call.state.context.durability.wait()
    # A TopicList, joined from pieces that were encoded one by one.
    return Response(b'{"topics":[' + b",".join(pieces) + b"]}", media_type=JSON)


async def _in_order(found: list[str]) -> AsyncIterator[list[str]]:
    """Sorted names in pieces; others run between pieces and while sorting."""
    runs = []
    for first in range(0, len(found), SLICE_TOPICS):
        runs.append(sorted(found[first : first + SLICE_TOPICS]))
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
    call.state.bus.create_topic(body.name, settings)
    return state_of(call, names.canonical(body.name))


async def show(call: Call, topic: str) -> TopicDetail:
    """One topic."""
    consumers = call.state.consumers.of_topic(topic)
    lag = max((one.lag or 0 for one in consumers), default=None)
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


async def list_consumers(call: Call) -> ConsumerList:
    """All consumers, with their lag."""
    return ConsumerList(call.state.consumers.views())


async def report(call: Call, body: Report) -> None:
    """Report a consumer's position; fields that are left out keep their values."""
    call.state.consumers.report(call.path["group"], body)
    await call.state.consumers.save()


async def forget(call: Call) -> None:
    """Forget a consumer; retention no longer waits for it."""
    call.state.consumers.forget(call.path["group"])
    await call.state.consumers.save()
