"""goms:// — goMS.

A goMS client may send only to topics it is registered to, so a publisher registers first. Acks name
topics but no sends: those of one topic come in the order of its sends.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence

from polybus.batch import Batch, Buffer, Headers
from polybus.client.events import Delivered, Event, Refused, Stored, Subscribed, refusal
from polybus.client.message import Position
from polybus.client.transports.runs import Runs
from polybus.config import Limits
from polybus.errors import BusyError, PeerError
from polybus.wire import goms as wire
from polybus.wire.codec import Bad
from polybus.wire.positions import At

# The first digits of goMS's codes: general and send, register and logout.
_ABOUT_SENDS = ("000", "002")
_ABOUT_REGISTERING = ("001", "003")
_OUR_CODE = re.compile(r"([a-z]+\.[a-z-]+): (.*)", re.DOTALL)


class GomsTransport:
    """One connection; client/transports/__init__.py has the contract."""

    registers = True
    confirms = True

    def __init__(self, message_bytes_max: int) -> None:
        self._codec = wire.GomsClientCodec(Limits(message_bytes_max=message_bytes_max))
        self._acks_due: dict[str, deque[str]] = {}
        # Topics registered at their end: only of those does a reg-ack tell where they begin.
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
        runs = Runs()
        for event in self._codec.receive(data):
            match event:
                case wire.Deliver(batches):
                    for batch in batches:
                        runs.add_many(Delivered(batch.topic, list(batch.values())))
                case wire.Message():
                    _add_message(runs, event)
                case wire.RegAck():
                    self._registered(runs, event)
                case wire.SendAck():
                    self._stored(runs, event)
                case wire.Error(code, text):
                    self._refused(runs, code, text)
                case Bad(error):
                    runs.add(Refused(error, final=True))
        return runs.events

    def _registered(self, runs: Runs, ack: wire.RegAck) -> None:
        told = dict(zip(ack.topics, ack.offsets, strict=False))
        for topic in ack.topics:
            at = told.get(topic) if topic in self._from_the_end else None
            runs.add(Subscribed(topic, None if at is None else _position(at)))

    def _stored(self, runs: Runs, ack: wire.SendAck) -> None:
        if len(ack.topics) != 1 or len(ack.offsets) != 1 or not self._acks_due.get(ack.topics[0]):
            # A topic was deleted under our sends. Which of them are stored cannot be told any more.
            error = PeerError("goms.ack-unknown", "an ack for no send of ours")
            runs.add(Refused(error, final=True))
            return
        receipt_id = self._acks_due[ack.topics[0]].popleft()
        runs.add(Stored(receipt_id, _position(ack.offsets[0])))

    def _refused(self, runs: Runs, code: str, text: str) -> None:
        if code == wire.Code.UNKNOWN_TOPICS:
            error = refusal("topic.unknown", f"there is no topic {text!r}")
            runs.add(Refused(error, topics=(text, *text.split(","))))
            return
        ours = _OUR_CODE.fullmatch(text)
        error = refusal(ours[1], ours[2]) if ours else refusal(f"goms.{code}", text)
        if code == wire.Code.SLOW_DOWN:
            # What others sent was dropped, as we read too slowly; our own sends are not meant.
            error = BusyError(error.code, error.text)
        elif code.startswith(_ABOUT_SENDS) and any(self._acks_due.values()):
            # No ack will come for some send, so the acks of others can no longer be told apart.
            self._acks_due.clear()
            runs.add(Refused(error, final=True))
            return
        runs.add(Refused(error, registering=code.startswith(_ABOUT_REGISTERING)))


def _add_message(runs: Runs, message: wire.Message) -> None:
    """A message sent to several topics is one message of each, as on all other protocols."""
    offsets: Sequence[At | None] = message.offsets or [None] * len(message.topics)
    for topic, at in zip(message.topics, offsets, strict=False):
        position = None if at is None else _position(at)
        runs.add(Delivered(topic, [message.value], [message.headers], position))


def _position(at: At) -> Position:
    return Position(at.epoch, at.offset)
