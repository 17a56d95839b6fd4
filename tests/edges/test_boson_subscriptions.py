"""Boson on a running bus, frames and properties: subscribing, and how subscriptions end."""

from __future__ import annotations

import contextlib

from boson_kit import bus, subscribe, writer
from edge_kit import connected, epoch_of, frame, line, properties, until

from polybus.edges.node import Node
from polybus.testing import ScriptedPeer

__all__ = ["bus", "writer"]


async def test_a_subscribed_publisher_gets_its_own_messages(bus: Node) -> None:
    async with ScriptedPeer(bus.tcp_port) as both:
        await subscribe(both, "news")
        await both.send(frame("news", b"mine") + frame("news?receipt=1", b"mine too"))
        said = [await both.read_frame() for _ in range(3)]
    assert said[:2] == [("news", b"mine"), ("news", b"mine too")]
    assert said[2][0] == "$receipt"


async def test_a_star_means_all_topics_and_those_that_come_to_be(
    bus: Node, writer: ScriptedPeer
) -> None:
    async with ScriptedPeer(bus.tcp_port) as everything:
        await everything.send(frame("$subscribe", b"* tell=position"))
        told = [(await everything.read_frame())[1].partition(b" ")[2] for _ in range(3)]
        assert told == [b"news", b"sport", b"two words"]
        epoch = bus.bus.create_topic("brand-new").epoch
        told_of_new = ("$position", f"{epoch}:0 brand-new".encode())
        assert await everything.read_frame() == told_of_new
        for topic in ("news", "brand-new", "two words"):
            await writer.send(frame(topic, b"x"))
        assert [(await everything.read_frame())[0] for _ in range(3)] == [
            "news",
            "brand-new",
            "two words",
        ]


async def test_unsubscribe_ends_some_or_with_empty_content_all_subscriptions(
    bus: Node, writer: ScriptedPeer
) -> None:
    async with ScriptedPeer(bus.tcp_port) as peer:
        await peer.send(frame("$subscribe", b"*"))
        await subscribed(bus, 3)
        await peer.send(frame("$unsubscribe", b"NEWS\nnix"))
        await subscribed(bus, 2)
        await peer.send(frame("$unsubscribe"))
        await subscribed(bus, 0)
        bus.bus.create_topic("later")
        await writer.send(frame("later", b"x") + frame("sport", b"x"))
        await subscribe(peer, "news")
        await writer.send(frame("news", b"again"))
        assert await peer.read_frame() == ("news", b"again")


async def test_unsubscribing_in_properties_is_the_same(bus: Node) -> None:
    async with ScriptedPeer(bus.tcp_port) as peer:
        await peer.send(properties(("hbfs", b"*")))
        await subscribed(bus, 3)
        await peer.send(properties(("hbfu", b"sport\ntwo words")))
        await subscribed(bus, 1)
        await peer.send(properties(("hbfu", b"")))
        await subscribed(bus, 0)


async def subscribed(bus: Node, count: int) -> None:
    topics = bus.bus.topics()
    await until(lambda: sum(len(topic.subscribers) for topic in topics) == count)


async def test_subscribing_to_what_is_not_there_is_told_and_the_rest_is_done(
    bus: Node, writer: ScriptedPeer
) -> None:
    async with ScriptedPeer(bus.tcp_port) as peer:
        await peer.send(frame("$subscribe", b"nix\nnews from=never\nsport tell=position"))
        said = [await peer.read_frame() for _ in range(3)]
    assert [name for name, _ in said] == ["$error", "$error", "$position"]
    assert said[0][1].startswith(b"topic.unknown ")
    assert said[1][1].startswith(b"position.invalid ")


async def test_subscribing_twice_delivers_once(bus: Node, writer: ScriptedPeer) -> None:
    async with ScriptedPeer(bus.tcp_port) as peer:
        await peer.send(frame("$subscribe", b"news\nnews\n*"))
        await subscribe_again(peer, bus)
        await writer.send(frame("news", b"once") + frame("sport", b"end"))
        assert await peer.read_frame() == ("news", b"once")
        assert await peer.read_frame() == ("sport", b"end")


async def subscribe_again(peer: ScriptedPeer, bus: Node) -> None:
    await peer.send(frame("$subscribe", b"news from=earliest") + frame("$subscribe", b"nix"))
    assert (await peer.read_frame())[0] == "$error"


async def test_deleting_a_topic_ends_its_subscriptions_and_a_new_one_is_another(
    bus: Node, writer: ScriptedPeer
) -> None:
    async with ScriptedPeer(bus.tcp_port) as peer:
        await subscribe(peer, "news")
        first = epoch_of(bus, "news")
        bus.bus.delete_topic("news")
        assert (await peer.read_frame())[1].startswith(b"topic.deleted ")
        await writer.send(frame("news", b"gone"))
        assert (await writer.read_frame())[1].startswith(b"topic.unknown ")
        bus.bus.create_topic("news")
        assert epoch_of(bus, "news") > first
        await subscribe(peer, "news")
        await writer.send(frame("news", b"new"))
        assert await peer.read_frame() == ("news", b"new")


async def test_nobody_stays_subscribed_after_leaving(bus: Node) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for way in ("boson-frames", "boson-properties", "goms-tcp"):
            pipe = await stack.enter_async_context(connected(bus, way))
            request = {
                "boson-frames": frame("$subscribe", b"*"),
                "boson-properties": properties(("hbfs", b"*")),
                "goms-tcp": line("register", topics=["news", "sport", "two words"]),
            }[way]
            await pipe.send(request)
        await subscribed(bus, 9)
    await subscribed(bus, 0)
    await until(lambda: not bus.tcp.connections)
