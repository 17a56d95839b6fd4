"""Limits of message queues, and peers that break their rules."""

from __future__ import annotations

import pytest
from queue_world import PORT, Server, World, tcp_world, world

from polybus.errors import BusyError, PeerError, UsageError
from polybus.queues import QueueLimits

__all__ = ["tcp_world", "world"]


def test_a_full_ring_holds_the_sender_up_and_loses_nothing(world: World) -> None:
    client, server = world.pair(QueueLimits(ring_bytes=7))
    messages = [b"%d" % number * (number % 30) for number in range(200)]

    world.send(client.queue, *messages)
    world.until(lambda: len(server.received_messages) == 200)
    assert server.received_messages == messages


def test_an_outbox_over_its_limit_says_so_and_recovers(world: World) -> None:
    limits = QueueLimits(outbox_bytes_max=100_000)
    client, server = world.pair(limits)

    def flood() -> int:
        count = 0
        while True:
            client.queue.send(b"x" * 1000)
            count += 1

    with pytest.raises(BusyError) as raised:
        world.do(flood)
    assert raised.value.code == "queue.outbox-full"
    world.until(lambda: len(client.sent_messages) == 94)
    world.do(lambda: client.queue.send(b"again"))
    world.until(lambda: len(server.received_messages) == 95)


def test_one_message_larger_than_the_outbox_can_still_be_sent(world: World) -> None:
    client, server = world.pair(QueueLimits(outbox_bytes_max=1000))
    world.do(lambda: client.queue.send(bytes(50_000)))
    world.until(lambda: server.received_messages == [bytes(50_000)])


def test_empty_messages_do_not_escape_the_outbox_limit(world: World) -> None:
    client, _ = world.pair(QueueLimits(outbox_bytes_max=6400))

    def flood() -> None:
        for _ in range(1000):
            client.queue.send(b"")

    with pytest.raises(BusyError):
        world.do(flood)


def test_a_message_over_the_limit_is_refused_here_and_the_queue_goes_on(world: World) -> None:
    client, server = world.pair(QueueLimits(message_bytes_max=1000))
    with pytest.raises(UsageError) as raised:
        world.do(lambda: client.queue.send(bytes(1001)))
    assert raised.value.code == "queue.message-too-large"
    world.do(lambda: client.queue.send(bytes(1000)))
    world.until(lambda: server.received_messages == [bytes(1000)])


def test_a_message_over_the_receivers_limit_closes_its_queue(world: World) -> None:
    server = Server()
    listening = world.broker("server", limits=QueueLimits(message_bytes_max=1000))
    calling = world.broker("client")
    world.do(lambda: listening.bind(PORT, server))
    caller = world.connect(calling, "server")

    world.send(caller.queue, b"good", bytes(1001))
    world.until(lambda: caller.end.closed_count == 1)
    assert server.ends[0].received_messages == [b"good"]
    assert server.ends[0].closed_count == 1
    (error,) = world.errors
    assert isinstance(error, PeerError)
    assert error.code == "queue.message-too-large"


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x80\0\0\0", b"\x7f\xff\xff\xff"])
def test_an_impossible_length_closes_the_queue_and_no_other(
    tcp_world: World, length: bytes
) -> None:
    broker, server = tcp_world.broker("server"), Server()
    tcp_world.do(lambda: broker.bind(PORT, server))
    with tcp_world.raw_peer("server") as peer:
        peer.sendall(b"\0\0\0\2ok" + length + b"more")
        tcp_world.until(lambda: bool(server.ends) and server.ends[0].closed_count == 1)
        assert server.ends[0].received_messages == [b"ok"]
        assert peer.recv(1) == b""
    assert isinstance(tcp_world.errors[0], PeerError)
    other = tcp_world.connect(broker, "server")
    tcp_world.send(other.queue, b"fine")
    tcp_world.until(lambda: len(server.ends) == 2 and server.ends[1].received_messages == [b"fine"])


def test_a_length_and_nothing_else_delivers_nothing_and_ends_with_the_peer(
    tcp_world: World,
) -> None:
    broker, server = tcp_world.broker("server"), Server()
    tcp_world.do(lambda: broker.bind(PORT, server))
    with tcp_world.raw_peer("server") as peer:
        peer.sendall((64 << 20).to_bytes(4, "big"))
        tcp_world.until(lambda: bool(server.ends))
        tcp_world.settle()
        assert server.ends[0].closed_count == 0
    tcp_world.until(lambda: server.ends[0].closed_count == 1)
    assert server.ends[0].received_messages == []
    assert tcp_world.errors == []


def test_a_peer_that_disconnects_inside_a_message_ends_the_queue(tcp_world: World) -> None:
    broker, server = tcp_world.broker("server"), Server()
    tcp_world.do(lambda: broker.bind(PORT, server))
    with tcp_world.raw_peer("server") as peer:
        peer.sendall(b"\0\0\0\1a\0\0\0\5hal")
    tcp_world.until(lambda: bool(server.ends) and server.ends[0].closed_count == 1)
    assert server.ends[0].received_messages == [b"a"]
