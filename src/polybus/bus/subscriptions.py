"""Who listens to a topic: the subscriber's side of the contract with the bus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from polybus.batch import Batch, Buffer
from polybus.errors import PolybusError


class ReceiptTaker(Protocol):
    """Whoever waits for a batch to be durable."""

    def receipt(self, batch: Batch) -> None:
        """The batch, and everything published before it, is durable."""
        ...


@runtime_checkable
class ManyReceiptsTaker(Protocol):
    """A receipt taker that would rather hear of all batches of a publish at once."""

    def receipt_all(self, batches: Sequence[Batch]) -> None:
        """The batches, and everything published before them, are durable."""
        ...


class Subscriber(ReceiptTaker, Protocol):
    """A connection (or session, or program) that topics' messages are handed to.

    The bus calls these from its one thread, in offset order per topic, and they return at once:
    a subscriber that cannot keep up queues, drops or leaves by its own policy.
    """

    takes_own: bool
    """Whether it gets the messages it published itself (goMS and queues leave the sender out)."""

    @property
    def protocol(self) -> str:
        """What it speaks, for the figures."""
        ...

    def deliver(self, batch: Batch) -> None:
        """Take one batch of a topic it is subscribed to."""
        ...

    def deliver_whole(self, batches: Sequence[Batch], whole: Buffer) -> None:
        """Take several batches at once, all of topics it is subscribed to.

        `whole` is those batches in the encoding of the protocol they came from.
        """
        ...

    def deliver_joint(self, batches: Sequence[Batch]) -> None:
        """Take one message that was sent to several topics: one batch per topic it listens to."""
        ...

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        """A batch it published was not taken, or will not become durable."""
        ...

    def topic_created(self, topic: str) -> None:
        """A topic was created, and it listens to every new one."""
        ...

    def topic_deleted(self, topic: str) -> None:
        """A topic it is subscribed to is gone; the subscription with it."""
        ...


@runtime_checkable
class ReadsLog(Protocol):
    """A subscriber that can be told of much at once, and reads it from the log at its own pace."""

    def deliver_from_log(self, batches: Sequence[Batch]) -> None:
        """Take batches of one topic, in order; they are in the log, and may be megabytes."""
        ...
