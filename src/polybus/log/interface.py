"""The Log: what the bus needs of storage, and the promises every implementation keeps.

Threads: `append`, `append_all`, `create_topic`, `delete_topic` and `read_recent` are called from
the bus's thread only and never block on a disk or network. `read`, `bounds` and `offset_at` may be
called from any thread. The log calls its `LogCallbacks` from threads of its choosing.

The promises (tests/log/log_contract.py holds every implementation to them):

1. Offsets of a topic's epoch start at 0, have no gaps and no repeats, in the order of `append`.
2. When `durable` (and the argument of `on_durable`) has reached a ticket, every message up to it
   survives a crash of the process, and in the `fsync` and `interval` durabilities a power cut.
3. What was appended is visible to readers at once, in offset order, until retention removes it.
4. A recreated topic has a larger epoch, and shows nothing of the old one.
5. What one `append_all` took is durable together or not at all, whatever fails in between.
6. After a StorageError on a commit, `durable` does not move, and `append` raises until reopened or
   until the log says it has recovered; nothing already durable is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from polybus.batch import Batch
from polybus.errors import StorageError


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a topic holds: offsets `start` (inclusive) to `stop` (exclusive) of `epoch`."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """What a topic may set for itself; None means the bus's own setting."""

    retention_age_s: float | None = None
    retention_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCallbacks:
    """What a log calls, from threads of its own; given when it is opened.

    Attributes:
        on_durable: everything up to this ticket is durable.
        on_failed: a commit failed, and receipts that wait for it will not come.
        held_from: the first offset of a topic that a consumer still needs, None if none does;
            retention keeps everything from there on.
    """

    on_durable: Callable[[int], None] = lambda ticket: None
    on_failed: Callable[[StorageError], None] = lambda error: None
    held_from: Callable[[str], int | None] = lambda topic: None


class Log(Protocol):
    """All topics' messages, by offset. The module docstring has the promises."""

    def topics(self) -> Iterable[str]:
        """The names of all topics."""
        ...

    def settings(self, topic: str) -> TopicSettings: ...

    def describe(self, topic: str) -> dict[str, int]:
        """Figures about how the topic is stored, `history-files` and `history-bytes` among them."""
        ...

    def create_topic(self, topic: str, settings: TopicSettings | None = None) -> Bounds:
        """Create a topic; it survives a restart when this returns.

        Raises:
            UsageError: `topic.exists`.
        """
        ...

    def delete_topic(self, topic: str) -> None:
        """Remove a topic and all its messages.

        Raises:
            UsageError: `topic.unknown`.
        """
        ...

    def bounds(self, topic: str) -> Bounds:
        """What the topic holds now, appended messages included.

        Raises:
            UsageError: `topic.unknown`.
            StorageError: `log.frozen`, the topic is damaged.
        """
        ...

    def append(self, batch: Batch, *, urgent: bool = False) -> int:
        """Give the batch its epoch and offsets, queue it for the next commit, return its ticket.

        Tickets ascend over all topics. `urgent` says that somebody waits for the receipt, so the
        commit should not wait for more to come.

        Raises:
            UsageError: `topic.unknown`.
            StorageError: the log or the topic takes no writes; the batch is not in the log.
        """
        ...

    def append_all(self, batches: Sequence[Batch], *, urgent: bool = False) -> int:
        """Append batches of any topics in one commit; return the ticket of the last.

        All of them become durable at once: after a crash the log has every one or none. They are
        in memory together until they are written, so the caller keeps them to a bounded size.

        Raises:
            UsageError: `topic.unknown`.
            StorageError: the log or one of the topics takes no writes; none is in the log.
        """
        ...

    @property
    def durable(self) -> int:
        """The ticket up to which everything is durable; 0 at first."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Appended but not yet written: what the log holds in memory for its own needs."""
        ...

    def read(self, topic: str, offset: int, *, bytes_max: int = 1 << 20) -> list[Batch]:
        """Messages from `offset` on: at least one unless there is none, up to about `bytes_max`.

        Batches come in offset order without gaps, the first begins at `offset` exactly. May block.

        Raises:
            UsageError: `topic.unknown`, or `log.offset-unknown` if `offset` is outside the bounds
                (an offset equal to `stop` is inside and gives an empty list).
            StorageError: `log.damaged`, naming segment or file and offsets.
        """
        ...

    def read_recent(self, topic: str, offset: int) -> list[Batch] | None:
        """Everything from `offset` to the end if memory holds all of it, else None; no blocking."""
        ...

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        """The first offset whose timestamp is at or after the time; `stop` if there is none."""
        ...

    def sync(self) -> None:
        """Block until everything appended so far is durable."""
        ...

    def close(self) -> None:
        """Sync, then release files and threads. The log is unusable afterwards."""
        ...
