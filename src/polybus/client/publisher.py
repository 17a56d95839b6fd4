"""Publishing: one connection for everything a client sends, and the receipts it waits for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from polybus.batch import Headers
from polybus.client.connection import Connection
from polybus.client.events import Delivered, Event, Refused, Stored, Subscribed
from polybus.client.message import Position
from polybus.client.options import Options
from polybus.client.receipts import RECEIPT_UNKNOWN, Asked, Receipts, no_receipt, refuse
from polybus.client.transports import Transport
from polybus.client.urls import Address
from polybus.errors import PolybusError, UsageError

log = logging.getLogger("polybus.client")


class _Broken(PolybusError):
    """`client.receipt-unknown` because the connection broke: only then does a retry help."""


class Publisher:
    """A client's outgoing side. The Owner of its connection (client/connection.py)."""

    def __init__(self, address: Address, options: Options) -> None:
        self._options = options
        self._connection = Connection(address, options, self)
        self._transport: Transport | None = None
        self._up = asyncio.Event()
        self._failure: PolybusError | None = None
        self._last_error: PolybusError | None = None
        self._receipts = Receipts()
        # By topic, for protocols where a publisher must register first.
        self._registrations: dict[str, asyncio.Future[None]] = {}

    async def open(self) -> None:
        await self._connection.open()

    async def close(self) -> None:
        self._fail(UsageError("client.closed", "the client is closed"))
        unproven = not self._receipts.all_proven
        failure = await self._connection.close(politely=True)
        if failure is not None and unproven:
            self._tell(failure)

    async def publish(self, topic: str, values: Sequence[bytes], headers: Headers | None) -> None:
        """Send without a receipt; returns at once unless the bus takes less than we send."""
        transport = self._usable(topic) or await self._ready(topic)
        self._connection.write(transport.publish(topic, values, headers, None))
        self._receipts.sent_without(topic)
        link = self._connection.link
        if link is not None and link.crowded:
            await link.drain()

    async def publish_safely(
        self, topic: str, values: Sequence[bytes], headers: Headers | None, *, retry: bool
    ) -> Position:
        """Send and wait for the receipt, which is the last value's and covers all.

        Raises:
            PolybusError: the bus's own refusal, or `client.receipt-unknown`, the messages may be
                stored or not: the connection broke first and `retry` is off, nothing came for
                `receipt_timeout_s`, or the bus refused a message and did not say which.
        """
        while True:
            transport = await self._ready(topic)
            asked = self._receipts.ask(topic, values)
            try:
                data = transport.publish(topic, values, headers, asked.receipt_id)
                self._connection.write(data)
                return await self._receipt(asked)
            except _Broken:
                if not retry:
                    raise
            finally:
                self._receipts.forget(asked)

    async def _receipt(self, asked: Asked) -> Position:
        """Wait for the receipt until its time is up."""
        self._watch(asked, self._unsent_bytes)
        try:
            return await asked.receipt
        finally:
            if asked.timer is not None:
                asked.timer.cancel()

    def _watch(self, asked: Asked, unsent_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = self._options.receipt_timeout_s
        asked.timer = loop.call_later(timeout_s, self._time_up, asked, unsent_bytes)

    def _time_up(self, asked: Asked, unsent_before: int) -> None:
        unsent = self._unsent_bytes
        if unsent and unsent != unsent_before:
            # Our bytes still move: a large message may well take longer on a slow line.
            self._watch(asked, unsent)
        else:
            self._give_up(asked)

    @property
    def _unsent_bytes(self) -> int:
        return 0 if self._connection.link is None else self._connection.link.unsent_bytes

    def _give_up(self, asked: Asked) -> None:
        refuse(asked.receipt, no_receipt(self._options.receipt_timeout_s))
        if self._transport is not None and self._transport.registers:
            # Acks that only come in order cannot be told apart once one is missing.
            self._connection.restart()
            self._down()

    async def flush(self) -> None:
        """Wait until everything published so far is with the operating system.

        Raises:
            PolybusError: `client.disconnected`, the connection ended and no other is made.
        """
        if self._connection.link is not None:
            await self._connection.link.flush()
            # Who keeps the connection hears of its end a moment later.
            await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure

    def _usable(self, topic: str) -> Transport | None:
        """A transport that may publish to the topic this very moment, if there is one."""
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
        """Wait until it is settled; a connection that breaks meanwhile settles it too."""
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
            case Refused():
                self._refused(event)
                if event.final:
                    self._down()
            case Delivered():
                pass  # goMS sends a publisher what others send: nobody here asked for it

    def lost(self) -> None:
        self._down()
        text = "the connection broke before the receipt came; the message may be stored or not"
        if self._last_error is not None:
            text += f" (the bus said {self._last_error})"
            self._last_error = None
        error = _Broken(RECEIPT_UNKNOWN, text)
        self._receipts.lost(error)
        for registration in self._registrations.values():
            refuse(registration, error)
        self._registrations.clear()

    def _down(self) -> None:
        """What is published from now on waits for the next link."""
        self._transport = None
        self._up.clear()

    def failed(self, error: PolybusError) -> None:
        self._fail(error)

    def _fail(self, error: PolybusError) -> None:
        """Nothing can be published any more: tell all who wait."""
        if self._failure is None:
            self._failure = error
        self._up.set()

    def _refused(self, refusal: Refused) -> None:
        registrations = self._registrations_of(refusal)
        for registration in registrations:
            refuse(registration, refusal.error)
        blamed = not refusal.registering and self._receipts.refused(refusal)
        if registrations or blamed:
            return
        self._last_error = refusal.error
        self._tell(refusal.error)

    def _tell(self, error: PolybusError) -> None:
        """Tell of an error that no waiting call is to blame for."""
        if self._options.on_error is not None:
            self._options.on_error(error)
        else:
            log.warning("%s: %s", self._options.name, error)

    def _registrations_of(self, refusal: Refused) -> list[asyncio.Future[None]]:
        """The registrations that were refused; they are asked for again next time."""
        waiting = [topic for topic, one in self._registrations.items() if not one.done()]
        refused = list(refusal.topics)
        if not refused and refusal.receipt_id is None:
            nothing_sent = not self._receipts and self._receipts.all_proven
            if refusal.registering or nothing_sent:
                # The bus answers registrations in order.
                refused = waiting[:1]
        found = {topic: self._registrations.pop(topic, None) for topic in dict.fromkeys(refused)}
        return [one for topic, one in found.items() if one is not None and topic in waiting]
