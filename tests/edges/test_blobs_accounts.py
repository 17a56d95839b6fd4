"""Large payloads of accounts: in the topic that the sender named, and in nobody else's way."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator

import pytest
from accounts_kit import OFF, PASSWORD, SPEAKERS, peer_of
from edge_kit import UdpClient, frame, line, properties, until

from polybus.edges.node import Node
from polybus.references import HEADER
from polybus.testing import run_bus

SMALL = 32 << 10
LARGE = bytes(range(256)) * 600
ID = hashlib.sha256(LARGE).hexdigest()


@contextlib.asynccontextmanager
async def office_and_news() -> AsyncIterator[Node]:
    """`office` has a topic `news`, and may publish to that of `default`."""
    limits = {"inline-bytes-max": SMALL}
    async with run_bus("news", accounts=OFF, limits=limits) as node:
        await node.accounts.create("office", PASSWORD)
        node.bus.create_topic("office/news")
        node.accounts.grant("default", "office", "news", ["publish"])
        yield node


def written(protocol: str, topic: str, flag: int, contents: list[bytes]) -> bytes:
    """A sequence of parts that asks for a receipt; of flag 0, messages of which the last does."""
    name, found = topic.encode(), b""
    for number, content in enumerate(contents, 1):
        is_last = number == len(contents)
        asks = is_last if flag == 0 else number == 1
        part = 0 if is_last else flag
        if protocol == "boson-frames":
            found += frame(f"{topic}?receipt=1" if asks else topic, content, part)
        else:
            pairs = [("hbff", b"%d" % part), ("topic", name), ("content", content)]
            found += properties(*([("hbfr", b"1")] if asks else []), *pairs)
    return found


def stored(node: Node, topic: str) -> list[bytes]:
    """The small values of a topic, and the ids of large ones."""
    found = []
    for batch in node.bus.log.read(topic, 0):
        for value, headers in zip(
            batch.values(), batch.headers or [None] * len(batch), strict=True
        ):
            found.append((headers or {}).get(HEADER, bytes(value)))
    return found


@pytest.mark.parametrize("flag", range(4))
@pytest.mark.parametrize("protocol", ["boson-frames", "boson-properties"])
async def test_a_guests_large_payload_is_in_the_topic_that_it_named(
    protocol: str, flag: int
) -> None:
    speaker = SPEAKERS[protocol]
    async with office_and_news() as node, peer_of(node, speaker, "office") as office:
        contents = [b"a" * 100, LARGE, b"b" * 100]
        await office.send(written(protocol, "default/news", flag, contents))
        assert (await speaker.hear(office))[0] == "receipt"

        whole = b"".join(contents)
        expected = [b"a" * 100, ID.encode(), b"b" * 100]
        if flag == 1:
            expected = [hashlib.sha256(whole).hexdigest().encode()]
        assert stored(node, "news") == expected
        assert stored(node, "office/news") == []
        # Its mark keeps the payload from the next sweep.
        blob_id = next(one for one in expected if len(one) == 64).decode()
        assert node.services.blobs.of_message("news", blob_id).account == "default"


async def test_messages_beside_a_large_one_are_in_the_topics_that_they_name() -> None:
    """In a datagram, which is decoded as a whole."""
    async with office_and_news() as node, UdpClient(node.udp_port) as office:
        await office.send(line("login", user="office", password=PASSWORD))
        assert b"login-ack" in await office.read_line()
        await office.send(line("register", topics=["news"], ack=True))
        assert b"reg-ack" in await office.read_line()
        contents = {"default/news": "first", "news": "x" * (SMALL + 1)}
        sends = [line("send", topics=[topic], data=data) for topic, data in contents.items()]
        await office.send(b"".join(sends))
        await until(lambda: stored(node, "office/news") != [])
        assert stored(node, "news") == [b"first"]
        assert [len(one) for one in stored(node, "office/news")] == [64]
