"""/v1/dead-letters, /v1/undelivered, /v1/replays: what failed, and publishing it again.

Dead letters have the bytes of messages of all topics, so only callers who may see tables get them.
Publishing them again needs the right to publish to each of their topics.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.responses import Response

from polybus.edges.http.api.queries import sees_tables
from polybus.edges.http.calls import JSON, OFFSET_MAX, Call, Viewer, denied
from polybus.errors import PeerError, UsageError
from polybus.services.events import UndeliveredRange
from polybus.services.queries.jobs import LettersJob, UndeliveredJob, UndeliveredRow
from polybus.services.queries.ranges import count_messages, joined
from polybus.services.redrives import Redrive, run_of_letters, run_of_ranges
from polybus.services.tallies import EVENTS_TOPIC
from polybus.services.undelivered import UndeliveredMatches
from polybus.structs import decode

T = TypeVar("T")
LETTERS_MAX = 10_000
RANGES_MAX = 100


class LettersQuery(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Which dead letters: of a topic, with a text in the reason or in the value, or one by its id.

    Values are cut to 64 KiB; `whole`, which needs an id, has all of it.
    """

    topic: str = ""
    reason: str = ""
    text: str = ""
    id: str = ""
    whole: bool = False
    from_: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] = msgspec.field(name="from", default=0)
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class LetterCount(msgspec.Struct):
    topic: str
    reason: str
    count: int


