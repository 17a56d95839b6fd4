"""Reads the log for sessions: packs that are not in memory, and messages to catch up with."""

import asyncio

from polybus.errors import StorageError, UsageError
from polybus.log.interface import Log
from polybus.services.sessions.contents import Content, Follow, JsonCache
from polybus.services.sessions.feeds import PACK_BYTES
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import encode_messages, join_contents


async def json_of(log: Log, cache: JsonCache, content: Content, shown: str) -> bytes | None:
    """A content's JSON; None if its messages are no longer in the log. Raises StorageError.

    `shown` is what the session's account calls the topic.
    """
    if content.json is not None:
        return content.json
    json = await asyncio.to_thread(_read_all, log, content, shown)
    if json is not None:
        cache.put(content, json)
    return json


async def catch_up(log: Log, cache: JsonCache, session: Session) -> None:
    """Read the messages that the session has missed, as far as it has room."""
    while (follow := session.wants_catch_up()) is not None:
        if follow.try_live():
            session.cut()
            continue
        feed, offset = follow.feed, follow.offset
        try:
            piece = await asyncio.to_thread(_read_next, log, follow, offset)
            if session.follows.get(feed.topic) is not follow or follow.offset != offset:
                # Another request was faster, or the session no longer follows the topic, which may
                # be deleted.
                continue
            start = 0 if piece is not None else log.bounds(feed.topic).start
        except StorageError:
            session.hold(feed.topic)
            continue
        if piece is None:
            # The messages that the session needs have expired: continue where the log begins.
            start = min(max(start, offset + 1), feed.stop_offset)
            session.note_missing(follow, start)
            continue
        content, json = piece
        if not content.count:
            follow.read_to(content.first_offset)
            continue
        cache.put(content, json)
        session.add_caught(follow, content)


def _read_all(log: Log, content: Content, shown: str) -> bytes | None:
    """The content's messages, encoded. May block."""
    encoded = []
    offset = content.first_offset
    while offset < content.stop_offset:
        wanted = Content(content.topic, content.epoch, offset, content.stop_offset - offset)
        piece = _read(log, wanted, shown, bytes_max=max(content.value_bytes, 1))
        if piece is None or piece[0].first_offset != offset:
            return None
        encoded.append(piece[1])
        offset = piece[0].stop_offset
    return join_contents(encoded)


def _read_next(log: Log, follow: Follow, offset: int) -> tuple[Content, bytes] | None:
    """The next messages of a session that catches up; None if the log does not have them."""
    feed = follow.feed
    # Stop where the feed's entries begin, so that the session can continue with those.
    contents = list(feed.contents)
    stops = [one.first_offset for one in contents if one.first_offset > offset][:1]
    stop = stops[0] if stops else feed.stop_offset
    wanted = Content(feed.topic, feed.epoch, offset, stop - offset)
    return _read(log, wanted, feed.shown, bytes_max=PACK_BYTES)


def _read(log: Log, wanted: Content, shown: str, *, bytes_max: int) -> tuple[Content, bytes] | None:
    """The first of the wanted messages and their JSON; None if the log does not have them.

    A cluster's log has gaps: they end a piece. If there is only a gap, the piece is empty and
    begins after it. Raises StorageError if the messages are damaged.
    """
    topic, epoch, stop = wanted.topic, wanted.epoch, wanted.stop_offset
    try:
        batches = log.read(topic, wanted.first_offset, bytes_max=bytes_max)
        if not batches and log.arrives_late and log.bounds(topic).epoch == epoch:
            return Content(topic, epoch, stop, 0), b""
    except UsageError:
        return None
    if not batches or batches[0].epoch != epoch:
        return None
    first = batches[0].first_offset
    encoded = []
    count = value_bytes = 0
    for batch in batches:
        if batch.first_offset != first + count:
            break
        part = batch.slice(0, max(0, min(len(batch), stop - batch.first_offset)))
        if not len(part):
            break
        encoded.append(encode_messages(part, shown))
        count += len(part)
        value_bytes += part.value_bytes
    if not count:
        return (Content(topic, epoch, stop, 0), b"") if log.arrives_late else None
    return Content(topic, epoch, first, count, value_bytes), join_contents(encoded)
