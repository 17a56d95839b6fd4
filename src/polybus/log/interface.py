"""The Log: what the bus needs from storage, and the promises of every implementation.

Threads: `append`, `append_all`, `create_topic`, `delete_topic` and `read_recent` are called from
the thread of the bus only and never block on a disk or network. `read`, `bounds` and `offset_at`
may be called from any thread. The log calls its `LogCallbacks` from any thread.

Publishing has two steps, *take* and *arrive*. A log on this machine does both in `append`. A log
that several nodes share (`arrives_late`) only takes the batch there; its offset is -1 until its
ticket is durable. Every node, the publisher's too, gets the messages by `on_arrived` when they are
safe, and shows them to readers and subscribers when it has called `admit`.

The promises, which tests/log/log_contract.py checks for every implementation; the different
promises of a log that arrives late are in brackets:

1. Offsets of a topic's epoch start at 0 and have no gaps or repeats, in the order of `append`.
   [They ascend, in one order for all nodes. A batch has no gaps inside, but there may be gaps
   between batches, so that a read begins at its offset or after it.]
2. When `durable` (and the argument of `on_durable`) has reached a ticket, every message up to it
   survives a crash of the process, and with durability `fsync` or `interval` a power cut.
3. Appended messages are visible to readers at once, in offset order, until retention removes them.
   [They are visible when they are safe: no reader sees what the log may still lose.]
4. A recreated topic has a larger epoch and shows no message of the old one.
5. The batches of one `append_all` become durable together or not at all, whatever fails.
   [Each batch becomes durable by itself. One that turns out to be refused is reported by
   `on_refused` before its ticket is durable, and keeps the offset -1.]
6. After a commit fails, `durable` does not move and `append` raises until the log has recovered.
   Durable messages stay durable.

[Times are milliseconds, and `create_topic` and `delete_topic` wait for the cluster: they are called
from another thread than the bus's, which is notified of the change by `on_topic`.]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from polybus.batch import Batch
from polybus.errors import PolybusError, StorageError


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of a topic: `start` (included) to `stop` (excluded) of `epoch`."""

    epoch: int
    start: int
    stop: int


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """Settings of one topic, as in topic.json; None means the setting of the bus."""

    retention_age_s: float | None = None
    retention_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCallbacks:
    """Callbacks that are given to a log when it is opened. It calls them from its own threads.

    Attributes:
        on_durable: everything up to this ticket is durable.
        on_failed: a commit failed; its receipts are delayed or never come.
        on_frozen: a topic was found to be damaged after the log was opened.
        held_from: the first offset of a topic that a consumer still needs, or None. Retention
            keeps everything from there on.

    Of a log that arrives late:
        on_arrived: new messages, for `admit`; None admits them at once.
        on_refused: a batch that was taken is not in the log after all.
        on_topic: a topic was created (True) or removed (False).
        on_shared: what nodes share has changed (`ClusterLog.share`), in one order for all nodes.
            It begins with all existing entries, before the log is open.
    """

    on_durable: Callable[[int], None] = lambda ticket: None
    on_failed: Callable[[StorageError], None] = lambda error: None
    on_frozen: Callable[[str], None] = lambda topic: None
    held_from: Callable[[str], int | None] = lambda topic: None
    on_arrived: Callable[[object], None] | None = None
    on_refused: Callable[[Batch, PolybusError], None] = lambda batch, error: None
    on_topic: Callable[[str, bool], None] = lambda topic, exists: None
    on_shared: Callable[[Sequence[Batch]], None] = lambda batches: None


