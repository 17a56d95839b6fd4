"""Producers and their last transactions: these make a transaction idempotent.

A writer is a `producer`; its transactions are numbered by `batch`, within one `query` (a Spark
query's id lives as long as its checkpoint). Each transaction's record is in the topic `$commits`,
in the same commit of the log as its messages. The log is the truth; `Producers` is rebuilt from it:

    commit   the transaction is done; its offsets
    intent   it needs several commits of the log: the files to publish, and in how many parts
    part     one of those parts is done; the last one is a `commit`

A transaction that has an intent will be finished, if necessary when the bus starts again.
"""

from typing import Literal

import msgspec

from polybus import names
from polybus.errors import UsageError

TOPIC = "$commits"
ONCE = "once"
"""The query of a writer with a single transaction; it is forgotten first (LRU)."""

REMEMBERED_RANGES_MAX = 32
"""For a transaction with more ranges, only the fact that it was done is kept."""

Range = tuple[int, int, int]
"""Epoch, first offset, and the offset after the last."""
Offsets = dict[str, list[Range]]


class TransactionKey(msgspec.Struct, frozen=True):
    """Identifies a transaction."""

    producer: str
    query: str
    batch: int


class CommitRecord(msgspec.Struct, kw_only=True, rename="kebab", omit_defaults=True):
    """A message of `$commits`."""

    kind: Literal["commit", "intent", "part"]
    producer: str
    query: str
    batch: int
    offsets: Offsets = {}
    """In a commit: the offsets of all its messages. In a part: those of the part."""
    files: list[str] = []
    account: str = names.ACCOUNT
    """In an intent: the account whose names the topics in the files have."""
    system: bool = False
    """In an intent: whether it may write to system topics, because an administrator requested it.
    """
    part: int = 0
    parts: int = 1
    part_bytes: int = 0

    @property
    def key(self) -> TransactionKey:
        return TransactionKey(self.producer, self.query, self.batch)


class Unfinished(msgspec.Struct):
    """A transaction that has an intent and no commit yet."""

    intent: CommitRecord
    parts_done: int = 0
    offsets: Offsets = {}


class Producer(msgspec.Struct, kw_only=True):
    """A producer's last transaction, and its unfinished one, if any."""

    name: str
    query: str = ""
    batch: int = -1
    offsets: Offsets = {}
    unfinished: Unfinished | None = None


class Producers(dict[str, Producer]):
    """All producers by name, ordered by their last transaction, oldest first."""

    def __init__(self, *, producers_max: int) -> None:
        super().__init__()
        self._producers_max = producers_max

    def unfinished(self) -> list[Unfinished]:
        return [one.unfinished for one in self.values() if one.unfinished is not None]

    def decide(
        self,
        key: TransactionKey,
        *,
        take_over: bool = False,
        gaps: bool = False,
        own_max: int | None = None,
    ) -> Offsets | None:
        """The offsets of a transaction that was committed before; None if it may be done now.

        `own_max`: how many producers the account of this one may have.

        Raises:
            UsageError: `commit.query`, `commit.gap` or `commit.too-many`.
        """
        known = self.get(key.producer)
        if known is None:
            if len(self) >= self._producers_max and all(one.query != ONCE for one in self.values()):
                text = f"the bus is at its limit of {self._producers_max} producers"
                raise UsageError("commit.too-many", f"{text} (limits.producers-max)")
            if own_max is not None:
                self._make_room(key.producer, own_max)
            return None
        if known.unfinished is not None and known.unfinished.intent.key == key:
            return None
        if known.query == key.query:
            if key.batch <= known.batch:
                return known.offsets if key.batch == known.batch else {}
            if key.batch > known.batch + 1 and not gaps:
                text = (
                    f"producer {key.producer!r}: batch {key.batch} follows batch {known.batch}, "
                    "so batches are missing: was the checkpoint replaced by a newer or another "
                    "one? start the query with another option producer, or with takeOver=true "
                    "to skip the missing batches"
                )
                if not take_over:
                    raise UsageError("commit.gap", text)
            return None
        if known.query and not take_over:
            text = (
                f"producer {key.producer!r} belongs to query {known.query}, and this is query "
                f"{key.query}: its checkpoint is new, so earlier messages could be "
                "published again; give the query another option producer, or take the name over "
                "with option takeOver=true"
            )
            raise UsageError("commit.query", text)
        return None

    def apply(self, record: CommitRecord) -> None:
        """Apply a record; records come in the order of the log."""
        known = self.pop(record.producer, None) or Producer(name=record.producer)
        self[record.producer] = known
        if record.kind == "commit":
            known.query, known.batch = record.query, record.batch
            count = sum(map(len, record.offsets.values()))
            known.offsets = record.offsets if count <= REMEMBERED_RANGES_MAX else {}
            known.unfinished = None
            self._forget_some()
        elif record.kind == "intent":
            known.unfinished = Unfinished(record, 0, {})
        elif known.unfinished is not None and known.unfinished.intent.key == record.key:
            known.unfinished.parts_done = record.part
            known.unfinished.offsets = joined(known.unfinished.offsets, record.offsets)

    def forget_account(self, account: str) -> None:
        """A named account was deleted."""
        for name in [one for one in self if one.startswith(f"{account}/")]:
            del self[name]

    def _make_room(self, producer: str, own_max: int) -> None:
        """Forget the account's oldest single transaction if it has too many producers."""
        prefix = producer[: producer.index("/") + 1]
        own = [one for name, one in self.items() if name.startswith(prefix)]
        if len(own) < own_max:
            return
        for one in own:
            if one.query == ONCE and one.unfinished is None:
                del self[one.name]
                return
        text = f"your account is at its limit of {own_max} producers (account-producers-max)"
        raise UsageError("commit.too-many", text)

    def _forget_some(self) -> None:
        """Forget the oldest single transactions. Others are kept, or they could be repeated."""
        while len(self) > self._producers_max:
            once = (
                name for name, one in self.items() if one.query == ONCE and one.unfinished is None
            )
            oldest = next(once, None)
            if oldest is None:
                return
            del self[oldest]


def joined(offsets: Offsets, more: Offsets) -> Offsets:
    """Both range lists, with adjacent ranges merged."""
    result = {topic: list(ranges) for topic, ranges in offsets.items()}
    for topic, ranges in more.items():
        known = result.setdefault(topic, [])
        for epoch, first, stop in ranges:
            if known and known[-1][0] == epoch and known[-1][2] == first:
                known[-1] = (epoch, known[-1][1], stop)
            else:
                known.append((epoch, first, stop))
    return result


def unknown_producer(name: str) -> UsageError:
    return UsageError("commit.unknown", f"producer {name[:40]!r} has committed nothing")
