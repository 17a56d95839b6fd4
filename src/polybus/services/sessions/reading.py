"""Reads the log for sessions: packs that are not in memory, and messages to catch up with."""

import asyncio

from polybus.errors import StorageError, UsageError
from polybus.log.interface import Log
from polybus.services.sessions.feeds import Content, Follow, JsonCache
from polybus.services.sessions.session import Session
from polybus.wire.msgstream import encode_messages, join_contents

PIECE_BYTES = 256 << 10


class PackReader:
    """The log as sessions see it."""

    def __init__(self, log: Log, cache: JsonCache) -> None:
        self._log = log
        self._cache = cache

    async def json_of(self, content: Content) -> bytes | None:
        """A content's JSON; None if its messages are no longer in the log."""
        if content.json is None:
            json = await asyncio.to_thread(read_content, self._log, content)
            if json is None:
                return None
            self._cache.put(content, json)
            return json
        return content.json

    async def catch_up(self, session: Session) -> None:
        """Read from the log what the session has missed, as far as it has room."""
        while (follow := session.wants_catch_up()) is not None:
            if follow.try_live():
                session.cut()
                continue
            offset = follow.offset
            content = await asyncio.to_thread(read_piece, self._log, follow, offset)
            if session.follows.get(follow.feed.topic) is not follow or follow.offset != offset:
                # Another request was faster, or the session no longer follows the topic.
                continue
            if content is None:
                self._skip(session, follow)
                continue
            json, content.json = content.json, None
            if json is not None:
                self._cache.put(content, json)
            session.add_caught(follow, content)

    def _skip(self, session: Session, follow: Follow) -> None:
        """The messages that the session needs have expired: continue where the log begins."""
        feed = follow.feed
        start = min(max(self._log.bounds(feed.topic).start, follow.offset + 1), feed.stop_offset)
        session.note_missing(follow, start)


def read_content(log: Log, content: Content) -> bytes | None:
    """The content's messages, encoded. May block."""
    encoded = []
    offset = content.first_offset
    try:
        while offset < content.stop_offset:
            wanted = max(content.value_bytes, 1)
            batches = log.read(content.topic, offset, bytes_max=wanted)
            if not batches or batches[0].epoch != content.epoch:
                return None
            for batch in batches:
                missing = content.stop_offset - offset
                if missing <= 0:
                    break
                part = batch if len(batch) <= missing else batch.slice(0, missing)
                encoded.append(encode_messages(part))
                offset += len(part)
    except (UsageError, StorageError):
        return None
    return join_contents(encoded)


def read_piece(log: Log, follow: Follow, offset: int) -> Content | None:
    """The next messages of a session that catches up; None if the log does not have them."""
    feed = follow.feed
    # Stop where the feed's own entries begin, so that the session can go on with those.
    contents = list(feed.contents)
    stops = [one.first_offset for one in contents if one.first_offset > offset][:1]
    stop = stops[0] if stops else feed.stop_offset
    try:
        batches = log.read(feed.topic, offset, bytes_max=PIECE_BYTES)
    except (UsageError, StorageError):
        return None
    if not batches or batches[0].epoch != feed.epoch:
        return None
    encoded = []
    piece = Content(feed.topic, feed.epoch, offset, 0)
    for batch in batches:
        part = batch.slice(0, min(len(batch), stop - piece.stop_offset))
        if not len(part):
            break
        encoded.append(encode_messages(part))
        piece.count += len(part)
        piece.value_bytes += part.value_bytes
    if not piece.count:
        return None
    piece.json = join_contents(encoded)
    return piece
