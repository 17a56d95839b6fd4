"""Boson on a running bus, frames and properties: one test per promise about their words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from boson_kit import bus, reader, subscribe, writer
from edge_kit import epoch_of, frame, properties, read_properties, until

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer, run_bus

__all__ = ["bus", "reader", "writer"]


def stored(bus: Node, topic: str) -> list[bytes]:
    return [value for batch in bus.bus.log.read(topic, 0) for value in batch.values()]


# One message, many messages


async def test_the_documented_example_is_a_publish(
    bus: Node, reader: ScriptedPeer, writer: ScriptedPeer
) -> None:
    async with run_bus("topic") as other, ScriptedPeer(other.tcp_port) as both:
        await subscribe(both, "topic")
        example = bytes.fromhex("00000005 00 0005 746f706963 68656c6c6f")
        await both.send(example)
        assert await both.read(len(example)) == example


def in_frames(flag: int, topic: str, content: bytes, receipt: str = "") -> bytes:
    return frame(f"{topic}?receipt={receipt}" if receipt else topic, content, flag)


def in_properties(flag: int, topic: str, content: bytes, receipt: str = "") -> bytes:
    pairs = [("hbff", bytes([flag]))] if flag else []
    if receipt:
        pairs.append(("hbfr", receipt.encode()))
    return properties(*pairs, ("topic", topic.encode()), ("content", content))


PARTS = [pytest.param(in_frames, id="frames"), pytest.param(in_properties, id="properties")]
Part = Callable[..., bytes]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("flag", "last", "messages"),
    [
        (1, b"", [b"onetwo"]),
        (1, b"three", [b"onetwothree"]),
        (2, b"", [b"one", b"two"]),
        (2, b"three", [b"one", b"two", b"three"]),
        (3, b"", [b"one", b"two"]),
        (3, b"three", [b"one", b"two", b"three"]),
    ],
)
async def test_parts_are_delivered_as_their_first_flag_says_to_their_first_topic(
    reader: ScriptedPeer,
    writer: ScriptedPeer,
    part: Part,
    flag: int,
    last: bytes,
    messages: list[bytes],
) -> None:
    other_flag = flag % 3 + 1
    await writer.send(part(flag, "news", b"one") + part(other_flag, "sport", b"two"))
    await writer.send(part(0, "", last) + part(0, "sport", b"after"))
    expected = [("news", message) for message in messages] + [("sport", b"after")]
    assert [await reader.read_frame() for _ in expected] == expected


async def test_only_unbuffered_parts_are_delivered_before_the_end(
    reader: ScriptedPeer, writer: ScriptedPeer, bus: Node
) -> None:
    await writer.send(frame("news", b"at once", 3))
    assert await reader.read_frame() == ("news", b"at once")
    async with ScriptedPeer(bus.tcp_port) as waiting:
        await waiting.send(frame("news", b"split", 2) + frame("news", b"more", 2))
        # Requests have their place between parts of other connections.
        await writer.send(frame("news", b"end", 0))
        assert await reader.read_frame() == ("news", b"end")
        await waiting.send(frame("", b"", 0))
        assert [await reader.read_frame(), await reader.read_frame()] == [
            ("news", b"split"),
            ("news", b"more"),
        ]


async def test_the_empty_end_frame_is_seven_zero_bytes(
    reader: ScriptedPeer, writer: ScriptedPeer
) -> None:
    await writer.send(frame("news", b"a", 1) + bytes(7))
    assert await reader.read_frame() == ("news", b"a")


@pytest.mark.parametrize("part", PARTS)
async def test_an_empty_message_outside_a_sequence_is_a_message(
    reader: ScriptedPeer, writer: ScriptedPeer, part: Part
) -> None:
    await writer.send(part(0, "news", b""))
    assert await reader.read_frame() == ("news", b"")


@pytest.mark.parametrize("part", PARTS)
async def test_an_unfinished_sequence_is_dropped_with_its_connection(
    bus: Node, reader: ScriptedPeer, part: Part
) -> None:
    async with ScriptedPeer(bus.tcp_port) as leaving:
        await leaving.send(part(2, "news", b"never") + part(2, "news", b"seen"))
        leaving.send_eof()
        assert await leaving.read_to_end() == b""
    assert stored(bus, "news") == []


async def test_a_message_without_version_first_gets_an_error_and_the_next_is_read(
    reader: ScriptedPeer, writer: ScriptedPeer
) -> None:
    good = properties(("topic", b"news"), ("content", b"x"))
    without = bytes.fromhex("00000001 0005 746f706963 00000004 6e657773")
    await writer.send(good + without + properties(("topic", b"news"), version=b"9.0") + good)
    errors = [(await read_properties(writer))["hbfe"] for _ in range(2)]
    assert errors[0].startswith(b"boson.version-missing ")
    assert errors[1].startswith(b"boson.version-unknown ") and b"9.0" in errors[1]
    assert [await reader.read_frame() for _ in range(2)] == [("news", b"x")] * 2


@pytest.mark.parametrize(
    "version", [b"\x3f\x80\x00\x00", b"1.0", b"1", b"1.7", b"\x3f\x99\x99\x9a"]
)
async def test_every_revision_of_version_one_is_accepted(
    reader: ScriptedPeer, writer: ScriptedPeer, version: bytes
) -> None:
    await writer.send(properties(("topic", b"news"), ("content", b"x"), version=version))
    assert await reader.read_frame() == ("news", b"x")


async def test_a_delivery_in_properties_has_its_parts_in_order(bus: Node) -> None:
    async with ScriptedPeer(bus.tcp_port) as both:
        await both.send(properties(("hbfs", b"news")))
        await both.send(
            properties(("extra", b"1"), ("topic", b"NEWS"), ("other", b"2"), ("content", b"x"))
        )
        position = f"{epoch_of(bus, 'news')}:0".encode()
        expected = properties(
            ("hbfo", position),
            ("topic", b"news"),
            ("content", b"x"),
            ("extra", b"1"),
            ("other", b"2"),
        )
        assert await both.read(len(expected)) == expected


# Topics


async def test_topics_are_lowercased(reader: ScriptedPeer, writer: ScriptedPeer) -> None:
    await writer.send(frame("NEWS", b"a") + frame("News", b"b") + frame("news", b"c"))
    assert [await reader.read_frame() for _ in range(3)] == [
        ("news", b"a"),
        ("news", b"b"),
        ("news", b"c"),
    ]


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        ("nix", "topic.unknown"),
        ("", "topic.empty"),
        ("$system", "topic.reserved"),
        ("x" * 300, "topic.invalid"),
        ("a\nb", "topic.invalid"),
    ],
)
@pytest.mark.parametrize("part", PARTS)
async def test_a_message_to_an_impossible_topic_is_an_error_and_the_connection_stays(
    reader: ScriptedPeer, writer: ScriptedPeer, part: Part, topic: str, code: str
) -> None:
    # The first message shows the protocol: a frame for a long topic looks like properties.
    await writer.send(part(0, "news", b"before") + part(0, topic, b"lost"))
    assert (await error_of(writer, part)).startswith(code + " ")
    await writer.send(part(0, "news", b"after"))
    assert [await reader.read_frame() for _ in range(2)] == [
        ("news", b"before"),
        ("news", b"after"),
    ]


async def test_an_error_about_a_reserved_topic_does_not_have_the_receipt_id(
    writer: ScriptedPeer,
) -> None:
    await writer.send(frame("news", b"first") + frame("$system?receipt=secret", b"lost"))
    assert await writer.read_frame() == (
        "$error",
        b"topic.reserved clients cannot publish to $system",
    )


async def error_of(peer: ScriptedPeer, part: Part) -> str:
    if part is in_properties:
        return (await read_properties(peer))["hbfe"].decode()
    name, content = await peer.read_frame()
    assert name == "$error"
    return content.decode()


@pytest.mark.parametrize("part", PARTS)
async def test_an_empty_topic_is_the_connectors_default(part: Part) -> None:
    connectors = [{"protocol": "tcp", "port": 0, "default-topic": "sport"}]
    async with run_bus("sport", connectors=connectors) as bus:
        async with ScriptedPeer(bus.tcp_port) as reader, ScriptedPeer(bus.tcp_port) as writer:
            await subscribe(reader, "sport")
            await writer.send(part(0, "", b"x") + part(2, "", b"y") + part(0, "news", b""))
            assert [await reader.read_frame() for _ in range(2)] == [
                ("sport", b"x"),
                ("sport", b"y"),
            ]


# Receipts


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("flag", [0, 1, 2, 3])
async def test_a_receipt_covers_all_parts_and_comes_when_they_are_durable(
    bus: Node, writer: ScriptedPeer, part: Part, flag: int
) -> None:
    await writer.send(part(0, "news", b"zeroth"))
    if flag:
        await writer.send(part(flag, "news", b"one", "my id") + part(flag, "news", b"two"))
        await writer.send(part(0, "", b""))
    else:
        await writer.send(part(0, "news", b"one", "my id"))
    last = 2 if flag in (2, 3) else 1
    position = f"{epoch_of(bus, 'news')}:{last}"
    if part is in_properties:
        expected = properties(("hbfr", b"my id"), ("hbfo", position.encode()), ("topic", b"news"))
        assert await writer.read(len(expected)) == expected
    else:
        assert await writer.read_frame() == ("$receipt", f"my id {position}".encode())
    assert bus.bus.log.durable >= bus.bus.log.bounds("news").stop - 1
    assert len(stored(bus, "news")) == last + 1


async def test_receipts_of_many_messages_come_in_order(bus: Node, writer: ScriptedPeer) -> None:
    count = 500
    await writer.send(b"".join(frame(f"news?receipt={n}", b"x") for n in range(count)))
    epoch = epoch_of(bus, "news")
    expected = [("$receipt", f"{n} {epoch}:{n}".encode()) for n in range(count)]
    assert [await writer.read_frame() for _ in range(count)] == expected


async def test_a_refused_message_gets_an_error_and_no_receipt(writer: ScriptedPeer) -> None:
    await writer.send(frame("nix?receipt=1", b"x") + frame("news?receipt=2", b"y"))
    said = {(await writer.read_frame())[0] for _ in range(2)}
    assert said == {"$error", "$receipt"}
    assert await writer.hears_nothing()


@pytest.mark.parametrize("last", [b"", b"last"], ids=["empty end", "end with content"])
@pytest.mark.parametrize("flag", [1, 2, 3])
async def test_the_error_of_refused_parts_names_their_receipt(
    bus: Node, flag: int, last: bytes
) -> None:
    """So a publisher that has many out knows which of them will not come."""
    async with ScriptedPeer(bus.tcp_port) as writer:
        await writer.send(in_properties(flag, "nix", b"one", "my id"))
        await writer.send(in_properties(0, "", last))
        await writer.send(in_properties(0, "news", b"after", "another"))
        told = [await read_properties(writer)]
        while b"another" not in told[-1].values():
            told.append(await read_properties(writer))

        refused = [one for one in told if one.get("hbfr") == b"my id"]
        assert [one["hbfe"].split()[0] for one in refused] == [b"topic.unknown"]
        assert "hbfo" in told[-1]


@pytest.mark.parametrize("last", [b"", b"last"], ids=["empty end", "end with content"])
@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("part", PARTS)
async def test_a_receipt_for_all_parts_is_not_given_if_one_was_refused(
    bus: Node, part: Part, taken: int, last: bytes
) -> None:
    """Parts that are messages at once, to a topic that is gone while some of them come."""
    async with ScriptedPeer(bus.tcp_port) as writer:
        bus.bus.create_topic("fleeting")
        await writer.send(part(3, "fleeting", b"first", "my id") * taken)
        await until(lambda: len(stored(bus, "fleeting")) == taken)
        bus.bus.delete_topic("fleeting")
        await writer.send(part(3, "fleeting", b"lost", "my id"))
        assert (await error_of(writer, part)).startswith("topic.unknown ")
        bus.bus.create_topic("fleeting")
        await writer.send(part(3, "", b"taken") + part(0, "", last))
        await until(lambda: stored(bus, "fleeting") == [b"taken", last][: 1 + bool(last)])

        if part is in_properties:
            denied = await read_properties(writer)
            assert denied["hbfr"] == b"my id"
            assert denied["hbfe"].startswith(b"topic.unknown ")
        # The next one has nothing to do with it.
        await writer.send(part(3, "fleeting", b"x", "another") + part(0, "", b""))
        position = f"{epoch_of(bus, 'fleeting')}:{1 + bool(last)}".encode()
        if part is in_frames:
            assert await writer.read_frame() == ("$receipt", b"another " + position)
        else:
            said = await read_properties(writer)
            assert (said["hbfr"], said["hbfo"]) == (b"another", position)


async def test_a_publisher_that_ends_its_side_still_gets_its_receipts(
    bus: Node, writer: ScriptedPeer
) -> None:
    await writer.send(frame("news?receipt=last", b"x"))
    writer.send_eof()
    receipt = frame("$receipt", f"last {epoch_of(bus, 'news')}:0".encode())
    assert await writer.read_to_end() == receipt