class Log(Protocol):
    """The messages of all topics, by offset. The module docstring has the promises."""

    @property
    def arrives_late(self) -> bool:
        """Whether taken batches arrive later, and from other nodes too."""
        return False

    @property
    def cluster(self) -> "ClusterLog | None":
        """What only a log that several nodes share can do; None for other logs."""
        return None

    def admit(self, arrival: object) -> Sequence[Batch]:
        """Show what `on_arrived` was given to readers; return it for subscribers."""
        return ()

    def catch_up(self, topic: str, epoch: int = 0) -> None:
        """Wait until everything is visible that was durable on any node. May block.

        With `epoch`, also until the topic has this epoch at least.

        Raises UsageError `topic.unknown`; StorageError if that takes too long.
        """
        return

    def topics(self) -> Iterable[str]:
        """The names of all topics."""

    @property
    def frozen(self) -> dict[str, StorageError]:
        """The damaged topics, which take no messages, with the reasons."""

    def freeze(self, topic: str, reason: str) -> None:
        """Freeze a topic that cannot be read: it takes no messages. Raises UsageError
        `topic.unknown`.
        """

    def settings(self, topic: str) -> TopicSettings: ...

    def change_settings(self, topic: str, settings: TopicSettings) -> None:
        """Replace a topic's settings durably.

        Raises UsageError `topic.unknown`; StorageError, and nothing has changed.
        """

    def describe(self, topic: str) -> dict[str, int]:
        """Figures of the topic's storage, among them `history-files` and `history-bytes`."""

    def stored_bytes(self, topic: str, messages: int = 0, value_bytes: int = 0) -> int:
        """The size of what this log stores of a topic, without blobs.

        `messages` with `value_bytes` were appended since the log was opened. The part in the
        journal shares files with other topics: its size is estimated from the mean size of these
        messages, and of those that the journal had before. This reads nothing from the disk.

        Raises UsageError `topic.unknown`.
        """

    def create_topic(self, topic: str, settings: TopicSettings | None = None) -> Bounds:
        """Create a topic durably. Raises UsageError `topic.exists`."""

    def create_topics(self, wanted: Mapping[str, TopicSettings]) -> None:
        """Create topics durably; on a disk, thousands take seconds. A failure may leave some.

        A cluster creates all topics that it accepts, and then raises the error of one that it
        refused.

        Raises UsageError `topic.exists`.
        """

    def delete_topic(self, topic: str) -> None:
        """Remove a topic and all its messages. Raises UsageError `topic.unknown`."""

    def bounds(self, topic: str) -> Bounds:
        """The topic's offsets, including appended messages that are not durable yet.

        Raises UsageError `topic.unknown`; StorageError `log.frozen` if the topic is damaged.
        """

    def append(self, batch: Batch, *, urgent: bool = False) -> int:
        """Give the batch its epoch and offsets, queue it for the next commit, return its ticket.

        Tickets ascend over all topics. `urgent` means that a client waits for the receipt, so the
        commit should not wait for more batches.

        Raises:
            UsageError: `topic.unknown`.
            StorageError: the log or the topic cannot be written; the batch is not in the log.
        """

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Whether `append_all` would not refuse these batches now."""

    def append_all(
        self, batches: Sequence[Batch], *, urgent: bool = False, is_taken: bool = False
    ) -> int:
        """Append batches of any topics in one commit; return the ticket of the last.

        They become durable together: after a crash the log has all of them or none. They are in
        memory together until they are written, so the caller bounds their size.

        `is_taken`: subscribers have them already, because `takes` returned True just before. If the
        disk failed meanwhile, they wait for it, like batches that were appended earlier.

        Raises:
            UsageError: `topic.unknown`.
            StorageError: the log or one of the topics cannot be written; no batch is in the log.
        """

    @property
    def durable(self) -> int:
        """The ticket up to which everything is durable, initially 0."""

    @property
    def pending_bytes(self) -> int:
        """The memory of appended batches that are not written yet."""

    def read(self, topic: str, offset: int, *, bytes_max: int = 1 << 20) -> list[Batch]:
        """Messages from `offset` on: at least one if there is one, up to about `bytes_max`.

        Batches are in offset order without gaps; the first begins at `offset`. [A batch has no
        gaps inside. The first begins at `offset` or after it, and each at the end of the one before
        or after it. The list is empty if no message is left below `stop`.] So a reader continues at
        the last offset plus one and does not count messages. May block.

        Raises:
            UsageError: `topic.unknown`, or `log.offset-unknown` if `offset` is outside the bounds
                (`stop` itself is inside and gives an empty list).
            StorageError: `log.damaged`, naming segment or file and offsets.
        """

    def read_recent(self, topic: str, offset: int) -> list[Batch] | None:
        """Everything from `offset` to the end if it is all in memory, else None. Never blocks."""

    def offset_at(self, topic: str, timestamp_us: int) -> int:
        """The first offset whose timestamp is at or after the time, else `stop`."""

    def sync(self) -> None:
        """Block until everything appended so far is durable."""

    def close(self) -> None:
        """Sync, then release files and threads. The log cannot be used afterwards."""


SHARED = "Polybus-state"
"""The topic of batches that nodes share; no topic of the bus can have the name."""


class LogTransaction(Protocol):
    """Messages of many topics that become visible together. The methods may block."""

    def append(self, batches: Sequence[Batch]) -> None:
        """Write batches and give them epochs and offsets; they are not visible yet.

        Raises UsageError `topic.unknown`, `log.too-large`; StorageError as `commit` does.
        """

    def commit(self) -> None:
        """Raises StorageError if it may or may not be committed; `commit.fenced` if it is not."""

    def abort(self) -> None:
        """Abort: the messages never become visible. Raises nothing."""


class ClusterLog(Protocol):
    """What nodes of a cluster share beside messages: entries by key, of which the last counts.

    All nodes get all entries in one order. An entry is a message with a key; one that is not the
    last of its key is removed eventually.
    """

    def begin(self, producer: str) -> LogTransaction:
        """Begin a transaction. Every earlier one of the producer, on any node, has ended then, and
        its node can add nothing to it (fencing). May block. Raises StorageError.
        """

    def catch_up_all(self) -> None:
        """`catch_up` with all topics of the cluster. May block. Raises as `catch_up` does."""

    def settle(self, topic: str) -> None:
        """`catch_up`, and wait for open transactions. May block. Raises as `catch_up` does."""

    def share(self, batch: Batch) -> None:
        """Add entries, all or none; they come back through `on_shared`. Call it on the bus's
        thread.

        A batch that is refused is reported by `on_refused`.
        """

    def shared_stop(self) -> int:
        """The offset after the last entry that any node has added. May block.

        Raises StorageError `log.unreachable`.
        """

    def forget_shared(self, keys: Sequence[bytes]) -> None:
        """Remove entries without notifying the nodes. May block. Raises StorageError."""
