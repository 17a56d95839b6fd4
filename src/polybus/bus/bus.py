"""The bus: publishes go to the log and to subscribers, a batch at a time.

Synchronous and single-writer: everything runs on one thread, without locks. The bus knows no
socket, no clock and no protocol's bytes. Edges and services call it, and it calls subscribers back.

When a receipt is sent: after the log has announced that the batch's ticket is durable, in the order
of tickets (`settle`). Delivery to subscribers does not wait for that.

Over a log that arrives late (a cluster's), a publish only hands batches to the log. Subscribers get
what the log brings back (`arrive`), from this node and others, in the cluster's order, and
`topic_changed` adds and removes topics.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from polybus import names, scan
from polybus.batch import Batch, Buffer
from polybus.bus.access import EVERYTHING, Access, Quota
from polybus.bus.subscriptions import Publisher, Subscriber, TopicWatcher
from polybus.bus.topic import Topic
from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.interface import Bounds, Log, TopicSettings

RECENT_BYTES_MAX = 1 << 20
DELIVERED_BYTES_MAX = 4 << 20
"""Subscribers read a larger commit from the log instead of being handed it."""
NOTHING_ACCEPTED: tuple[Sequence[Topic], Sequence[Batch], int] = ((), (), 0)
Give = Callable[[Sequence[Batch]], object]
"""Takes the receipts of batches: they, and everything published before them, are durable."""


class Bus:
    """Topics, subscriptions and receipts over one log."""

    def __init__(self, log: Log, *, clock_us: Callable[[], int], topics_max: int = 100_000) -> None:
        self.log = log
        self._clock_us = clock_us
        self._topics_max = topics_max
        found = {name: Topic(name) for name in log.topics()}
        self._topics = {name: one for name, one in found.items() if not names.is_reserved(name)}
        # Separate, so that clients' publishes never find them.
        self._system = {name: one for name, one in found.items() if names.is_reserved(name)}
        self._everything: list[Subscriber] = []
        self._last_ticket = 0
        # In ticket order: the journal is one, so they become due in that order.
        self._receipts: deque[tuple[int, Sequence[Batch], Give]] = deque()
        self.receipts_given = 0
        self.full_accounts: dict[str, PolybusError] = {}
        """Accounts whose topics take no messages from clients, and why."""
        self.system_settings = TopicSettings()
        self._watchers: list[TopicWatcher] = []
        self.is_late = log.arrives_late
        # Why the log of a cluster refused batches after it took them; until their tickets are due.
        self._late_refusals: dict[Batch, PolybusError] = {}

    # Topics

    def topics(self, *, system: bool = False) -> list[Topic]:
        """All topics, sorted; system topics only with `system`."""
        found = [*self._topics.values(), *(self._system.values() if system else ())]
        return sorted(found, key=lambda topic: topic.name)

    def every_topic(self) -> Iterable[Topic]:
        """All topics, system topics too, unsorted; exhaust it before the next await."""
        return chain(self._topics.values(), self._system.values())

    def topic_names(self, *, system: bool = False) -> list[str]:
        """The same topics' names, unsorted."""
        return [*self._topics, *(self._system if system else ())]

    def topic(self, name: str) -> Topic:
        """Raises UsageError `topic.unknown`."""
        topic = self._topics.get(name) or self._system.get(name)
        if topic is None:
            raise unknown_topic(name)
        return topic

    def has_topic(self, name: str) -> bool:
        return name in self._topics or name in self._system

    def create_topic(self, name: str, settings: TopicSettings | None = None) -> Bounds:
        """Create a topic that survives a restart.

        Over a log that arrives late this waits for the cluster; `services.topics` does not.

        Raises:
            UsageError: `topic.invalid`, `topic.reserved`, `topic.exists` or `topic.too-many`.
        """
        name = self.check_new(name)
        bounds = self.log.create_topic(name, settings)
        self.topic_changed(name, exists=True)
        return bounds

    def create_topics(self, wanted: Mapping[str, TopicSettings]) -> None:
        """Create topics together, as `create_topic`."""
        if wanted:
            count = len(wanted)
            checked = {self.check_new(name, count): wanted[name] for name in wanted}
            self.log.create_topics(checked)
            for name in checked:
                self.topic_changed(name, exists=True)

    def check_new(self, name: str, count: int = 1) -> str:
        """The canonical name of one of `count` topics to create. Raises as `create_topic`."""
        name = names.canonical(name)
        if names.is_reserved(name):
            raise UsageError(
                "topic.reserved",
                f"'{name}': names that begin with $ are reserved for system topics",
            )
        names.check_creatable(name)
        if len(self._topics) + count > self._topics_max:
            text = f"the bus cannot have more than {self._topics_max} topics (topics-max)"
            raise UsageError("topic.too-many", f"{text}; delete some first")
        return name

    def topic_changed(self, name: str, *, exists: bool) -> None:
        """A topic was added to the log, or removed from it. Idempotent."""
        if not exists:
            self._forget(name)
        elif not self.has_topic(name):
            is_system = names.is_reserved(name)
            topic = (self._system if is_system else self._topics)[name] = Topic(name)
            for watcher in self._watchers:
                watcher.topic_created(name)
            if not is_system:
                everything = list(self._everything)
                topic.listen(tuple(one for one in everything if one.topic_created(name)))

    def make_system_topics(self, settings: TopicSettings, accounts: Iterable[str] = ()) -> None:
        """Create those of the bus and of accounts that do not exist; only the bus may write them.

        Raises:
            StorageError: one cannot be created.
        """
        self.system_settings = settings
        for name in names.SYSTEM_TOPICS:
            self._make_system_topic(name)
        for account in accounts:
            self.make_account_topics(account)

    def make_account_topics(self, account: str) -> None:
        """Create the system topics of an account that do not exist. Raises StorageError."""
        for name in names.ACCOUNT_SYSTEM_TOPICS:
            self._make_system_topic(names.full(account, name))

    def _make_system_topic(self, name: str) -> None:
        if name not in self._system:
            self.log.create_topic(name, self.system_settings)
            self._system[name] = Topic(name)
            for watcher in self._watchers:
                watcher.topic_created(name)

    def delete_topic(self, name: str, *, is_admin: bool = False) -> None:
        """Remove a topic, its messages and its subscriptions.

        An administrator may delete a system topic if it is damaged; an empty one replaces it.

        Raises:
            UsageError: `topic.unknown` or `topic.reserved`.
        """
        self.check_deletable(name, is_admin=is_admin)
        self.log.delete_topic(name)
        self._forget(name, is_replaced=names.is_reserved(name))

    def check_deletable(self, name: str, *, is_admin: bool) -> None:
        """Raises UsageError `topic.reserved`."""
        if names.is_reserved(name) and not (is_admin and name in self.log.frozen):
            text = f"'{name}' is a system topic; administrators can delete it if it is damaged"
            raise UsageError("topic.reserved", text)

    def delete_account_topic(self, name: str) -> None:
        """Remove a topic of an account that is being deleted, also a system topic."""
        self.log.delete_topic(name)
        self._forget(name)

    def _forget(self, name: str, *, is_replaced: bool = False) -> None:
        """The log no longer has the topic."""
        topic = (self._system if names.is_reserved(name) else self._topics).pop(name, None)
        if topic is None:
            return
        for watcher in self._watchers:
            watcher.topic_deleted(name)
        if is_replaced:
            self._make_system_topic(name)
        for subscriber in topic.subscribers:
            subscriber.topic_deleted(name)

    def watch(self, watcher: TopicWatcher) -> None:
        """Notify a watcher of every topic that is created or deleted, before its subscribers."""
        self._watchers.append(watcher)

    # Subscriptions

    def subscribe(self, name: str, subscriber: Subscriber) -> None:
        """Subscribe from the live end on. Raises UsageError `topic.unknown`."""
        topic = self.topic(name)
        if subscriber not in topic.subscribers:
            topic.listen((*topic.subscribers, subscriber))

    def subscribe_new(self, subscriber: Subscriber) -> None:
        """Subscribe to every topic that will be created."""
        self._everything.append(subscriber)

    def unsubscribe(self, name: str, subscriber: Subscriber) -> None:
        topic = self._topics.get(name) or self._system.get(name)
        if topic is not None and subscriber in topic.subscribers:
            topic.listen(tuple(one for one in topic.subscribers if one is not subscriber))

    def unsubscribe_new(self, subscriber: Subscriber) -> None:
        if subscriber in self._everything:
            self._everything.remove(subscriber)

    def attach_if_recent(
        self,
        name: str,
        subscriber: Subscriber,
        offset: int,
        deliver: Callable[[Batch], int | None] | None = None,
    ) -> int | None:
        """Deliver what memory holds from `offset` on, and subscribe if it is small enough.

        Returns None when the subscriber is live, with no gap and no repeat; else the offset to
        continue from when the subscriber has taken what it got. `deliver` replaces the
        subscriber's own until it is live; it may return the offset that it has taken all up to.
        """
        recent = self.log.read_recent(name, offset)
        if recent is None:
            return offset
        delivered_bytes = 0
        for batch in recent:
            if delivered_bytes and delivered_bytes + batch.value_bytes > RECENT_BYTES_MAX:
                return batch.first_offset
            if deliver is None:
                subscriber.deliver(batch)
            elif (reached := deliver(batch)) is not None:
                return reached
            delivered_bytes += batch.value_bytes
        self.subscribe(name, subscriber)
        return None

    # Publishing
    #
    # All variants append to the log, count, and register the receipts, in this order; then the
    # subscribers get the batches. `_append_all` does it for many batches, in compiled loops.
    # `_accept_one` repeats its three steps for a single batch: a list of one would double the
    # bus's own time per publish, from 0.4 to 0.9 µs.

    def publish(
        self, batches: Sequence[Batch], publisher: Publisher, whole: Buffer | None = None
    ) -> int:
        """Append the batches to the log and deliver them; return the last ticket, 0 if none.

        A batch that is not accepted is refused to its publisher; the others continue. `whole` is
        all batches in the publisher's own encoding, for subscribers that take them all.
        """
        sender: object = publisher
        topics, accepted, ticket = self._accept(batches, publisher)
        if self.is_late:
            return ticket
        is_all = len(accepted) == len(batches)
        if is_all and (len(topics) == 1 or (whole is not None and scan.listen_alike(topics))):
            for subscriber in topics[0].subscribers:
                if subscriber is sender and not subscriber.takes_own:
                    for topic, batch in zip(topics, accepted, strict=True):
                        topic.spare(batch, subscriber.protocol)
                elif whole is None:
                    subscriber.deliver(batches[0], publisher)
                else:
                    subscriber.deliver_whole(batches, whole, publisher)
            return ticket
        for topic, batch in zip(topics, accepted, strict=True):
            for subscriber in topic.subscribers:
                if subscriber is not sender or subscriber.takes_own:
                    subscriber.deliver(batch, publisher)
                else:
                    topic.spare(batch, subscriber.protocol)
        return ticket

    def refusal(self, topic: str) -> PolybusError | None:
        """Why the account of a topic takes no messages; None if it does."""
        account, slash, _ = topic.partition("/")
        return self.full_accounts.get(account) if slash else None

    def topics_alike(
        self, batches: Sequence[Batch], access: Access = EVERYTHING
    ) -> list[Topic] | None:
        """The topics of these batches, which have the same subscribers.

        None if a subscriber gets only some of the batches, or the log refuses any.
        """
        topics = self._find(batches, access)
        if topics is None or not scan.listen_alike(topics) or not self.log.takes(batches):
            return None
        return topics

    def publish_delivered(
        self, batches: Sequence[Batch], topics: list[Topic], publisher: Publisher
    ) -> int:
        """Append batches that their subscribers have; return the ticket.

        `topics` are those of `topics_alike`, in the same turn: the log has said that it takes them.

        Raises:
            StorageError: `log.frozen`, a topic was found to be damaged just now.
        """
        # Without checking the quota again: subscribers have these batches.
        quota = publisher.access.quota
        return self._append_all(batches, topics, publisher.receipt, quota=quota, is_taken=True)

    def publish_joint(self, batches: Sequence[Batch], publisher: Publisher) -> int:
        """Publish one message to several topics; a subscriber of several gets one delivery.

        The batches are the same message, one batch per topic. One that is not accepted is refused
        to its publisher; the others continue.
        """
        sender: object = publisher
        topics, accepted, ticket = self._accept(batches, publisher)
        if self.is_late:
            return ticket
        joint: dict[Subscriber, list[Batch]] = {}
        for topic, batch in zip(topics, accepted, strict=True):
            for subscriber in topic.subscribers:
                if subscriber is not sender or subscriber.takes_own:
                    joint.setdefault(subscriber, []).append(batch)
                else:
                    topic.spare(batch, subscriber.protocol)
        for subscriber, its_batches in joint.items():
            subscriber.deliver_joint(its_batches, publisher)
        return ticket

    def commit(
        self,
        batches: Sequence[Batch],
        give: Give | None = None,
        *,
        urgent: bool = False,
        is_part: bool = False,
    ) -> int:
        """Append batches of any topics, system topics included, all or nothing; return the ticket.

        For the bus itself and for administrators: the caller decides who may write where. `give`
        gets the receipts that batches ask for; `urgent` asks for an early fsync without one.
        Subscribers of a large commit, or of a part of a larger transaction, read it from the log,
        so that no outbox reaches its limit.

        Raises:
            UsageError: `topic.unknown`; nothing is appended.
            StorageError: the log or a topic takes no writes; nothing is appended.
        """
        topics = [self.topic(batch.topic) for batch in batches]
        now_us = self._clock_us()
        for batch in batches:
            batch.timestamp_us = now_us
        ticket = self._append_all(batches, topics, give, urgent=urgent)
        if self.is_late:
            return ticket
        is_large = is_part or sum(batch.value_bytes for batch in batches) > DELIVERED_BYTES_MAX
        by_topic: dict[Topic, list[Batch]] = {}
        for topic, batch in zip(topics, batches, strict=True):
            by_topic.setdefault(topic, []).append(batch)
        for topic, its_batches in by_topic.items():
            for subscriber in topic.subscribers:
                if is_large:
                    subscriber.deliver_from_log(its_batches)
                else:
                    for batch in its_batches:
                        subscriber.deliver(batch)
        return ticket

    def _accept(
        self, batches: Sequence[Batch], publisher: Publisher
    ) -> tuple[Sequence[Topic], Sequence[Batch], int]:
        """Append the batches; return the topics and batches that were accepted, and the ticket."""
        if len(batches) == 1:
            topic = self._accept_one(batches[0], publisher)
            return NOTHING_ACCEPTED if topic is None else ((topic,), batches, self._last_ticket)
        topics = self._find(batches, publisher.access)
        if topics is not None:
            try:
                quota = publisher.access.quota
                give = self._giver(publisher)
                ticket = self._append_all(batches, topics, give, quota=quota)
                return topics, batches, ticket
            except (StorageError, UsageError):
                topics = None
        # Not all can be accepted: find out which cannot, and why.
        found = [(self._accept_one(batch, publisher), batch) for batch in batches]
        accepted = [batch for topic, batch in found if topic is not None]
        ticket = self._last_ticket if accepted else 0
        return [topic for topic, _ in found if topic is not None], accepted, ticket

    def _find(self, batches: Sequence[Batch], access: Access) -> list[Topic] | None:
        """The topics of batches, whose time is set; None if not all may be published now."""
        topics = access.topics
        now_us = self._clock_us()
        if access.quota is not None and access.quota.refusal(now_us) is not None:
            return None
        if self.full_accounts and any(self.refusal(batch.topic) for batch in batches):
            return None
        return scan.find_topics(batches, self._topics if topics is None else topics, now_us)

    def _accept_one(self, batch: Batch, publisher: Publisher) -> Topic | None:
        """Append a batch, or refuse it and return None."""
        topics = publisher.access.topics
        topic = (self._topics if topics is None else topics).get(batch.topic)
        if topic is None:
            publisher.refuse(batch, unknown_topic(batch.topic))
            return None
        batch.timestamp_us = now_us = self._clock_us()
        quota = publisher.access.quota
        if quota is not None:
            refusal = quota.refusal(now_us)
            if refusal is not None:
                publisher.refuse(batch, refusal)
                return None
        if self.full_accounts and (refusal := self.refusal(batch.topic)) is not None:
            publisher.refuse(batch, refusal)
            return None
        is_asking = batch.receipt_ids is not None
        try:
            self._last_ticket = self.log.append(batch, urgent=is_asking)
        except (StorageError, UsageError) as error:
            publisher.refuse(batch, error)
            return None
        if not self.is_late:
            topic.take(batch)
        if quota is not None:
            quota.charge(len(batch), batch.value_bytes)
        if is_asking:
            self.when_durable(self._giver(publisher), self._last_ticket, (batch,))
        return topic

    def _append_all(
        self,
        batches: Sequence[Batch],
        topics: Sequence[Topic],
        give: Give | None,
        *,
        quota: Quota | None = None,
        urgent: bool = False,
        is_taken: bool = False,
    ) -> int:
        """Append all batches at once. Raises as `commit`, with nothing appended."""
        asking = [batch for batch in batches if batch.receipt_ids is not None]
        ticket = self._last_ticket = self.log.append_all(
            batches, urgent=urgent or bool(asking), is_taken=is_taken
        )
        if not self.is_late:
            scan.count_taken(batches, topics)
        if quota is not None:
            quota.charge(sum(map(len, batches)), scan.weigh(batches, 0, 0))
        if asking and give is not None:
            self.when_durable(give, ticket, asking)
        return ticket

    # Over a log that arrives late

    def arrive(self, arrival: object) -> None:
        """Deliver what the log brings: messages of any node, safe, in the order of the cluster."""
        for batch in self.log.admit(arrival):
            topic = self._topics.get(batch.topic) or self._system.get(batch.topic)
            if topic is None:
                continue
            topic.take(batch)
            for subscriber in topic.subscribers:
                if subscriber.takes_own or subscriber.sender != batch.sender:
                    subscriber.deliver(batch)
                else:
                    topic.spare(batch, subscriber.protocol)

    def refuse_late(self, refused: tuple[Batch, PolybusError]) -> None:
        """The log has refused a batch that it took; its ticket becomes due later."""
        batch, error = refused
        if batch.receipt_ids is not None:
            self._late_refusals[batch] = error

    def _giver(self, publisher: Publisher) -> Give:
        """The function that gives a publisher its receipts, or reports late refusals."""
        if not self.is_late:
            return publisher.receipt

        def give(batches: Sequence[Batch]) -> None:
            stored = [batch for batch in batches if batch.first_offset >= 0]
            if stored:
                publisher.receipt(stored)
            for batch in batches:
                error = self._late_refusals.pop(batch, None)
                if error is not None:
                    publisher.refuse(batch, error)

        return give

    # Receipts

    @property
    def receipts_waiting(self) -> int:
        """How many batches wait for a receipt; a waiter without batches counts as one."""
        return sum(len(batches) or 1 for _, batches, _ in self._receipts)

    def when_durable(
        self, give: Give, ticket: int | None = None, batches: Sequence[Batch] = ()
    ) -> None:
        """Call `give(batches)` once everything up to the ticket (the last one) is durable."""
        if ticket is None:
            ticket = self._last_ticket
        # The log's thread may be ahead of `settle`: earlier receipts come first.
        if ticket <= self.log.durable and not self._receipts:
            self._give(batches, give)
        else:
            self._receipts.append((ticket, batches, give))

    def settle(self, durable: int) -> None:
        """Give the receipts that are due: everything up to ticket `durable` is durable."""
        receipts = self._receipts
        while receipts and receipts[0][0] <= durable:
            _, batches, give = receipts.popleft()
            self._give(batches, give)

    def _give(self, batches: Sequence[Batch], give: Give) -> None:
        self.receipts_given += scan.count_receipts(batches)
        give(batches)


def unknown_topic(name: str) -> PolybusError:
    if names.is_reserved(name):
        return UsageError("topic.reserved", f"'{name}': only the bus writes to `$` topics")
    return UsageError("topic.unknown", f"there is no topic '{name}'")
