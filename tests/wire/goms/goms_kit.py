"""What the goMS tests share: events in a form that does not depend on how they were gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polybus.config import Limits
from polybus.wire.codec import Bad, Publish
from polybus.wire.goms import Close, Event, GomsCodec, Logout, Register, Send


def received(*chunks: bytes, limits: Limits | None = None) -> list[Event]:
    """The events of the chunks, received one by one."""
    codec = GomsCodec(limits or Limits())
    return [event for chunk in chunks for event in codec.receive(chunk)]


def received_by_edge(chunks: Iterable[bytes], limits: Limits) -> list[Event]:
    """The same for a caller that takes the carry and puts it in front of the next chunk."""
    codec = GomsCodec(limits)
    events: list[Event] = []
    carry = b""
    for chunk in chunks:
        events += codec.receive(carry + chunk)
        carry = codec.take_carry()
    return events


Observed = tuple[object, ...]


def seen(events: Sequence[Event]) -> tuple[dict[str, list[bytes]], list[Observed]]:
    """Each topic's values in order, and everything but plain messages in order."""
    values: dict[str, list[bytes]] = {}
    others: list[Observed] = []
    for event in events:
        if isinstance(event, Publish):
            for batch in event.batches:
                values.setdefault(batch.topic, []).extend(batch.values())
        elif isinstance(event, Send):
            for topic in event.topics:
                values.setdefault(topic, []).append(event.value)
            others.append(("send", event.topics, event.value, event.headers, event.ack))
        elif isinstance(event, Bad):
            others.append(("bad", event.error.code))
        else:
            assert isinstance(event, Register | Logout | Close)
            others.append((event,))
    return values, others


def codes(events: Sequence[Event]) -> list[str]:
    """What came of each object: an error's digits, or `ok`."""
    return [
        event.error.code.removeprefix("goms.") if isinstance(event, Bad) else "ok"
        for event in events
    ]


def only_error(*chunks: bytes, limits: Limits | None = None) -> tuple[str, str]:
    """The code and text of the one error the chunks give."""
    (event,) = received(*chunks, limits=limits)
    assert isinstance(event, Bad)
    assert not event.error.final
    return event.error.code.removeprefix("goms."), event.error.text
