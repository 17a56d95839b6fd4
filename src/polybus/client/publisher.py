"""Publishing: one connection for everything a client sends, and the receipts it waits for."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from polybus.batch import Headers
from polybus.client.connection import Connection
from polybus.client.events import Delivered, Event, Refused, Stored, Subscribed
from polybus.client.message import Position
from polybus.client.options import Options
from polybus.client.transports import Transport
from polybus.client.urls import Address
from polybus.errors import PolybusError, StorageError, UsageError

log = logging.getLogger("polybus.client")
RECEIPT_UNKNOWN = "client.receipt-unknown"


class Publisher:
    """A client's outgoing side. The Owner of its connection (client/connection.py)."""

    def __init__(self, address: Address, options: Options) -> None:
        self._options = options
        self._connection = Connection(address, options, self)
        self._transport: Transport | None = None
        self._up = asyncio.Event()
        self._failure: PolybusError | None = None
        self._last_error: PolybusError | None = None
        self._ids = map(str, itertools.count(1))
        self._receipts: dict[str, tuple[str, asyncio.Future[Position]]] = {}
        # By topic, for protocols where a publisher must register first.
        self._registrations: dict[str, asyncio.Future[None]] = {}

    async def open(self) -> None:
        await self._connection.open()

    async def close(self) -> None:
        self._fail(UsageError("client.closed", "the client is closed"))
        await self._connection.close(politely=True)

    async def publish(self, topic: str, values: Sequence[bytes], headers: Headers | None) -> None:
        """Send without a receipt; returns at once unless the bus takes less than we send."""
        transport = self._usable(topic) or await self._ready(topic)
        self._connection.write(transport.publish(topic, values, headers, None))
        link = self._connection.link
        if link is not None and link.crowded:
            await link.drain()

    async def publish_safely(
        self, topic: str, values: Sequence[bytes], headers: Headers | None, *, retry: bool
    ) -> Position:
        """Send and wait for the receipt, which is the last value's and covers all.

        Raises:
            PolybusError: the bus's own refusal, or `client.receipt-unknown` when the connection
                broke first and `retry` is off: the messages may be stored or not.
        """
        while True:
            transport = await self._ready(topic)
            receipt_id = next(self._ids)
            receipt: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
            self._connection.write(transport.publish(topic, values, headers, receipt_id))
            self._receipts[receipt_id] = topic, receipt
            try:
                return await receipt
            except PolybusError as error:
                if not (retry and error.code == RECEIPT_UNKNOWN):
                    raise
            finally:
                self._receipts.pop(receipt_id, None)

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
                _, receipt = self._receipts.get(receipt_id, (None, None))
                if receipt is not None and not receipt.done():
                    receipt.set_result(position)
            case Subscribed(topic):
                registration = self._registrations.get(topic)
                if registration is not None and not registration.done():
                    registration.set_result(None)
            case Refused():
                self._refused(event)
            case Delivered():
                pass  # goMS sends a publisher what others send: nobody here asked for it

    def lost(self) -> None:
        self._transport = None
        self._up.clear()
        text = "the connection broke before the receipt came; the message may be stored or not"
        if self._last_error is not None:
            text += f" (the bus said {self._last_error})"
            self._last_error = None
        self._settle(PolybusError(RECEIPT_UNKNOWN, text))

    def failed(self, error: PolybusError) -> None:
        self._fail(error)

    def _fail(self, error: PolybusError) -> None:
        """Nothing can be published any more: tell all who wait."""
        if self._failure is None:
            self._failure = error
        self._up.set()

    def _settle(self, error: PolybusError) -> None:
        """Nothing more is heard of what is in flight."""
        for _, receipt in self._receipts.values():
            _refuse(receipt, error)
        for registration in self._registrations.values():
            _refuse(registration, error)
        self._registrations.clear()

    def _refused(self, refusal: Refused) -> None:
        blamed: list[asyncio.Future[Position] | asyncio.Future[None]] = []
        for topic in refusal.topics:
            # Asked again next time: the topic may have been created by then.
            registration = self._registrations.pop(topic, None)
            if registration is not None and not registration.done():
                blamed.append(registration)
        blamed += self._receipts_of(refusal)
        for future in blamed:
            _refuse(future, refusal.error)
        if blamed:
            return
        self._last_error = refusal.error
        if self._options.on_error is not None:
            self._options.on_error(refusal.error)
        else:
            log.warning("%s: %s", self._options.name, refusal.error)

    def _receipts_of(self, refusal: Refused) -> list[asyncio.Future[Position]]:
        """The receipts that will not come because of this refusal."""
        if refusal.receipt_id is not None:
            known = self._receipts.get(refusal.receipt_id)
            return [known[1]] if known is not None else []
        # Boson's errors name no receipt. Those about topics hold for all messages of the topic, and
        # when the log takes no writes, no receipt that is still out will come.
        error = refusal.error
        named = [
            receipt
            for topic, receipt in self._receipts.values()
            if topic in refusal.topics or f"'{topic}'" in error.text
        ]
        if not named and isinstance(error, StorageError):
            return [receipt for _, receipt in self._receipts.values()]
        return named


def _refuse(future: asyncio.Future[Position] | asyncio.Future[None], error: PolybusError) -> None:
    if not future.done():
        future.set_exception(error)
        # Whoever waited may have been cancelled meanwhile; that is no news for the log.
        future.exception()
