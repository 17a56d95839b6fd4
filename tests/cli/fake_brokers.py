"""Brokers of a few lines, enough for the load generator: each delivers what it is published."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass

Deliver = Callable[["re.Match[bytes]"], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """How a protocol looks on the wire, for topics of 10 bytes and payloads of 100."""

    publish: re.Pattern[bytes]
    deliver: Deliver
    hello: tuple[tuple[bytes, bytes], ...] = ()
    """What a client says first, and the answer."""
    receipt: Deliver | None = None


def _pattern(text: bytes) -> re.Pattern[bytes]:
    return re.compile(text, re.DOTALL)


def _jetstream_message(match: re.Match[bytes]) -> bytes:
    return b"MSG %b 1 %b 100\r\n%b\r\n" % match.group(1, 2, 3)


def _jetstream_ack(match: re.Match[bytes]) -> bytes:
    return b'MSG %b 1 28\r\n{"stream":"bench", "seq":32}\r\n' % match[2]


_PONG = (b"PING\r\n", b"INFO {}\r\nPONG\r\n")
_CREATED = (b"PUB $JS.API.STREAM.CREATE.bench ", b"MSG _SETUP.0000 2 2\r\n{}\r\n")

UPGRADED = (b"Upgrade: websocket", b"HTTP/1.1 101 Switching Protocols\r\n\r\n")

SPEECHES = {
    "nats": Speech(
        publish=_pattern(rb"PUB (bench\.\d{4}) 100\r\n(.{100})\r\n"),
        deliver=lambda match: b"MSG %b 1 100\r\n%b\r\n" % match.groups(),
        hello=(_PONG,),
    ),
    "jetstream": Speech(
        publish=_pattern(rb"PUB (bench\.\d{4}) (\S+) 100\r\n(.{100})\r\n"),
        deliver=_jetstream_message,
        hello=(_PONG, _CREATED),
        receipt=_jetstream_ack,
    ),
    "resp": Speech(
        publish=_pattern(rb"PUBLISH\r\n\$10\r\n(.{10})\r\n\$100\r\n(.{100})\r\n"),
        deliver=lambda match: (
            b"*3\r\n$7\r\nmessage\r\n$10\r\n%b\r\n$100\r\n%b\r\n" % match.groups()
        ),
        receipt=lambda match: b":1\r\n",
    ),
    "mqtt": Speech(
        publish=_pattern(rb"\x30\x70\x00\x0a.{110}"),
        deliver=lambda match: match[0],
        hello=((b"\x10", b"\x20\x02\x00\x00"),),
    ),
    "goms": Speech(
        publish=_pattern(rb'\{"messagetype":"send","topics":\["(.{10})"\],"data":"(.{100})"\}\n'),
        deliver=lambda match: (
            b'{"messagetype":"message","topics":["%b"],"data":"%b"}\n' % match.groups()
        ),
        hello=((b'"register"', b'{"messagetype":"reg-ack","topics":[]}\n'),),
    ),
    "broadcast": Speech(
        publish=_pattern(rb'\x81\xf5\0{4}(\["bench\.\d{4}",".{100}"\])'),
        deliver=lambda match: b"\x81\x75" + match[1],
        hello=(UPGRADED,),
    ),
    "boson": Speech(
        publish=_pattern(rb"\0\0\0\x64\0\0\x1b(bench\.\d{4})\?receipt=(.{8})(.{100})"),
        deliver=lambda match: b"\0\0\0\x64\0\0\x0a%b%b" % match.group(1, 3),
        receipt=lambda match: b"\0\0\0\x0c\0\0\x08$receipt%b 1:7" % match[2],
    ),
}


class FakeBroker:
    """Gives every connection that ever subscribes everything anyone publishes.

    `by_topic`: only what is published to a topic that its subscription names.
    """

    def __init__(self, speech: Speech, *, by_topic: bool = False) -> None:
        self._speech = speech
        self._by_topic = by_topic
        self._subscribers: dict[asyncio.StreamWriter, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unread = b""
        while data := await reader.read(1 << 16):
            for said, answer in self._speech.hello:
                if said in data and not self._speech.publish.search(data):
                    writer.write(answer)
            if re.search(rb"SUB bench|SUBSCRIBE|\$subscribe|register|\x82|GET /( |msg)", data):
                self._subscribers[writer] = data
            unread = self._publish(unread + data, writer)
        self._subscribers.pop(writer, None)
        writer.close()

    def _publish(self, data: bytes, sender: asyncio.StreamWriter) -> bytes:
        end = 0
        for match in self._speech.publish.finditer(data):
            end = match.end()
            if self._speech.receipt:
                sender.write(self._speech.receipt(match))
            for subscriber, subscription in self._subscribers.items():
                wanted = not self._by_topic or match[1] in subscription
                if wanted and subscriber is not sender:
                    subscriber.write(self._speech.deliver(match))
        return data[end:]
