"""Sessions of a cluster: saved for all nodes. They move to the node that a client asks.

Every save of a session is an entry that all nodes share: its version, and all of its state. An
entry counts if its version is above that of the entry before it, in the order of the cluster; a
node writes the version that follows the one it has seen. So of two nodes that write at once the
first one wins, and the other learns that from the entries. A node takes a session over by writing
the same state again, as its own. The node that had it drops it when it sees that entry.

Order of writes; each entry has come back before the next step:

save   1. The entry with all packs, if no earlier write of the session by this node is open.
       2. If it counted: its packs may be shown. If not, another node has the session.
claim  1. The entry with the state of the last one, as this node's.
       2. If it counted, and none has counted since: the session is here, with the broadcasts that
          it has not heard. If not, again.
end    1. The session is closed here, and the entry without a state is written.
       2. It is answered. If it did not count, another node has the session: it moves here, and
          ends then.
       3. All entries of the session are removed, some time later.

A node that dies at any step leaves the entry that counted last. Any node continues from it with
exactly the packs and numbers that a client may have seen; no numbers are reserved in advance.

Each writer has keys of its own, because Kafka keeps the last entry of each key: an entry that lost
must not hide the one that won. The highest version is the state, and of equal ones the first. A
node that does not know the result of a write waits for it before it writes the same key again.
Otherwise both would have one version, the first would count, and Kafka would keep the second.

A session whose node is gone ends when nobody has asked for it for a while longer than its time to
live: its node would have written it again by then.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import msgspec

from polybus.config import Msgstream
from polybus.errors import StorageError, UsageError
from polybus.log.interface import Log
from polybus.services.accounts.access import AccountAccess
from polybus.services.cluster_table import ClusterEntry, ClusterTable, split
from polybus.services.sessions.broadcasts import Broadcasts
from polybus.services.sessions.changes import SessionChanges
from polybus.services.sessions.contents import Content, Receiver, direct
from polybus.services.sessions.feeds import Feeds
from polybus.services.sessions.saving import AccessOf, PackRow, Saver
from polybus.services.sessions.session import Session
from polybus.services.state import StateDb

logger = logging.getLogger("polybus.sessions")
KIND = "session"
CLAIMS_MAX = 20
RENEWED_SHARE = 1 / 3
"""A session in use is saved again after this share of its time to live."""
ENDED_S = 600.0
"""How long the end of a session is kept: after that no node still writes it."""


class SavedPack(msgspec.Struct, array_like=True, frozen=True):
    """A pack: its position in the log, or its JSON."""

    id: int
    topic: str
    epoch: int
    first_offset: int
    count: int
    value_bytes: int
    json: bytes | None = None


class SavedState(msgspec.Struct, array_like=True, frozen=True):
    """The state that a node needs to continue a session."""

    next_id: int
    mark: int
    follows: list[tuple[str, int, int]]
    lost: list[tuple[str, int, int, int]]
    first_id: int
    count: int
    packs: list[SavedPack]


class SavedSession(msgspec.Struct, array_like=True, frozen=True):
    """An entry. `state` is empty if the session has ended.

    Attributes:
        write: distinguishes the writes of a node.
        heard: the session has all broadcasts before this offset.
    """

    version: int
    write: int
    account: str
    token: str
    ttl_s: float
    heard: int
    state: bytes

    @property
    def owner(self) -> tuple[str, str]:
        """Account, and the token that it was made with."""
        return self.account, self.token


@dataclass(slots=True)
class KnownSession:
    """The current entry of a session, its writer, and when this node saw it."""

    saved: SavedSession
    writer: str
    seen_s: float
    writers: set[str] = field(default_factory=set)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedSession).decode
_decode_state = msgspec.msgpack.Decoder(SavedState).decode


def read_entry(name: str, value: bytes) -> SavedSession:
    """A session, and whether its state is readable. Raises ValueError, msgspec.MsgspecError."""
    bytes.fromhex(name.partition("/")[0])
    saved = _decode(value)
    if saved.state:
        _decode_state(saved.state)
    return saved


class ClusterSaver(Saver):
    """Saves sessions for all nodes of a cluster, and takes them over from others."""

    def __init__(
        self,
        state: StateDb,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[Receiver], None],
        table: ClusterTable,
        broadcasts: Broadcasts,
        let_go: Callable[[bytes], None],
    ) -> None:
        """`let_go` is called with the digest of a session that another node has taken over."""
        super().__init__(state, loop, wake)
        self._table = table
        self._broadcasts = broadcasts
        self._let_go = let_go
        self._known: dict[bytes, KnownSession] = {}
        self._live: Counter[str] = Counter()
        self._digests: dict[int, bytes] = {}
        self._writes = itertools.count()
        # Writes with a waiting caller, and whether they counted when they arrived.
        self._counted: dict[int, bool] = {}

    async def restore(self, limits: Msgstream, feeds: Feeds, access_of: AccessOf) -> list[Session]:
        """Restores nothing: a node begins without sessions, and takes over those that clients ask
        for.
        """
        self._access_of = access_of
        self._table.watch(KIND, self._on_entry)
        self._broadcasts.watch()
        return []

    def _on_entry(self, entry: ClusterEntry) -> None:
        name, _, writer = entry.name.partition("/")
        digest = bytes.fromhex(name)
        known = self._known.get(digest)
        if not entry.value:
            # An entry that was removed.
            return
        saved = _decode(entry.value)
        if known is None or saved.version > known.saved.version:
            writers = set() if known is None else known.writers
            if known is not None:
                self._live[known.saved.account] -= bool(known.saved.state)
            self._live[saved.account] += bool(saved.state)
            known = KnownSession(saved, writer, self._loop.time(), writers)
            self._known[digest] = known
            if writer == self._table.node and saved.write in self._counted:
                self._counted[saved.write] = True
        known.writers.add(writer)
        if known.writer != self._table.node:
            self._let_go(digest)

    def count(self, account: str | None = None) -> int:
        """The sessions of all nodes, or of an account."""
        return self._live.total() if account is None else self._live[account]

    def knows(self, digest: bytes) -> bool:
        """Whether `count` includes a session, or it has ended."""
        return digest in self._known

    # Saving

    def end(self, session: Session) -> asyncio.Future[AbstractSet[Session]]:
        self._digests[session.number] = session.digest
        return super().end(session)

    def _changes(self) -> SessionChanges:
        return SessionChanges(reserves=False)

    async def _write(
        self, pending: Sequence[Session], changes: SessionChanges
    ) -> AbstractSet[Session]:
        """Write sessions. Raises StorageError. An unsaved session has moved, or is queued again."""
        heard = self._table.stop
        states: dict[bytes, tuple[Session, Sequence[object], object, bytes]] = {}
        for session, row in zip(pending, changes.rows, strict=True):
            _, ttl_s, next_id, mark, follows, lost, first_id, count, *owner = row
            packs = [_saved(number, content) for number, content in session.held()]
            state = _encode((next_id, mark, follows, lost, first_id, count, packs))
            states[session.digest] = (session, owner, ttl_s, state)
        ended = {self._digests[number]: number for number in changes.ended}
        await self._table.free(map(self._key, (*ended, *states)))
        made = {}
        for digest in ended:
            if self._is_mine(digest):
                saved = self._known[digest].saved
                made[digest] = self._entry(digest, saved.owner, saved.ttl_s, heard, b"")
        for digest, (session, by, ttl_s, state) in states.items():
            # If it has moved, even if it came back, this state is outdated.
            if not session.is_ended and (digest not in self._known or self._is_mine(digest)):
                made[digest] = self._entry(digest, by, ttl_s, heard, state)
        counted, error = await self._put(made)
        saved_now = {states[digest][0] for digest in counted if digest in states}
        if error is not None:
            if not saved_now or not ended.keys() & made.keys() <= counted:
                raise error
            logger.error("%s: some sessions are not saved: %s", error.code, error.text)
        left = [one for one in pending if one not in saved_now and not one.is_ended]
        if left:
            self._put_back(left, SessionChanges())
        for number in changes.ended:
            self._digests.pop(number, None)
        return saved_now

    def _is_mine(self, digest: bytes) -> bool:
        known = self._known.get(digest)
        return known is not None and known.writer == self._table.node

    def _key(self, digest: bytes) -> bytes:
        return ClusterEntry(KIND, self._name(digest), b"").key

    def _name(self, digest: bytes) -> str:
        return f"{digest.hex()}/{self._table.node}"

    def _entry(
        self, digest: bytes, owner: Sequence[object], ttl_s: object, heard: int, state: bytes
    ) -> tuple[ClusterEntry, int]:
        known = self._known.get(digest)
        version = 1 if known is None else known.saved.version + 1
        write = next(self._writes)
        value = _encode((version, write, *owner, ttl_s, heard, state))
        return ClusterEntry(KIND, self._name(digest), value), write

    async def _put(
        self, made: Mapping[bytes, tuple[ClusterEntry, int]]
    ) -> tuple[set[bytes], StorageError | None]:
        """Write entries; return those that won, and the error of those that did not arrive."""
        self._counted |= dict.fromkeys((write for _, write in made.values()), False)
        parts = split(entry for entry, _ in made.values())
        try:
            error = await self._table.arrived([self._table.begin(part) for part in parts])
        finally:
            results = {digest: self._counted.pop(write) for digest, (_, write) in made.items()}
        return {digest for digest, is_counted in results.items() if is_counted}, error

    # Moving

    async def claim(
        self,
        digest: bytes,
        make: Callable[[SavedSession], Session],
        log: Log,
        feeds: Feeds,
    ) -> Session | None:
        """Take a session over from another node; None if it does not exist.

        `make` creates it, empty.

        Raises StorageError if it is unknown whether this node has it.
        """
        if digest not in self._known:
            await self._table.catch_up()
        for _ in range(CLAIMS_MAX):
            known = self._known.get(digest)
            if known is None or not known.saved.state or digest in self._digests.values():
                # It does not exist, or this node ends it.
                return None
            saved = known.saved
            access = self._access_of(*saved.owner)
            if access is None:
                return None
            state = _decode_state(saved.state)
            await _catch_up(log, state)
            await self._table.free([self._key(digest)])
            if self._known.get(digest) is not known:
                continue
            entry, write = self._entry(digest, saved.owner, saved.ttl_s, saved.heard, saved.state)
            _, error = await self._put({digest: (entry, write)})
            if error is not None:
                raise error
            now = self._known[digest]
            if (now.writer, now.saved.write) == (self._table.node, write):
                # No other entry was between them: the state is that of the last one.
                session = make(saved)
                self._fill(session, access, state, feeds)
                for json in self._broadcasts.since(saved.heard, saved.account):
                    session.add(direct(json, order=feeds.next_order()))
                return session
        text = "several nodes were asked for the session at once; try again"
        raise StorageError("session.moved", text)

    def _fill(
        self, session: Session, access: AccountAccess, state: SavedState, feeds: Feeds
    ) -> None:
        packs: list[PackRow] = []
        for one in state.packs:
            order = 0
            if one.json is not None:
                order = feeds.next_order()
                self._direct[order] = direct(one.json, order=order)
            place = (one.topic, one.epoch, one.first_offset, one.count, one.value_bytes)
            packs.append((session.number, one.id, *place, order, b""))
        texts = (msgspec.json.encode(one) for one in (state.follows, state.lost))
        row = [state.next_id, state.mark, *texts, state.first_id, state.count, b""]
        self._restore(session, access, row, packs, feeds)

    def sweep(self, sessions: Iterable[Session]) -> None:
        """Write sessions again before they seem abandoned, and end abandoned ones."""
        now_s = self._loop.time()
        mine = {session.digest: session for session in sessions}
        over: list[ClusterEntry] = []
        forgotten: list[ClusterEntry] = []
        heard = self._table.stop
        for digest, known in list(self._known.items()):
            idle_s = now_s - known.seen_s
            saved = known.saved
            if not saved.state:
                if idle_s > (ENDED_S if self._is_mine(digest) else 2 * ENDED_S):
                    del self._known[digest]
                    names = (f"{digest.hex()}/{writer}" for writer in known.writers)
                    forgotten += [ClusterEntry(KIND, name, b"") for name in names]
                continue
            heard = min(heard, saved.heard)
            if (session := mine.get(digest)) is not None:
                if idle_s > saved.ttl_s * RENEWED_SHARE:
                    self._pending.add(session)
                    self._start()
            elif idle_s > saved.ttl_s * (1 + 2 * RENEWED_SHARE):
                if not self._table.is_open(self._key(digest)):
                    owner, ttl_s = saved.owner, saved.ttl_s
                    over.append(self._entry(digest, owner, ttl_s, saved.heard, b"")[0])
        for part in split(over):
            # The next sweep tries again.
            self._table.begin(part)
        forgotten += self._broadcasts.take_heard(heard)
        if forgotten:
            task = self._loop.create_task(self._table.forget(forgotten))
            # Entries that were not removed only make the next read a little longer.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _catch_up(log: Log, state: SavedState) -> None:
    """Catch up with what the session's last node knew of its topics. Raises StorageError."""
    ends = [(one.topic, one.epoch, one.first_offset + one.count) for one in state.packs]
    for topic, epoch, offset in (*state.follows, *ends):
        if not topic:
            continue
        try:
            bounds = log.bounds(topic)
            if (bounds.epoch, bounds.stop) < (epoch, offset):
                await asyncio.to_thread(log.catch_up, topic, epoch)
        except UsageError:
            try:
                await asyncio.to_thread(log.catch_up, topic, epoch)
            except UsageError:
                # It was deleted.
                continue


def _saved(number: int, content: Content) -> SavedPack:
    json = None if content.topic or not content.count else content.json
    place = (content.topic, content.epoch, content.first_offset, content.count)
    return SavedPack(number, *place, content.value_bytes, json)
