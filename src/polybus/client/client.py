"""The client: one API over every protocol the bus speaks."""

from __future__ import annotations

import functools
import os
import ssl
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from polybus import names
from polybus.batch import Headers
from polybus.client import blobs, protocols
from polybus.client.blobs import BlobProgress, Source
from polybus.client.message import Position, StartFrom, start_text
from polybus.client.options import DEFAULT_URL, ClientOptions, ErrorListener, parse
from polybus.client.publisher import Outgoing, StreamPublisher
from polybus.client.subscription import StreamSubscription, Subscription
from polybus.client.transport import PendingPublish
from polybus.errors import UsageError
from polybus.references import OCTETS, Reference

if TYPE_CHECKING:
    from polybus.client.http.sessions import Sessions, SessionSubscription
    from polybus.client.http.sources import TransportName
    from polybus.client.msgstream import EventStream, OnFailure

Data = bytes | bytearray | memoryview | str


def connect(  # noqa: PLR0913 - all named by the caller
    url: str = DEFAULT_URL,
    *,
    reconnect: bool = True,
    connect_timeout_s: float = 10.0,
    receipt_timeout_s: float = 30.0,
    name: str = "polybus-client",
    ca_file: str | os.PathLike[str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    on_error: ErrorListener | None = None,
) -> Client:
    """A client of the bus at the URL: `async with polybus.connect("goms://host:55545") as c`.

    Schemes are `boson`, `boson+properties` and `goms`, each also with `+tls`, and `http`, `https`,
    `ws` and `wss`, which receive messages by long polls or by WebSocket. The default port is 55545.
    `?gzip=1` compresses a Boson stream. `queue://host:port` is a queue connector: it decides the
    topic, starts at the latest message, and has no receipts, headers or positions.

    `boson://a:55545,b:55545` names several nodes of a cluster: the client uses the first that
    answers, and after a loss resumes on another. So do `boson+properties` and `goms`.

    `goms://user:password@host` logs in to an account, `goms://token@host` by a token. Without
    either the token is that of the environment (POLYBUS_TOKEN), or of `polybus login`.

    Args:
        reconnect: reconnect after a loss, and resume subscriptions at their positions.
        connect_timeout_s: how long a connect, and the answer to a subscription, may take.
        receipt_timeout_s: how long a receipt may take after the message is sent.
        name: the name of the client in log lines.
        ca_file: the certificates to trust with TLS, in PEM, in place of the system's. The bus's
            certificate is always verified.
        ssl_context: all settings of TLS, in place of `ca_file`.
        on_error: called with each refusal of a message that was published without a receipt; by
        default refusals are logged.

    Raises:
        UsageError: `client.url`, `client.scheme` or `client.ca-file`.

    Opening it raises `auth.failed` if the bus does not accept the login.
    """
    address = parse(url)
    protocols.check(address)
    options = ClientOptions(
        address=address,
        reconnect=reconnect,
        connect_timeout_s=connect_timeout_s,
        receipt_timeout_s=receipt_timeout_s,
        name=name,
        tls=ssl_context if ca_file is None else _trusting(ca_file, ssl_context),
        on_error=on_error,
    )
    return Client(options)


def _trusting(
    ca_file: str | os.PathLike[str], ssl_context: ssl.SSLContext | None
) -> ssl.SSLContext:
    if ssl_context is not None:
        raise UsageError("client.ca-file", "give ca_file or ssl_context, not both")
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise UsageError("client.ca-file", f"cannot use {ca_file}: {error}") from error


class Client:
    """A connected client; use it with `async with`, from one event loop.

    Publishing has one connection, and each subscription another. So a slow subscription delays
    nothing else, and on every protocol a client receives its own messages if it subscribes to the
    topic.
    """

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._publisher: Outgoing | None = None
        self._subscriptions: set[Subscription] = set()
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        self._sessions: Sessions | None = None
        self._closed = False

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect, one attempt. Raises PolybusError `client.unreachable`."""
        publisher: Outgoing
        if self._speaks_http:
            from polybus.client.http.publisher import HttpPublisher

            publisher = HttpPublisher(self._options)
        else:
            publisher = StreamPublisher(self._options)
        await publisher.open()
        self._publisher = publisher

    async def close(self) -> None:
        """End all subscriptions and event streams, send what is pending, and disconnect."""
        self._closed = True
        for subscription in list(self._subscriptions):
            await subscription.aclose()
        for stream in list(self._streams):
            await stream.aclose()
        if self._publisher is not None:
            await self._publisher.close()
        if self._sessions is not None:
            self._sessions.close()

    async def publish(
        self,
        topic: str,
        data: Data,
        *,
        headers: Mapping[str, bytes | str] | None = None,
        receipt: bool = False,
        retry: bool = False,
    ) -> Position | None:
        """Publish one message; text is encoded as UTF-8.

        Without a receipt this usually returns at once, and a broken connection may lose the
        message. With `receipt` it returns the message's position when the message is durable.

        Args:
            retry: with a receipt, publish again if the connection broke before it came. Delivery
                is then at least once.

        Raises:
            PolybusError: the bus refused the message (its code, such as `topic.unknown`), or
                `client.receipt-unknown`: it may or may not be stored, because the connection broke,
                no receipt came in time, or the bus refused a message without naming it.
            UsageError: `client.closed`, `headers.invalid`, `topic.invalid`, `topic.reserved`, or
                `client.unsupported`, the protocol has no receipts.
        """
        return await self.publish_many(topic, [data], headers=headers, receipt=receipt, retry=retry)

    async def publish_many(
        self,
        topic: str,
        data: Iterable[Data],
        *,
        headers: Mapping[str, bytes | str] | None = None,
        receipt: bool = False,
        retry: bool = False,
    ) -> Position | None:
        """Publish many messages at once, all with the same headers.

        The receipt, if requested, covers them all; the position is that of the last one. Otherwise
        like `publish`.
        """
        publisher = self._open_publisher()
        name = _publishable(topic)
        publish = PendingPublish(name, [_bytes(one) for one in data], _headers(headers))
        if not publish.values:
            return None
        if receipt:
            return await publisher.publish_safely(publish, retry=retry)
        await publisher.publish(publish)
        return None

    async def publish_file(
        self,
        topic: str,
        source: Source,
        *,
        content_type: str = OCTETS,
        progress: BlobProgress | None = None,
    ) -> tuple[Position, Reference]:
        """Publish one message from a file or an async iterator of bytes, in constant memory.

        It goes over HTTP on the same port, whatever the URL's scheme, and is stored as a blob.
        Returns its position and reference when both are durable. A file continues where an earlier
        call was interrupted; with `reconnect` this one waits for a bus that is gone.

        Raises:
            PolybusError: the bus refused it (with its code), or cannot be reached.
            UsageError: `client.closed`, `client.unsupported` (a queue), `topic.invalid`.
        """
        self._open_publisher()
        name = _publishable(topic)
        return await blobs.upload(
            self._options, name, source, content_type=content_type, progress=progress
        )

    async def download(
        self,
        blob: Reference | str,
        target: str | os.PathLike[str],
        *,
        progress: BlobProgress | None = None,
    ) -> Path:
        """Write the payload of a reference, or of an id, to a file; return its path.

        Bytes of an earlier call in `TARGET.part` are not downloaded again. With `reconnect` it
        waits for a bus that is gone. The file is verified before it gets its name.

        Raises:
            PolybusError: `blob.unknown`, `blob.damaged`; without `reconnect`, what interrupted it.
        """
        self._open_publisher()
        return await blobs.download(self._options, blob, target, progress=progress)

    async def flush(self) -> None:
        """Wait until everything published so far is passed to the operating system.

        This does not mean that it is durable: request a receipt for that.

        Raises:
            PolybusError: `client.disconnected`, the connection ended and `reconnect` is off.
        """
        await self._open_publisher().flush()

    def subscribe(self, topics: str | Iterable[str], start: StartFrom = "latest") -> Subscription:
        """Messages of a topic, or of several: `async for message in c.subscribe("news")`.

        `async with c.subscribe(...) as s` (or `s = await c.subscribe(...)`) waits until the bus has
        confirmed the subscription, so that no message published afterwards is missed.

        Args:
            start: `"latest"`, `"earliest"`, a Position or `"EPOCH:OFFSET"`, or a time: a datetime
                or ISO text, with a time zone.

        Raises:
            UsageError: `position.invalid`, `topic.invalid`, `client.closed`; when it starts,
                `client.unsupported`: several topics or another start on a queue.
        """
        self._open_publisher()
        wanted = [topics] if isinstance(topics, str) else topics
        text = start_text(start)
        starts = {names.canonical(topic): text for topic in wanted}
        if not starts or "*" in starts:
            raise UsageError("topic.invalid", "name the topics to subscribe to, one or more")
        kind: type[StreamSubscription] | type[SessionSubscription] = StreamSubscription
        if self._speaks_http:
            from polybus.client.http.sessions import SessionSubscription

            kind = SessionSubscription
        subscription = kind(self._options, starts, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        return subscription

    def events(
        self,
        topics: Iterable[str] = (),
        *,
        start: StartFrom = "latest",
        session_key: str | None = None,
        transport: TransportName | None = None,
        on_failure: OnFailure | None = None,
    ) -> EventStream:
        """Events of a session, by their dotted names; only on `http://` and `ws://`.

        Args:
            topics, start: for a session of its own, which ends with the stream.
            session_key: an existing session, which keeps its topics and is not deleted.
            transport: `"websocket"`, `"longpolling"` or `"shortpolling"`; by default as the URL.
            on_failure: decides what to do after an exception of a handler (client/msgstream.py).

        Raises:
            UsageError: `client.unsupported`, `client.closed`.
        """
        from polybus.client.http.sessions import SessionStream
        from polybus.client.msgstream import EventStream

        self._need_http("events")
        wanted = tuple(topics)
        if session_key is not None and (wanted or start != "latest"):
            text = "an existing session keeps its topics; change them with Sessions.set_topics"
            raise UsageError("client.unsupported", text)
        packs = SessionStream(
            self._options, topics=wanted, start=start, key=session_key, transport=transport
        )
        stream = EventStream(packs, self._options, on_failure)
        self._streams.add(stream)
        return stream

    @property
    def sessions(self) -> Sessions:
        """The sessions of the bus. Only on `http://` and `ws://`.

        Raises:
            UsageError: `client.unsupported`, `client.closed`.
        """
        from polybus.client.http.sessions import Sessions

        self._need_http("sessions")
        if self._sessions is None:
            self._sessions = Sessions(self._options)
        return self._sessions

    @property
    def _speaks_http(self) -> bool:
        return self._options.address.scheme in protocols.HTTP_SCHEMES

    def _need_http(self, what: str) -> None:
        self._open_publisher()
        if not self._speaks_http:
            text = f"{self._options.address.scheme}:// has no {what}; use http:// or ws://"
            raise UsageError("client.unsupported", text)

    def _open_publisher(self) -> Outgoing:
        if self._publisher is None or self._closed:
            raise UsageError("client.closed", "the client is not open; use `async with`")
        return self._publisher


@functools.lru_cache(maxsize=1024)
def _publishable(topic: str) -> str:
    """The canonical name of a topic. Raises UsageError if clients may not publish there."""
    name = names.canonical(topic)
    if names.is_reserved(name):
        raise UsageError("topic.reserved", f"{name}: topics that begin with $ are reserved")
    return name


def _bytes(data: Data) -> bytes:
    if isinstance(data, bytes):
        return data
    return data.encode() if isinstance(data, str) else bytes(data)


def _headers(headers: Mapping[str, bytes | str] | None) -> Headers | None:
    if not headers:
        return None
    return {name: _bytes(value) for name, value in headers.items()}
