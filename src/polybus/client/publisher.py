"""Publishing over a stream protocol, and what publishers of all protocols share.

Errors of Boson frames and goMS name no receipt, so the refused message must be inferred. It may be
one that was sent without a receipt, as long as that is unproven: the bus reads in order, so a
receipt of a later message proves that an earlier one was accepted.
"""

import abc
import asyncio
from collections.abc import Iterable

from polybus.client.connection import ClientConnection
from polybus.client.message import Position
from polybus.client.options import ClientOptions
from polybus.client.transport import (
    TOO_LARGE,
    Delivery,
    PendingPublish,
    Refusal,
    Stored,
    Subscribed,
    Transport,
    TransportEvent,
)
from polybus.errors import BusyError, PeerError, PolybusError, StorageError, UsageError

RECEIPT_UNKNOWN = "client.receipt-unknown"


class ConnectionBrokenError(PolybusError):
    """`client.receipt-unknown` because the connection broke: only then does a retry help."""


class Outgoing(abc.ABC):
    """The outgoing side of a client."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._failure: PolybusError | None = None

    @abc.abstractmethod
    async def open(self) -> None:
        """Connect, one attempt. Raises PolybusError `client.unreachable`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Send what is pending and disconnect."""

    @abc.abstractmethod
    async def publish(self, publish: PendingPublish) -> None:
        """Send without a receipt; returns at once unless too much is waiting to be sent."""

    @abc.abstractmethod
    async def flush(self) -> None:
        """Wait until everything published so far is sent. Raises as `Client.flush`."""

    async def publish_safely(self, publish: PendingPublish, *, retry: bool) -> Position:
        """Send and wait for the receipt of the last value, which covers all.

        Raises as `Client.publish` does; the text of `client.receipt-unknown` has the reason.
        """
        while True:
            try:
                return await self._publish_once(publish)
            except ConnectionBrokenError:
                if not retry:
                    raise

    @abc.abstractmethod
    async def _publish_once(self, publish: PendingPublish) -> Position:
        """Send and wait for the receipt. Raises as `publish_safely`."""


class PendingReceipts:
    """The receipts that a publisher waits for on its connection."""

    def __init__(self) -> None:
        # By receipt id, which counts from 1.
        self._out: dict[str, PendingPublish] = {}
        self._asked_count = 0
        # Topics of messages without a receipt, and the first receipt that proves them all.
        self._unproven: set[str] = set()
        self._proof_number = 0

    def __len__(self) -> int:
        return len(self._out)

    @property
    def all_proven(self) -> bool:
        """Whether the bus has accepted everything that was sent without a receipt."""
        return not self._unproven

    def ask(self, publish: PendingPublish) -> asyncio.Future[Position]:
        """A new receipt to wait for; call `forget` afterwards."""
        self._asked_count += 1
        publish.receipt = asyncio.get_running_loop().create_future()
        publish.receipt_id = str(self._asked_count)
        self._out[publish.receipt_id] = publish
        return publish.receipt

    def forget(self, publish: PendingPublish) -> None:
        self._out.pop(publish.receipt_id or "", None)

    def sent_without(self, topic: str) -> None:
        """Messages were sent without a receipt."""
        self._unproven.add(topic)
        self._proof_number = self._asked_count + 1

    def stored(self, receipt_id: str, position: Position) -> None:
        asked = self._out.get(receipt_id)
        if asked is None:
            return
        if int(receipt_id) >= self._proof_number:
            self._unproven.clear()
        if asked.receipt is not None and not asked.receipt.done():
            asked.receipt.set_result(position)

    def lost(self, error: PolybusError) -> None:
        """The connection is lost: no more receipts come."""
        self._unproven.clear()
        _refuse_all(self._out.values(), error)

    def refused(self, refusal: Refusal) -> bool:
        """Fail the receipts that will not come; return whether one is certainly the cause."""
        error = refusal.error
        if refusal.receipt_id is not None:
            known = self._out.get(refusal.receipt_id)
            return known is not None and _refuse_all([known], error)
        out = [asked for asked in self._out.values() if asked.receipt and not asked.receipt.done()]
        if not out:
            return False
        # An error about a topic applies to all its messages.
        named = [
            asked
            for asked in out
            if asked.topic in refusal.topics or _names(error.text, asked.topic)
        ]
        if named:
            return _refuse_all(named, error)
        if refusal.topics or isinstance(error, BusyError | PeerError):
            # It is about topics without a pending receipt, about messages we read instead of sent,
            # or about an answer that we could not parse.
            return False
        if any(_names(error.text, topic) for topic in self._unproven):
            return False
        if isinstance(error, StorageError):
            # The log accepts no writes, so no pending receipt will come.
            return _refuse_all(out, error)
        return self._refuse_one_of(out, error)

    def _refuse_one_of(self, out: list[PendingPublish], error: PolybusError) -> bool:
        """Some message was refused, perhaps one without a receipt: report only what is certain."""
        if self._unproven:
            _refuse_all(out, _unclear(error))
            return False
        if len(out) == 1:
            return _refuse_all(out, error)
        if error.code.endswith(TOO_LARGE):
            # The largest message is over the limit, whichever one the bus refused.
            refuse(max(out, key=lambda asked: max(map(len, asked.values))).receipt, error)
        return _refuse_all(out, _unclear(error))


def refuse(
    future: asyncio.Future[Position] | asyncio.Future[None] | None, error: PolybusError
) -> None:
    """Fail a future that is not done."""
    if future is not None and not future.done():
        future.set_exception(error)
        # Mark it as retrieved: the waiting task may have been cancelled.
        future.exception()


def _refuse_all(blamed: Iterable[PendingPublish], error: PolybusError) -> bool:
    for asked in blamed:
        refuse(asked.receipt, error)
    return bool(blamed)


def _names(text: str, topic: str) -> bool:
    """Whether the bus's text names the topic, which is quoted there."""
    return f"'{topic}'" in text or repr(topic) in text


