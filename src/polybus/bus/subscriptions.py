"""The contracts between the bus and those that publish to it or subscribe to its topics."""

from collections.abc import Hashable, Sequence
from typing import ClassVar, Protocol

from polybus.batch import Batch, Buffer
from polybus.bus.access import EVERYTHING, Access
from polybus.errors import PolybusError


class Holdable(Protocol):
    """A source of messages that can be held back."""

    def hold(self, gate: Hashable) -> bool:
        """Stop until `release(gate)`; return False if it does not or already has."""
        return False

    def release(self, gate: Hashable) -> None:
        """Continue, unless another gate holds it."""
        return


class Publisher(Holdable, Protocol):
    """Publishes batches, and is slowed down by subscribers that cannot keep up."""

    @property
    def access(self) -> Access:
        """The topics it may publish to."""
        return EVERYTHING

    def receipt(self, batches: Sequence[Batch]) -> None:
        """The batches of a publish, and everything published before them, are durable."""
        return

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        """A batch it published was not accepted."""
        ...


class Subscriber(Protocol):
    """Receives the messages of topics: a connection, a session's feed, or a program.

    The bus calls these methods from its one thread, in offset order per topic. They return at once:
    a subscriber that cannot keep up queues, drops or disconnects by its own policy. `publisher` is
    the one to hold back meanwhile; None if none can be held back.
    """

    protocol: ClassVar[str]
    """Its protocol, for the traffic figures."""
    takes_own: bool = True
    """Whether it receives its own messages (in goMS and queues it does not)."""
    sender: str = ""
    """The sender name of its own messages, if it does not receive them."""

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        """Take one batch of a topic it is subscribed to."""
        ...

    def deliver_whole(
        self, batches: Sequence[Batch], whole: Buffer, publisher: Publisher | None = None
    ) -> None:
        """Take several batches at once, all of topics it is subscribed to.

        `whole` is those batches in the encoding of the protocol they arrived on.
        """
        for batch in batches:
            self.deliver(batch, publisher)

    def deliver_joint(self, batches: Sequence[Batch], publisher: Publisher | None = None) -> None:
        """Take one message sent to several topics: one batch per topic it is subscribed to."""
        for batch in batches:
            self.deliver(batch, publisher)

    def deliver_from_log(self, batches: Sequence[Batch]) -> None:
        """Take batches of one topic, in order; they are in the log and may be megabytes."""
        for batch in batches:
            self.deliver(batch)

    def topic_created(self, topic: str) -> bool:
        """A topic was created; return whether to subscribe to it. Called for `subscribe_new`."""
        return True

    def topic_deleted(self, topic: str) -> None:
        """A topic it was subscribed to was deleted, and the subscription with it."""
        ...


class TopicWatcher(Protocol):
    """Follows which topics there are."""

    def topic_created(self, topic: str) -> None: ...

    def topic_deleted(self, topic: str) -> None: ...
