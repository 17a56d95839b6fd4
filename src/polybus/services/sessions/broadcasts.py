"""Broadcasts in a cluster: a pack for all sessions, on all nodes.

A broadcast is an entry that all nodes share, so it has a position in the same order as the saves
and moves of sessions. A node that receives it adds the pack to its sessions, and saves them. Every
save records up to which position its session has *heard* broadcasts; a node that takes the session
over adds the later ones. So every session that existed when the broadcast was stored gets it once,
under one number, even if its node dies or it moves at that moment.

A broadcast is removed when every session has heard it. Nodes keep as many per account as a session
holds; older ones are removed, too. The node that stored a broadcast removes it from the cluster; if
that node is gone, any other does so later.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from polybus.config import Msgstream
from polybus.services.cluster_table import ClusterEntry, ClusterTable

KIND = "broadcast"
LEFT_S = 600.0
"""After this time any node removes a broadcast that all have heard: its own node seems gone."""


class ClusterBroadcast(msgspec.Struct, array_like=True, frozen=True):
    """An entry. Without an account it is for the sessions of all accounts."""

    account: str | None
    json: bytes

    def is_for(self, account: str) -> bool:
        return self.account is None or self.account == account


class HeardBroadcast(NamedTuple):
    """A broadcast that has arrived, and when."""

    entry: ClusterEntry
    broadcast: ClusterBroadcast
    seen_s: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ClusterBroadcast).decode


def read_entry(name: str, value: bytes) -> ClusterBroadcast:
    """Raises msgspec.MsgspecError."""
    return _decode(value)


class Broadcasts:
    """The broadcasts that some session may not have heard."""

    def __init__(
        self,
        table: ClusterTable,
        limits: Msgstream,
        deliver: Callable[[ClusterBroadcast], None],
        clock_s: Callable[[], float],
    ) -> None:
        """`deliver` gives a broadcast to the sessions of this node."""
        self._table = table
        self._limits = limits
        self._deliver = deliver
        self._clock_s = clock_s
        self._numbers = itertools.count()
        # By name, in the order of the cluster.
        self._kept: dict[str, HeardBroadcast] = {}
        # Broadcasts that are no longer kept and not yet removed, with the time when they were seen.
        self._overflowed: dict[str, float] = {}
        self._names: defaultdict[str | None, dict[str, None]] = defaultdict(dict)
        self._bytes: Counter[str | None] = Counter()

    def watch(self) -> None:
        self._table.watch(KIND, self._on_entry)

    def _on_entry(self, entry: ClusterEntry) -> None:
        if not entry.value:
            # Some node has removed it.
            self._overflowed.pop(entry.name, None)
            if entry.name in self._kept:
                self._drop(entry.name)
            return
        broadcast = read_entry(entry.name, entry.value)
        account = broadcast.account
        names = self._names[account]
        names[entry.name] = None
        self._kept[entry.name] = HeardBroadcast(entry, broadcast, self._clock_s())
        self._bytes[account] += len(broadcast.json)
        limits = self._limits
        while names and (
            len(names) > limits.session_packs_max or self._bytes[account] > limits.session_bytes_max
        ):
            # A session would not have room for more either.
            oldest = next(iter(names))
            self._overflowed[oldest] = self._drop(oldest).seen_s
        self._deliver(broadcast)

    def _drop(self, name: str) -> HeardBroadcast:
        dropped = self._kept.pop(name)
        account = dropped.broadcast.account
        del self._names[account][name]
        self._bytes[account] -= len(dropped.broadcast.json)
        if not self._names[account]:
            del self._names[account], self._bytes[account]
        return dropped

    async def send(self, account: str | None, json: bytes) -> None:
        """Store a broadcast. Raises StorageError if it may or may not be stored."""
        name = f"{self._table.node}/{next(self._numbers)}"
        await self._table.write([ClusterEntry(KIND, name, _encode((account, json)))])

    def since(self, heard: int, account: str) -> list[bytes]:
        """The packs that a session of an account has not heard."""
        return [
            one.broadcast.json
            for one in self._kept.values()
            if one.entry.offset >= heard and one.broadcast.is_for(account)
        ]

    def take_heard(self, heard: int) -> list[ClusterEntry]:
        """Take broadcasts that all sessions have heard, or never will; this node removes them."""
        over = [name for name, seen_s in self._overflowed.items() if self._removes(name, seen_s)]
        for name in over:
            del self._overflowed[name]
        done = [
            name
            for name, one in self._kept.items()
            if one.entry.offset < heard and self._removes(name, one.seen_s)
        ]
        for name in done:
            self._drop(name)
        return [ClusterEntry(KIND, name, b"") for name in (*over, *done)]

    def _removes(self, name: str, seen_s: float) -> bool:
        """Whether this node removes a broadcast: it stored it, or the node that did is gone."""
        return name.startswith(f"{self._table.node}/") or self._clock_s() - seen_s >= LEFT_S