def client_closed() -> UsageError:
    return UsageError("client.closed", "the client is closed")


def no_receipt(timeout_s: float) -> PolybusError:
    """The error after a receipt timeout."""
    text = (
        f"the bus sent no receipt for {timeout_s:g} seconds; the message may or may not be stored"
    )
    return PolybusError(RECEIPT_UNKNOWN, text)


def _unclear(error: PolybusError) -> PolybusError:
    text = "the bus refused a message without naming it; this message may or may not be stored"
    return PolybusError(RECEIPT_UNKNOWN, f"{text} ({error})")


class StreamPublisher(Outgoing):
    """The Owner of its connection (client/connection.py)."""

    def __init__(self, options: ClientOptions) -> None:
        super().__init__(options)
        self._connection = ClientConnection(options, self)
        self._transport: Transport | None = None
        self._up = asyncio.Event()
        self._last_error: PolybusError | None = None
        self._receipts = PendingReceipts()
        # By topic, for protocols where a publisher must register first.
        self._registrations: dict[str, asyncio.Future[None]] = {}

    async def open(self) -> None:
        await self._connection.open()

    async def close(self) -> None:
        self.failed(client_closed())
        unproven = not self._receipts.all_proven
        failure = await self._connection.close(politely=True)
        if failure is not None and unproven:
            self._options.report(failure)

    async def publish(self, publish: PendingPublish) -> None:
        transport = self._usable(publish.topic) or await self._ready(publish.topic)
        self._connection.write(transport.publish(publish))
        self._receipts.sent_without(publish.topic)
        link = self._connection.link
        if link is not None and link.crowded:
            await link.drain()

    async def _publish_once(self, publish: PendingPublish) -> Position:
        transport = await self._ready(publish.topic)
        link = self._connection.link
        assert link is not None, "a usable transport has a link"
        receipt = self._receipts.ask(publish)
        try:
            link.write(transport.publish(publish))
            await link.wait_for(receipt, timeout_s=self._options.receipt_timeout_s)
            if receipt.done():
                return receipt.result()
            if transport.registers and transport is self._transport:
                # Acks are matched by order only, which fails once one is missing.
                self._connection.restart()
                self._down()
            raise no_receipt(self._options.receipt_timeout_s)
        finally:
            self._receipts.forget(publish)

    async def flush(self) -> None:
        if self._connection.link is not None:
            await self._connection.link.flush()
            # The connection notices a loss one turn later.
            await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure

    def _usable(self, topic: str) -> Transport | None:
        """A transport that may publish to the topic now, if any."""
        transport = self._transport
        if transport is None or self._failure is not None:
            return None
        if transport.registers:
            registration = self._registrations.get(topic)
            if registration is None or not registration.done() or registration.exception():
                return None
        return transport

    async def _ready(self, topic: str) -> Transport:
        """Wait for a transport that may publish to the topic."""
        while (transport := self._usable(topic)) is None:
            if self._failure is not None:
                raise self._failure
            if self._transport is None:
                await self._up.wait()
            else:
                await self._register(topic, self._transport)
        return transport

    async def _register(self, topic: str, transport: Transport) -> None:
        """Register to the topic; wait until that is answered, or the connection breaks."""
        registration = self._registrations.get(topic)
        if registration is None:
            registration = asyncio.get_running_loop().create_future()
            self._registrations[topic] = registration
            self._connection.write(transport.subscribe({topic: "latest"}, positions=False))
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                await asyncio.shield(registration)
        except TimeoutError as error:
            text = f"the bus did not confirm the registration to {topic!r}"
            raise PolybusError("client.timeout", text) from error
        except PolybusError as error:
            if error.code != RECEIPT_UNKNOWN:
                raise

    # The connection calls these

    def opened(self, transport: Transport) -> None:
        self._transport = transport
        self._up.set()

    def received(self, event: TransportEvent) -> None:
        match event:
            case Stored(receipt_id, position):
                self._receipts.stored(receipt_id, position)
            case Subscribed(topic):
                registration = self._registrations.get(topic)
                if registration is not None and not registration.done():
                    registration.set_result(None)
            case Refusal():
                self._refused(event)
                if event.final:
                    self._down()
            case Delivery():
                pass  # goMS sends a publisher the messages of others too; they are ignored

    def lost(self) -> None:
        self._down()
        text = "the connection broke before the receipt came; the message may or may not be stored"
        if self._last_error is not None:
            text += f" (the bus said {self._last_error})"
            self._last_error = None
        error = ConnectionBrokenError(RECEIPT_UNKNOWN, text)
        self._receipts.lost(error)
        for registration in self._registrations.values():
            refuse(registration, error)
        self._registrations.clear()

    def _down(self) -> None:
        """Later publishes wait for the next link."""
        self._transport = None
        self._up.clear()

    def failed(self, error: PolybusError) -> None:
        """Nothing more can be published: wake everyone who waits."""
        if self._failure is None:
            self._failure = error
        self._up.set()

    def _refused(self, refusal: Refusal) -> None:
        registrations = self._registrations_of(refusal)
        for registration in registrations:
            refuse(registration, refusal.error)
        blamed = not refusal.registering and self._receipts.refused(refusal)
        if registrations or blamed:
            return
        self._last_error = refusal.error
        self._options.report(refusal.error)

    def _registrations_of(self, refusal: Refusal) -> list[asyncio.Future[None]]:
        """Remove and return the refused registrations; the next publish registers again."""
        waiting = [topic for topic, one in self._registrations.items() if not one.done()]
        refused = list(refusal.topics)
        if not refused and refusal.receipt_id is None:
            nothing_sent = not self._receipts and self._receipts.all_proven
            if refusal.registering or nothing_sent:
                # The bus answers registrations in order.
                refused = waiting[:1]
        found = {topic: self._registrations.pop(topic, None) for topic in dict.fromkeys(refused)}
        return [one for topic, one in found.items() if one is not None and topic in waiting]
