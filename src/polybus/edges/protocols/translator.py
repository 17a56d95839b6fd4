"""What all translators share: one peer's subscriptions, those that catch up, and replies.

A translator stands between a peer and the bus. It turns its codec's events into bus calls, and the
bus's batches into its protocol's bytes. Each subclass maps its protocol's terms: goMS says register
where the bus says subscribe.
"""

import asyncio
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from polybus import names
from polybus.batch import Batch, Buffer
from polybus.bus.bus import unknown_topic
from polybus.bus.subscriptions import Publisher
from polybus.edges.edge import Edge
from polybus.edges.protocols.large import LargeMessages
from polybus.edges.protocols.peer import DroppedMessages, Peer
from polybus.errors import PeerError, PolybusError, StorageError, UsageError
from polybus.log.topics import unknown
from polybus.services.accounts.access import AccountAccess
from polybus.services.catch_up import catch_up
from polybus.services.events import UndeliveredRange
from polybus.wire.codec import (
    Bad,
    Codec,
    Large,
    LargeBegin,
    Login,
    PlainCodec,
    Publish,
)
from polybus.wire.positions import Latest, Position, Start, SubscribeLine, parse_start

EVERYTHING = "*"
LOGIN_GATE = "login"


class Translator(LargeMessages):
    """One peer's side of the bus, in one protocol. Implements bus.Publisher too."""

    codec: Codec[Any]
    encode: Callable[[Batch], Buffer]
    """A batch in the protocol's bytes."""
    before_login: ClassVar[tuple[type, ...]] = (Bad,)
    """Events that peers may send before they log in, besides the login."""

    def __init__(self, edge: Edge, peer: Peer) -> None:
        self.access = edge.accounts.without_login(peer.ip) or edge.accounts.nobody
        # Events that wait for a login that is under way, and its task.
        self._has_joined = False
        self._login: tuple[list[Any], asyncio.Task[None]] | None = None
        self.edge = edge
        self.bus = edge.context.bus
        self.limits = edge.context.config.limits
        self.peer = peer
        self.sender = peer.name
        # For each topic, whether the peer asked for its positions.
        self.subscriptions: dict[str, bool] = {}
        self._everything = False
        self._tell_new = False
        self.catching_up: dict[str, asyncio.Task[None]] = {}
        # Ticket, epoch and offset of the last message, for a receipt that covers several parts.
        # Over a cluster's log the batch itself, because its offset is not known yet.
        self._last: tuple[int, int, int, Batch | None] | None = None
        # Why the last message or part was refused: code and text, not the error with its frames.
        self._refusal: tuple[str, str] | None = None

    # Logins

    @property
    def is_known(self) -> bool:
        """Whether the peer has an account: it has logged in, or uses the default account."""
        return self.access is not self.edge.accounts.nobody

    @property
    def is_logging_in(self) -> bool:
        return self._login is not None

    def take(self, event: Any) -> None:
        """Act on one event of the codec, or let it wait for a login."""
        if self._login is not None:
            self._login[0].append(event)
        elif self.arriving is not None:
            self.arriving.take(event)
        elif isinstance(event, Login):
            self.peer.hold(LOGIN_GATE)
            task = self.edge.context.loop.create_task(self._log_in(event))
            self._login = [], task
        elif isinstance(event, LargeBegin):
            self.begin_large(event)
        elif self.is_known or isinstance(event, self.before_login):
            self.handle(event)
        elif not isinstance(event, Large):
            self.complain("auth.needed", "a login is required; log in first")

    async def _log_in(self, login: Login) -> None:
        accounts = self.edge.accounts
        try:
            if login.user:
                access = await accounts.log_in(login.user, login.secret, self.peer.ip)
            else:
                access = await accounts.log_in_by_token(login.secret, self.peer.ip)
            self.enter(access)
        except PolybusError as error:
            self.complain(error.code, error.text)
        else:
            self.tell_login(access.account)
        assert self._login is not None
        waiting, self._login = self._login[0], None
        for event in waiting:
            # After another login the rest waits for that one.
            self.take(event)
        if not self.is_logging_in:
            self.peer.release(LOGIN_GATE)

    def enter(self, access: AccountAccess) -> None:
        """Use this account from now on. Raises UsageError `account.connections`."""
        accounts = self.edge.accounts
        accounts.join(access)
        self.leave_all()
        if self._has_joined:
            accounts.leave(self.access)
        self._has_joined = True
        self.access = access
        self.peer.entered()

    def enter_by_certificate(self) -> None:
        """Use the account that the peer's certificate names. Raises UsageError as `enter` does."""
        known = self.edge.accounts.by_certificate(self.peer.certificate_name)
        if known is not None:
            self.enter(known)

    def count_for(self, access: AccountAccess) -> None:
        """A request comes from this account, in protocols whose requests say so."""

    def access_changed(self) -> None:
        for topic in list(self.subscriptions):
            if topic not in self.access.readable:
                self.unsubscribe(topic)
                self.topic_deleted(topic)

    def access_ended(self) -> None:
        self.complain("auth.ended", "your account, password or token is no longer valid")
        self.peer.close()

    # Defined by subclasses

    def tell_login(self, account: str) -> None:
        """Answer a login, in protocols that can."""

    def handle(self, event: Any) -> None:
        """Act on one event of the codec."""
        match event:
            case Publish(batches, whole):
                self.publish(batches, whole)
            case Bad(error):
                self.bad(error)

    def send_error(self, code: str, text: str) -> None:
        raise NotImplementedError

    def receipt(self, batches: Sequence[Batch]) -> None:
        raise NotImplementedError

    def deny_receipt(self, receipt_id: bytes, code: str, text: str) -> None:
        """A part was refused, so the receipt will not come: report it if the protocol can."""

    def send_position(self, shown: str, epoch: int, offset: int) -> None:
        """Report the position of a topic's subscription, in protocols that can."""

    # The bus calls these

    def deliver(self, batch: Batch, publisher: Publisher | None = None) -> None:
        if batch.headers is not None and self.is_streamed(batch):
            self.stream_all((batch,))
            return
        self.peer.send(self.encoded(batch, self.protocol, self.encode), (batch,), publisher)

    def deliver_joint(self, batches: Sequence[Batch], publisher: Publisher | None = None) -> None:
        if self.is_streamed(batches[0]):
            self.stream_all(batches)
            return
        for batch in batches:
            self.deliver(batch, publisher)

    def encoded(self, batch: Batch, form: str, encode: Callable[[Batch], Buffer]) -> Buffer:
        """A batch in the protocol's bytes, under the topic's name for this account."""
        access = self.access
        if not access.renames:
            return batch.encoded(form, encode)

        def encode_renamed(batch: Batch) -> Buffer:
            renamed = batch.slice(0, len(batch))
            renamed.topic = access.shown(batch.topic)
            return encode(renamed)

        return batch.encoded(f"{form} {access.account}", encode_renamed)

    def hold(self, gate: Hashable) -> bool:
        return self.peer.hold(gate)

    def release(self, gate: Hashable) -> None:
        self.peer.release(gate)

    def deliver_from_log(self, batches: Sequence[Batch]) -> None:
        """The batches are more than an outbox should hold: read them from the log, then go live."""
        first = batches[0]
        self.bus.unsubscribe(first.topic, self)
        skip_sender = None if self.takes_own else self.sender
        start = Position(first.epoch, first.first_offset)
        self.catch_up_from(first.topic, start, skip_sender=skip_sender)

    def in_own_words(self, batch: Batch, error: PolybusError) -> PolybusError:
        """The error of a refused batch, under the topic's name for this account."""
        if error.code == "topic.unknown" and self.access.renames:
            return unknown_topic(self.access.shown(batch.topic))
        return error

    def refuse(self, batch: Batch, error: PolybusError) -> None:
        error = self.in_own_words(batch, error)
        self._refusal = (error.code, error.text)
        text = error.text if len(batch) == 1 else f"{error.text} ({len(batch)} messages)"
        self.complain(error.code, text)

    def topic_deleted(self, topic: str) -> None:
        self.subscriptions.pop(topic, None)
        self.complain("topic.deleted", f"the topic {self.access.shown(topic)!r} was deleted")

    def tell_position(self, topic: str, epoch: int, offset: int) -> None:
        self.send_position(self.access.shown(topic), epoch, offset)

    def lost(self, lost: DroppedMessages) -> None:
        """The peer was too slow and messages were dropped: report how many, and the positions."""
        text = f"{lost.messages} messages were dropped because you read too slowly"
        self.complain("outbox.dropped", text)
        self.note_undelivered(lost, "outbox.dropped")
        for topic, (epoch, offset) in lost.next_positions.items():
            if self.subscriptions.get(topic):
                self.tell_position(topic, epoch, offset)

    def note_undelivered(self, lost: DroppedMessages, code: str) -> None:
        """Report messages that the peer did not get, as dead letters."""
        for topic, (epoch, first) in lost.first_positions.items():
            next_epoch, stop = lost.next_positions[topic]
            if epoch and epoch == next_epoch:
                self.edge.context.events.undelivered(
                    self.access.account,
                    UndeliveredRange(topic, epoch, first, stop),
                    reason=code,
                    to=self.peer.name,
                    protocol=self.protocol,
                )

    # Publishing

    def publish(
        self, batches: Sequence[Batch], whole: Buffer | None = None, *, is_full: bool = False
    ) -> None:
        """Publish as this peer. `is_full`: the topics have their full names.

        No message is over `inline-bytes-max`: codecs pass on larger ones in pieces.
        """
        for batch in batches:
            batch.protocol = self.protocol
            batch.sender = self.sender
            if self.access.renames and not is_full:
                full = self.access.full(batch.topic)
                if self.access.shown(full) != batch.topic:
                    # Others must not see the account's own spelling of a name.
                    whole = None
                batch.rename(full)
        ticket = self.bus.publish(batches, self, whole)
        if whole is None:
            last = batches[-1]
            if last.first_offset >= 0:
                self._last = (ticket, last.epoch, last.last_offset, None)
            else:
                self._last = (ticket, 0, 0, last) if self.bus.is_late and ticket else None

    def publish_part(self, batch: Batch, *, is_first: bool, is_full: bool = False) -> None:
        """Publish a part at once; a receipt covers all parts, so one refusal denies it."""
        if is_first:
            self._refusal = None
        denied, why = b"", self._refusal
        if why is not None and batch.receipt_ids is not None:
            start, stop = batch.receipt_ids[-2:]
            denied = bytes(batch.buffer[start:stop])
            batch.receipt_ids = None
        self.publish([batch], is_full=is_full)
        if denied and why is not None:
            self.deny_receipt(denied, *why)

    def owe_receipt(self, receipt_id: bytes, topic: str = "") -> None:
        """The parts of a message have ended: give the last one's receipt, which covers all."""
        if self._refusal is not None:
            self.deny_receipt(receipt_id, *self._refusal)
            return
        if self._last is None:
            return
        owed = Batch(topic, receipt_id, array("i", [0, 0]))
        owed.receipt_ids = array("i", [0, len(receipt_id)])
        ticket, owed.epoch, owed.first_offset, late = self._last

        def give(batches: Sequence[Batch]) -> None:
            if late is not None:
                owed.epoch, owed.first_offset = late.epoch, late.last_offset
            self.receipt(batches)

        self.bus.when_durable(give, ticket, (owed,))

    # Subscribing

    def subscribe_lines(self, lines: Sequence[SubscribeLine]) -> None:
        """Subscribe as `$subscribe` and `hbfs` ask; report topics that cannot be subscribed to."""
        for line in lines:
            try:
                if line.topic == EVERYTHING:
                    self.subscribe_everything(line.start, tell=line.tell)
                else:
                    name = self.access.full(names.canonical(line.topic))
                    self.subscribe(name, line.start, tell=line.tell)
            except PolybusError as error:
                self.complain(error.code, error.text)

    def unsubscribe_lines(self, lines: Sequence[SubscribeLine]) -> None:
        if not lines or any(line.topic == EVERYTHING for line in lines):
            self.leave_all()
            return
        for line in lines:
            self.unsubscribe(self.access.full(line.topic.lower()))

    def subscribe(self, topic: str, start: str = "latest", *, tell: bool = False) -> None:
        """Subscribe from a position.

        Raises:
            UsageError: `topic.unknown`, `subscription.too-many`.
            StorageError: `log.frozen`, the topic is damaged.
            PeerError: not final, the start is not valid.
        """
        limit = self.limits.subscriptions_per_connection_max
        if len(self.subscriptions) >= limit:
            text = f"over {limit} subscriptions (subscriptions-per-connection-max)"
            raise UsageError("subscription.too-many", text)
        if topic not in self.access.readable:
            raise unknown(self.access.shown(topic))
        bounds = self.bus.log.bounds(topic)
        if topic in self.subscriptions:
            return
        where = parse_start(start)
        self.subscriptions[topic] = tell
        if not isinstance(where, Latest):
            self.catch_up_from(topic, where, tell=tell)
            return
        if tell:
            self.tell_position(topic, bounds.epoch, bounds.stop)
        self.bus.subscribe(topic, self)

    def catch_up_from(
        self, topic: str, start: Start, *, tell: bool = False, skip_sender: str | None = None
    ) -> None:
        context = self.edge.context
        work = catch_up(context, self, topic, start, tell=tell, skip_sender=skip_sender)
        self.catching_up[topic] = context.loop.create_task(work)

    def subscribe_everything(self, start: str, *, tell: bool) -> None:
        for topic in self.bus.topics():
            if topic.name not in self.access.readable:
                continue
            try:
                self.subscribe(topic.name, start, tell=tell)
            except StorageError as error:
                # A damaged topic does not prevent subscribing to the others.
                self.complain(error.code, error.text)
        self._tell_new = tell
        if not self._everything:
            self._everything = True
            self.bus.subscribe_new(self)

    def unsubscribe(self, topic: str) -> None:
        task = self.catching_up.pop(topic, None)
        if task is not None:
            task.cancel()
        self.bus.unsubscribe(topic, self)
        self.subscriptions.pop(topic, None)

    def topic_created(self, topic: str) -> bool:
        """A topic was created while the peer subscribes to everything."""
        if topic not in self.access.readable:
            return False
        task = self.catching_up.pop(topic, None)
        if task is not None:
            # It belongs to a deleted topic of the same name.
            task.cancel()
        self.subscriptions[topic] = self._tell_new
        if self._tell_new:
            self.tell_position(topic, self.bus.log.bounds(topic).epoch, 0)
        return True

    def leave_all(self) -> None:
        """End every subscription."""
        for topic in list(self.subscriptions):
            self.unsubscribe(topic)
        if self._everything:
            self._everything = False
            self.bus.unsubscribe_new(self)

    def let_go(self) -> None:
        """The connection is lost: drop references, to break the cycle."""
        if self._login is not None:
            self._login[1].cancel()
            self._login = None
        self.forget_large()
        if self._has_joined:
            self._has_joined = False
            self.edge.accounts.leave(self.access)

    # `catch_up` calls these

    def flush(self) -> None:
        self.peer.flush()

    async def drained(self) -> None:
        await self.peer.drained()

    def catch_up_ended(self, topic: str, error: PolybusError | None) -> None:
        self.catching_up.pop(topic, None)
        if error is None:
            return
        self.subscriptions.pop(topic, None)
        if error.code in ("topic.deleted", "topic.unknown"):
            self.topic_deleted(topic)
        else:
            self.complain(error.code, error.text)

    # Replies

    def reply(self, data: Buffer) -> None:
        """Send a reply; a peer that does not read its replies is not read from either.

        Receipts do not count as replies: a client may publish everything before it reads them.
        """
        self.peer.send(data, (), self)

    def bad(self, error: PeerError) -> None:
        """Answer a peer that violated its protocol; after a final error the connection closes."""
        self.complain(error.code, error.text)
        if error.final:
            self.peer.close()

    def complain(self, code: str, text: str) -> None:
        self.record_error(code, text)
        self.send_error(code, text)

    def record_error(self, code: str, text: str) -> None:
        """Count and log an error of the peer."""
        account = self.access.account
        self.edge.bad_peers.record(self.peer.name, self.protocol, code, text, account)


class PlainTranslator(Translator):
    """A translator whose peers may be sent the bytes of others as they arrived.

    `plain_outbox` is where such bytes go; None if layers are around the protocol.
    """

    codec: PlainCodec[Any]
    plain_outbox: Any = None
