"""The stream protocols of the client by URL scheme; client/http has the others.

Boson frames carry neither headers nor positions: the bus sends the position of each subscription's
start, and again after every gap, and the transport counts from there. Properties carry both.

A goMS client may send only to topics it is registered to, so a publisher registers first. An ack
names its topic but not its send: the acks of one topic come in the order of its sends.

A queue connector decides the topic of its messages. So the caller's topic is a label for received
messages and is never sent. Messages of two labels would go to one topic, so a connection accepts
only one.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence

from polybus import references
from polybus.batch import Batch, Buffer
from polybus.client.options import Address
from polybus.client.transport import (
    TOO_LARGE,
    Delivery,
    PendingPublish,
    Refusal,
    Stored,
    Subscribed,
    Transport,
    TransportEvent,
    add_message,
    refusal,
)
from polybus.config import Limits
from polybus.errors import BusyError, PeerError, UsageError
from polybus.wire import boson, boson_frames, boson_properties, goms, queue
from polybus.wire.boson_properties_client import BosonPropertiesClientCodec, Delivered
from polybus.wire.codec import Bad, Deliver, LoggedIn
from polybus.wire.goms_objects import Code
from polybus.wire.positions import Position

# The first digits of goMS's codes: general and send, register and logout.
_ABOUT_SENDS = ("000", "002")
_ABOUT_REGISTERING = ("001", "003")
_OUR_CODE = re.compile(r"([a-z]+\.[a-z-]+): (.*)", re.DOTALL)


class _BosonTransport(Transport):
    gzip = True
    _codec: boson_frames.BosonFramesClientCodec | BosonPropertiesClientCodec

    def __init__(self) -> None:
        # By topic, the position of the next message whose frame has none.
        self._next: dict[str, Position] = {}

    def receive(self, data: Buffer) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        for event in self._codec.receive(data):
            match event:
                case Deliver(batches):
                    events += map(self._counted, batches)
                case Delivered(topic, content, headers, position):
                    add_message(events, topic, content, headers, position)
                case boson.Positioned(topic, position):
                    self._next[topic] = position
                    events.append(Subscribed(topic, position))
                case boson.Receipt(receipt_id, position):
                    events.append(Stored(receipt_id.decode("ascii", "replace"), position))
                case LoggedIn():
                    events.append(event)
                case boson.Refused(code, text, receipt_id):
                    asked = receipt_id.decode("ascii", "replace") or None
                    final = code.endswith(TOO_LARGE)
                    events.append(Refusal(refusal(code, text), asked, final=final))
                case Bad(error):
                    events.append(Refusal(error, final=True))
        return events

    def _counted(self, batch: Batch) -> Delivery:
        delivery = Delivery(batch.topic, list(batch.values()), None, self._next.get(batch.topic))
        if delivery.next_position is not None:
            self._next[batch.topic] = delivery.next_position
        return delivery


class BosonFramesTransport(_BosonTransport):
    def __init__(self, message_bytes_max: int) -> None:
        super().__init__()
        self._codec = boson_frames.BosonFramesClientCodec(message_bytes_max)

    def login(self, user: str, secret: str) -> Buffer:
        return boson_frames.encode_login(f"{user}\n{secret}" if user else secret)

    def publish(self, publish: PendingPublish) -> Buffer:
        if publish.headers:
            text = "Boson frames cannot carry headers; use boson+properties:// or goms://"
            raise UsageError("headers.invalid", text)
        return boson_frames.encode_publish(publish.topic, publish.values, publish.receipt_id)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        return boson_frames.encode_subscribe(starts, tell=positions)


class BosonPropertiesTransport(_BosonTransport):
    def __init__(self, message_bytes_max: int) -> None:
        super().__init__()
        limits = Limits(message_bytes_max=message_bytes_max)
        self._codec = BosonPropertiesClientCodec(limits)

    def login(self, user: str, secret: str) -> Buffer:
        return boson_properties.encode_login(f"{user}\n{secret}" if user else secret)

    def publish(self, publish: PendingPublish) -> Buffer:
        encode, topic, headers = boson_properties.encode_publish, publish.topic, publish.headers
        messages = [encode(topic, value, headers) for value in publish.values[:-1]]
        receipt_id = (publish.receipt_id or "").encode()
        messages.append(encode(topic, publish.values[-1], headers, receipt_id))
        return b"".join(messages)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        return boson_properties.encode_subscribe(starts, tell=positions)


class GomsTransport(Transport):
    registers = True

    def __init__(self, message_bytes_max: int) -> None:
        self._codec = goms.GomsClientCodec(Limits(message_bytes_max=message_bytes_max))
        self._acks_due: dict[str, deque[str]] = {}
        # Topics registered at their end: only for those does a reg-ack have the start position.
        self._from_the_end: set[str] = set()

    def login(self, user: str, secret: str) -> Buffer:
        return goms.encode_login(user, secret)

    def publish(self, publish: PendingPublish) -> Buffer:
        topic, headers, receipt_id = publish.topic, publish.headers, publish.receipt_id
        plain = publish.values if receipt_id is None else publish.values[:-1]
        if headers:
            sends = b"".join(goms.encode_send([topic], value, headers) for value in plain)
        else:
            sends = goms.encode_sends(Batch.of(topic, plain)) if plain else b""
        if receipt_id is None:
            return sends
        self._acks_due.setdefault(topic, deque()).append(receipt_id)
        return sends + goms.encode_send([topic], publish.values[-1], headers, ack=True)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        by_start: dict[str, list[str]] = {}
        for topic, start in starts.items():
            by_start.setdefault(start, []).append(topic)
        self._from_the_end.update(by_start.get("latest", ()))
        return b"".join(
            goms.encode_register(topics, start=start, ack=True, offsets=positions)
            for start, topics in by_start.items()
        )

    def goodbye(self) -> bytes:
        return goms.encode_close()

    def receive(self, data: Buffer) -> list[TransportEvent]:
        events: list[TransportEvent] = []
        for event in self._codec.receive(data):
            match event:
                case Deliver(batches):
                    events += [Delivery(batch.topic, list(batch.values())) for batch in batches]
                case goms.Message(topics, value, headers, offsets):
                    # A message to several topics is one message of each, as on other protocols.
                    positions: Sequence[Position | None] = offsets or [None] * len(topics)
                    for topic, position in zip(topics, positions, strict=False):
                        add_message(events, topic, value, headers, position)
                case goms.Referred(topics, reference, headers, offsets):
                    marked = {**(headers or {}), references.HEADER: reference.id.encode()}
                    places: Sequence[Position | None] = offsets or [None] * len(topics)
                    for topic, position in zip(topics, places, strict=False):
                        add_message(events, topic, references.encode(reference), marked, position)
                case goms.RegAck(topics, offsets):
                    starts = dict(zip(topics, offsets, strict=False))
                    known = self._from_the_end
                    events += [
                        Subscribed(topic, starts.get(topic) if topic in known else None)
                        for topic in topics
                    ]
                case LoggedIn():
                    events.append(event)
                case goms.SendAck(topics, offsets):
                    events.append(self._stored(topics, offsets))
                case goms.Error(code, text):
                    events.append(self._refused(code, text))
                case Bad(error):
                    events.append(Refusal(error, final=True))
        return events

    def _stored(self, topics: Sequence[str], offsets: Sequence[Position]) -> TransportEvent:
        if len(topics) != 1 or len(offsets) != 1 or not self._acks_due.get(topics[0]):
            # A topic was deleted after our sends, so acks no longer match sends.
            error = PeerError(
                "goms.ack-unknown", "the bus sent an ack that matches no pending send"
            )
            return Refusal(error, final=True)
        return Stored(self._acks_due[topics[0]].popleft(), offsets[0])

    def _refused(self, code: str, text: str) -> TransportEvent:
        if code == Code.UNKNOWN_TOPICS:
            error = refusal("topic.unknown", f"there is no topic {text!r}")
            return Refusal(error, topics=(text, *text.split(",")))
        ours = _OUR_CODE.fullmatch(text)
        if code == Code.LOGIN and not any(self._acks_due.values()):
            return Refusal(refusal("auth.failed", ours[2] if ours else text))
        error = refusal(ours[1], ours[2]) if ours else refusal(f"goms.{code}", text)
        if code == Code.SLOW_DOWN:
            # The bus dropped messages because we read too slowly; our own sends are not affected.
            error = BusyError(error.code, error.text)
        elif code.startswith(_ABOUT_SENDS) and any(self._acks_due.values()):
            # One send gets no ack, so later acks no longer match their sends.
            self._acks_due.clear()
            return Refusal(error, final=True)
        return Refusal(error, registering=code.startswith(_ABOUT_REGISTERING))


class QueueTransport(Transport):
    confirms = False
    answers_login = False

    def __init__(self, message_bytes_max: int) -> None:
        self._reader = queue.QueueReader(message_bytes_max)
        self._topic: str | None = None
        self._subscribed = False

    def login(self, user: str, secret: str) -> Buffer:
        if user:
            raise UsageError("client.unsupported", "a queue cannot use a password; use a token")
        return queue.encode(Batch.of("", [secret.encode()]))

    def publish(self, publish: PendingPublish) -> Buffer:
        if publish.headers:
            text = "queues do not support headers; use boson+properties:// or goms://"
            raise UsageError("headers.invalid", text)
        if publish.receipt_id is not None:
            raise UsageError("client.unsupported", "queues do not support receipts; use boson://")
        self._use(publish.topic)
        return queue.encode(Batch.of(publish.topic, publish.values))

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        for topic, start in starts.items():
            if start != "latest":
                text = f"a queue can only start at the latest message, not at {start}"
                raise UsageError("client.unsupported", text)
            self._use(topic)
        self._subscribed = True
        return b""

    def receive(self, data: Buffer) -> list[TransportEvent]:
        messages = self._reader.receive(data)
        events: list[TransportEvent] = []
        # A publisher receives the messages of others too, which it did not request.
        if messages and self._subscribed and self._topic is not None:
            events.append(Delivery(self._topic, messages))
        if self._reader.error is not None:
            events.append(Refusal(self._reader.error, final=True))
        return events

    def _use(self, topic: str) -> None:
        if self._topic is None:
            self._topic = topic
        elif topic != self._topic:
            text = f"a queue has one topic, here {self._topic!r}; {topic!r} needs another client"
            raise UsageError("client.unsupported", text)


SCHEMES: dict[str, type[Transport]] = {
    "boson": BosonFramesTransport,
    "boson+properties": BosonPropertiesTransport,
    "goms": GomsTransport,
    "queue": QueueTransport,
}
# Requests and WebSockets instead of a stream.
HTTP_SCHEMES = ("http", "ws")


def check(address: Address) -> None:
    """Raise UsageError: `client.scheme`, unknown; `client.url`, the scheme has no gzip."""
    scheme = address.scheme
    if scheme not in (*SCHEMES, *HTTP_SCHEMES):
        known = ", ".join(f"{known}://" for known in sorted([*SCHEMES, *HTTP_SCHEMES]))
        raise UsageError("client.scheme", f"{scheme[:40]}:// is not known; use one of {known}")
    transport = SCHEMES.get(scheme, Transport)  # HTTP has no gzip, the default
    if address.gzip and not transport.gzip:
        raise UsageError("client.url", f"{scheme}:// does not support gzip")