class DeadLetter(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A message that could not be processed, why, and when it was published again."""

    id: str
    topic: str
    epoch: int
    offset: int
    timestamp: str | None
    reason: str
    protocol: str
    sender: str
    key: Any
    headers: dict[str, Any]
    size: int
    cut: bool
    replayed: str | None
    text: str | msgspec.UnsetType = msgspec.UNSET
    base64: str | msgspec.UnsetType = msgspec.UNSET


class DeadLetterList(msgspec.Struct):
    """Dead letters, the newest first; `total` and `by` count those that still wait."""

    letters: list[DeadLetter]
    total: int
    next: int | None
    by: list[LetterCount]


class NewReplay(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Which dead letters to publish again: those named, or all that match; and how fast."""

    letters: Annotated[list[str], msgspec.Meta(max_length=LETTERS_MAX)] = []
    topic: str = ""
    reason: str = ""
    text: str = ""
    dry_run: bool = False
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None


class UndeliveredQuery(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Filters: a topic; a text in the reason; a text in the topic or subscriber; and a page."""

    topic: str = ""
    reason: str = ""
    text: str = ""
    from_: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)] = msgspec.field(name="from", default=0)
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class UndeliveredList(msgspec.Struct):
    """Undelivered messages, newest first; `next` is the `from` of the next page."""

    undelivered: list[UndeliveredRow]
    next: int | None


class TopicRange(msgspec.Struct, forbid_unknown_fields=True):
    """Messages of a topic, from `first` up to `stop`."""

    topic: str
    epoch: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)]
    first: Annotated[int, msgspec.Meta(ge=0, le=OFFSET_MAX)]
    stop: Annotated[int, msgspec.Meta(ge=1, le=OFFSET_MAX)]


class UndeliveredReplay(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Which messages to publish again: in these ranges, or all that match; and how fast."""

    ranges: (
        Annotated[list[TopicRange], msgspec.Meta(min_length=1, max_length=RANGES_MAX)]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    topic: str = ""
    reason: str = ""
    text: str = ""
    dry_run: bool = False
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None


class ReplayList(msgspec.Struct):
    replays: list[Redrive]


def _check(viewer: Viewer) -> None:
    if not sees_tables(viewer):
        raise denied("dead letters have messages of all topics: only administrators see them here")


async def list_letters(call: Call, query: LettersQuery) -> Annotated[Response, DeadLetterList]:
    """Messages that could not be processed."""
    _check(call)
    if query.whole and not query.id:
        raise PeerError("http.query", "whole needs the id of one dead letter")
    job = LettersJob(query.topic.lower(), query.reason, query.text, query.from_, query.limit)
    job.ids, job.is_whole = [query.id] if query.id else [], query.whole
    return Response(await call.state.queries.data(job), media_type=JSON)


async def show_letter(call: Call) -> DeadLetter:
    """One message that could not be processed, with its whole value."""
    _check(call)
    job = LettersJob(ids=[call.path["id"]], limit=1, is_whole=True)
    found = decode(await call.state.queries.data(job), DeadLetterList).letters
    if not found:
        raise UsageError("letter.unknown", "there is no such dead letter")
    return found[0]


async def start_replay(call: Call, body: NewReplay) -> Redrive:
    """Publish dead letters again, each once; with dry-run only count them."""
    _check(call)
    topic, reason, text = body.topic.lower(), body.reason, body.text
    # All topics and reasons are counted: each topic needs the right.
    job = LettersJob(topic, reason, text, ids=body.letters, limit=1, pairs_max=None)
    data = await call.state.queries.data(job)
    found = decode(data, DeadLetterList)
    topics: dict[str, int] = {}
    for one in found.by:
        topics[one.topic] = topics.get(one.topic, 0) + one.count
    _check_topics(call, topics)
    redrives = call.state.redrives
    redrive = redrives.plan(call.who, topics, body.rate)
    redrive.dry_run = body.dry_run
    if not body.dry_run:
        asked = {"topic": topic, "reason": reason, "text": text}
        filters = {name: value for name, value in asked.items() if value}
        redrives.start(redrive, call.who, _alone(run_of_letters(filters, body.letters)))
        call.changes(redrive.id, {"messages": redrive.messages, "topics": topics, **filters})
    return redrive


async def list_undelivered(
    call: Call, query: UndeliveredQuery
) -> Annotated[Response, UndeliveredList]:
    """Messages that a subscriber did not get, from the events of the last days."""
    _check(call)
    events = [one for one in call.state.bus.topic_names(system=True) if one.endswith(EVENTS_TOPIC)]
    job = UndeliveredJob(events, query.topic.lower(), query.limit, query.reason, query.text)
    job.first = query.from_
    return Response(await call.state.queries.data(job), media_type=JSON)


async def replay_undelivered(call: Call, body: UndeliveredReplay) -> Redrive:
    """Publish undelivered messages to their topics again, once: all subscribers get them."""
    _check(call)
    wanted = (body.topic.lower(), body.reason, body.text)
    filters = dict(zip(("topic", "reason", "text"), wanted, strict=True))
    filters = {name: value for name, value in filters.items() if value}
    if body.ranges is msgspec.UNSET:
        matches = UndeliveredMatches(call.state.bus, call.state.queries, wanted)
        topics, pages = await matches.count(), matches.pages()
        _check_topics(call, topics)
    elif filters:
        raise PeerError("http.body-invalid", "give either ranges or filters, not both")
    else:
        for given in body.ranges:
            _check_range(call, given)
        ranges = joined(UndeliveredRange(*msgspec.structs.astuple(one)) for one in body.ranges)
        topics, pages = count_messages(ranges), _alone(ranges)
    redrives = call.state.redrives
    redrive = redrives.plan(call.who, topics, body.rate)
    redrive.dry_run = body.dry_run
    if not body.dry_run:
        # Another process reads the log: it would not find messages that are only in memory.
        await call.state.context.durability.wait()
        redrives.start(redrive, call.who, (run_of_ranges(page) async for page in pages))
        call.changes(redrive.id, {"messages": redrive.messages, "topics": topics, **filters})
    return redrive


async def _alone(item: T) -> AsyncIterator[T]:
    yield item


def _check_topics(call: Call, topics: Iterable[str]) -> None:
    for topic in topics:
        if "publish" not in call.access.rights(topic):
            raise denied(f"you may not publish to {topic!r}; name the topics that you may")


def _check_range(call: Call, wanted: TopicRange) -> None:
    if "publish" not in call.access.rights(wanted.topic):
        raise denied(f"you may not publish to {wanted.topic!r}")
    bounds = call.state.bus.log.bounds(wanted.topic)
    is_held = bounds.start <= wanted.first < wanted.stop <= bounds.stop
    if wanted.epoch != bounds.epoch or not is_held:
        text = f"topic {wanted.topic!r} no longer has these messages"
        raise UsageError("log.offset-unknown", text)


async def list_replays(call: Call) -> ReplayList:
    """The last replays of dead letters."""
    _check(call)
    return ReplayList(call.state.redrives.all())


async def show_replay(call: Call) -> Redrive:
    """One replay of dead letters."""
    _check(call)
    return call.state.redrives.get(call.path["id"])


async def stop_replay(call: Call) -> None:
    """Stop a replay after its current part; what was published is recorded."""
    _check(call)
    if call.state.redrives.stop(call.path["id"]):
        call.changes(call.path["id"])


async def live_replay(viewer: Viewer, about: Mapping[str, str]) -> Redrive:
    _check(viewer)
    return viewer.state.redrives.get(about["replay"])
