"""goms:// — goMS.

A goMS client may send only to topics it is registered to, so a publisher registers first. An ack
names its topic but not its send: the acks of one topic come in the order of its sends.
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence

from polybus.batch import Batch, Buffer, Headers
from polybus.client.transports.base import (
    Delivery,
    Event,
    EventList,
    Refusal,
    Stored,
    Subscribed,
    Transport,
    refusal,
)
from polybus.config import Limits
from polybus.errors import BusyError, PeerError
from polybus.wire import goms as wire
from polybus.wire.codec import Bad, Deliver
from polybus.wire.goms_objects import Code
from polybus.wire.positions import Position

# The first digits of goMS's codes: general and send, register and logout.
_ABOUT_SENDS = ("000", "002")
_ABOUT_REGISTERING = ("001", "003")
_OUR_CODE = re.compile(r"([a-z]+\.[a-z-]+): (.*)", re.DOTALL)


class GomsTransport(Transport):
    registers = True

    def __init__(self, message_bytes_max: int) -> None:
        self._codec = wire.GomsClientCodec(Limits(message_bytes_max=message_bytes_max))
        self._acks_due: dict[str, deque[str]] = {}
        # Topics registered at their end: only for those does a reg-ack have the start position.
        self._from_the_end: set[str] = set()

    def publish(
        self,
        topic: str,
        values: Sequence[bytes],
        headers: Headers | None,
        receipt_id: str | None,
    ) -> Buffer:
        plain = values if receipt_id is None else values[:-1]
        if headers:
            sends = b"".join(wire.encode_send([topic], value, headers) for value in plain)
        else:
            sends = wire.encode_sends(Batch.of(topic, plain)) if plain else b""
        if receipt_id is None:
            return sends
        self._acks_due.setdefault(topic, deque()).append(receipt_id)
        return sends + wire.encode_send([topic], values[-1], headers, ack=True)

    def subscribe(self, starts: Mapping[str, str], *, positions: bool) -> Buffer:
        by_start: dict[str, list[str]] = {}
        for topic, start in starts.items():
            by_start.setdefault(start, []).append(topic)
        self._from_the_end.update(by_start.get("latest", ()))
        return b"".join(
            wire.encode_register(topics, start=start, ack=True, offsets=positions)
            for start, topics in by_start.items()
        )

    def goodbye(self) -> bytes:
        return wire.encode_close()

    def receive(self, data: Buffer) -> list[Event]:
        found = EventList()
        for event in self._codec.receive(data):
            match event:
                case Deliver(batches):
                    for batch in batches:
                        found.add(Delivery(batch.topic, list(batch.values())))
                case wire.Message():
                    _add_message(found, event)
                case wire.RegAck():
                    self._registered(found, event)
                case wire.SendAck():
                    self._stored(found, event)
                case wire.Error(code, text):
                    self._refused(found, code, text)
                case Bad(error):
                    found.add(Refusal(error, final=True))
        return found.events

    def _registered(self, found: EventList, ack: wire.RegAck) -> None:
        positions = dict(zip(ack.topics, ack.offsets, strict=False))
        for topic in ack.topics:
            found.add(
                Subscribed(topic, positions.get(topic) if topic in self._from_the_end else None)
            )

    def _stored(self, found: EventList, ack: wire.SendAck) -> None:
        if len(ack.topics) != 1 or len(ack.offsets) != 1 or not self._acks_due.get(ack.topics[0]):
            # A topic was deleted after our sends, so acks no longer match sends.
            error = PeerError("goms.ack-unknown", "the bus acknowledged a send that was not sent")
            found.add(Refusal(error, final=True))
            return
        receipt_id = self._acks_due[ack.topics[0]].popleft()
        found.add(Stored(receipt_id, ack.offsets[0]))

    def _refused(self, found: EventList, code: str, text: str) -> None:
        if code == Code.UNKNOWN_TOPICS:
            error = refusal("topic.unknown", f"there is no topic {text!r}")
            found.add(Refusal(error, topics=(text, *text.split(","))))
            return
        ours = _OUR_CODE.fullmatch(text)
        error = refusal(ours[1], ours[2]) if ours else refusal(f"goms.{code}", text)
        if code == Code.SLOW_DOWN:
            # The bus dropped messages because we read too slowly; our own sends are not affected.
            error = BusyError(error.code, error.text)
        elif code.startswith(_ABOUT_SENDS) and any(self._acks_due.values()):
            # One send gets no ack, so later acks no longer match their sends.
            self._acks_due.clear()
            found.add(Refusal(error, final=True))
            return
        found.add(Refusal(error, registering=code.startswith(_ABOUT_REGISTERING)))


def _add_message(found: EventList, message: wire.Message) -> None:
    """A message sent to several topics is one message of each, as on all other protocols."""
    positions: Sequence[Position | None] = message.offsets or [None] * len(message.topics)
    for topic, position in zip(message.topics, positions, strict=False):
        found.add_message(topic, message.value, message.headers, position)
