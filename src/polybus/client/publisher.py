"""Publishing over a stream protocol: one connection for everything that a client sends."""

import asyncio
from collections.abc import Sequence

from polybus.batch import Headers
from polybus.client.connection import ClientConnection
from polybus.client.message import Position
from polybus.client.options import ClientOptions
from polybus.client.receipts import (
    RECEIPT_UNKNOWN,
    ConnectionBrokenError,
    Outgoing,
    PendingReceipt,
    PendingReceipts,
    client_closed,
    no_receipt,
    refuse,
)
from polybus.client.transports.base import (
    Delivery,
    Event,
    Refusal,
    Stored,
    Subscribed,
    Transport,
)
from polybus.client.urls import Address
from polybus.errors import PolybusError


class StreamPublisher(Outgoing):
    """The Owner of its connection (client/connection.py)."""

    def __init__(self, address: Address, options: ClientOptions) -> None:
        super().__init__(options)
        self._connection = ClientConnection(address, options, self)
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

    async def publish(self, topic: str, values: Sequence[bytes], headers: Headers | None) -> None:
        transport = self._usable(topic) or await self._ready(topic)
        self._connection.write(transport.publish(topic, values, headers, None))
        self._receipts.sent_without(topic)
        link = self._connection.link
        if link is not None and link.crowded:
            await link.drain()

    async def _publish_once(
        self, topic: str, values: Sequence[bytes], headers: Headers | None
    ) -> Position:
        transport = await self._ready(topic)
        asked = self._receipts.ask(topic, values)
        try:
            self._connection.write(transport.publish(topic, values, headers, asked.receipt_id))
            return await self._receipt(asked)
        finally:
            self._receipts.forget(asked)

    async def _receipt(self, asked: PendingReceipt) -> Position:
        """Wait for the receipt until the timeout."""
        self._watch(asked, self._unsent_bytes)
        try:
            return await asked.receipt
        finally:
            if asked.timer is not None:
                asked.timer.cancel()

    def _watch(self, asked: PendingReceipt, unsent_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._options.receipt_timeout_s
        asked.timer = loop.call_later(timeout_s, self._time_up, asked, unsent_bytes)

    def _time_up(self, asked: PendingReceipt, unsent_before: int) -> None:
        unsent = self._unsent_bytes
        if unsent and unsent != unsent_before:
            # Bytes are still being sent: a large message may take longer on a slow line.
            self._watch(asked, unsent)
        else:
            self._give_up(asked)

    @property
    def _unsent_bytes(self) -> int:
        return 0 if self._connection.link is None else self._connection.link.unsent_bytes

    def _give_up(self, asked: PendingReceipt) -> None:
        refuse(asked.receipt, no_receipt(self._options.receipt_timeout_s))
        if self._transport is not None and self._transport.registers:
            # Acks are matched by order only, which fails once one is missing.
            self._connection.restart()
            self._down()

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
        while True:
            transport = self._usable(topic)
            if transport is not None:
                return transport
            if self._failure is not None:
                raise self._failure
            if self._transport is None:
                await self._up.wait()
            else:
                await self._wait_for(self._register(topic), topic)

    async def _wait_for(self, registration: asyncio.Future[None], topic: str) -> None:
        """Wait until the registration is answered, or the connection breaks."""
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                await asyncio.shield(registration)
        except TimeoutError as error:
            text = f"the bus did not confirm the registration to {topic!r}"
            raise PolybusError("client.timeout", text) from error
        except PolybusError as error:
            if error.code != RECEIPT_UNKNOWN:
                raise

    def _register(self, topic: str) -> asyncio.Future[None]:
        registration = self._registrations.get(topic)
        if registration is None:
            registration = asyncio.get_running_loop().create_future()
            self._registrations[topic] = registration
            assert self._transport is not None
            self._connection.write(self._transport.subscribe({topic: "latest"}, positions=False))
        return registration

    # The connection calls these

    def opened(self, transport: Transport) -> None:
        self._transport = transport
        self._up.set()

    def received(self, event: Event) -> None:
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
        text = "the connection broke before the receipt came; the message may be stored or not"
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
