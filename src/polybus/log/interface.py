"""The Log: what the bus needs from storage, and the promises of every implementation.

Threads: `append`, `append_all`, `create_topic`, `delete_topic` and `read_recent` are called from
the thread of the bus only and never block on a disk or network. `read`, `bounds` and `offset_at`
may be called from any thread. The log calls its `LogCallbacks` from any thread.

The promises, which tests/log/log_contract.py checks for every implementation:

1. Offsets of a topic's epoch start at 0 and have no gaps or repeats, in the order of `append`.
2. When `durable` (and the argument of `on_durable`) has reached a ticket, every message up to it
   survives a crash of the process, and with durability `fsync` or `interval` a power cut.
3. Appended messages are visible to readers at once, in offset order, until retention removes them.
4. A recreated topic has a larger epoch and shows no message of the old one.
5. The batches of one `append_all` become durable together or not at all, whatever fails.
6. After a commit fails, `durable` does not move and `append` raises until the log has recovered.
   Durable messages stay durable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from polybus.batch import Batch
from polybus.errors import StorageError


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
        on_failed: a commit failed; its receipts are late at least.
        on_frozen: a topic is found to be damaged after the log was opened.
        held_from: the first offset of a topic that a consumer still needs, or None. Retention
            keeps everything from there on.
    """

    on_durable: Callable[[int], None] = lambda ticket: None
    on_failed: Callable[[StorageError], None] = lambda error: None
    on_frozen: Callable[[str], None] = lambda topic: None
    held_from: Callable[[str], int | None] = lambda topic: None


class Log(Protocol):
    """The messages of all topics, by offset. The module docstring has the promises."""

    def topics(self) -> Iterable[str]:
        """The names of all topics."""

    @property
    def frozen(self) -> dict[str, StorageError]:
        """The damaged topics, which take no messages, with the reasons."""

    def freeze(self, topic: str, reason: str) -> None:
        """Let a topic that cannot be read take no messages. Raises UsageError `topic.unknown`."""

    def settings(self, topic: str) -> TopicSettings: ...

    def describe(self, topic: str) -> dict[str, int]:
        """Figures of the topic's storage, among them `history-files` and `history-bytes`."""

    def create_topic(self, topic: str, settings: TopicSettings | None = None) -> Bounds:
        """Create a topic durably. Raises UsageError `topic.exists`."""

    def delete_topic(self, topic: str) -> None:
        """Remove a topic and all its messages. Raises UsageError `topic.unknown`."""

    def bounds(self, topic: str) -> Bounds:
        """The topic's offsets, including appended messages that are not durable yet.

        Raises UsageError `topic.unknown`; StorageError `log.frozen`, the topic is damaged.
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

        `is_taken`: subscribers have them already, because `takes` returned True just before. If
        the disk failed meanwhile, they wait for it, as batches that were appended earlier do.

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

        Batches are in offset order without gaps; the first begins at `offset`. May block.

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
