"""Closed message queues: heard once at both ends, and what was sent before still arrives."""

from __future__ import annotations

import pytest
from queue_world import PORT, Notes, Server, World, tcp_world, world

from polybus.errors import UsageError
from polybus.queues import QueueLimits

__all__ = ["tcp_world", "world"]


def test_a_close_is_heard_once_at_both_ends(world: World) -> None:
    client, server = world.pair()
    world.do(lambda: client.queue.close())
    assert client.queue.closed
    world.until(lambda: server.closed_count == 1 and client.closed_count == 1)
    assert server.queue.closed
    world.do(lambda: client.queue.close())
    world.do(lambda: server.queue.close())
    world.settle()
    assert (client.closed_count, server.closed_count) == (1, 1)


def test_after_a_local_close_every_action_is_refused(world: World) -> None:
    client, _ = world.pair()
    world.do(lambda: client.queue.close())
    for call in (lambda: client.queue.send(b"late"), lambda: client.queue.set_listener(client)):
        with pytest.raises(UsageError) as raised:
            world.do(call)
        assert raised.value.code == "queue.closed"


def test_nothing_is_delivered_or_sent_after_a_local_close(world: World) -> None:
    client, server = world.pair()

    def both() -> None:
        for number in range(100):
            server.queue.send(b"%d" % number)
            client.queue.send(b"%d" % number)
        client.queue.close()

    world.do(both)
    world.until(lambda: server.closed_count == 1)
    world.settle()
    assert client.received_messages == []
    assert client.sent_messages == []
    assert server.received_messages == []


def test_a_close_in_the_middle_of_a_batch_ends_the_rest_of_it(world: World) -> None:
    class Fickle(Notes):
        def received(self, message: bytes) -> None:
            super().received(message)
            if message == b"3":
                self.queue.close()

    broker, server = world.broker("server"), Server(Fickle)
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "server")

    world.send(caller.queue, *(b"%d" % number for number in range(10)))
    world.until(lambda: caller.end.closed_count == 1)
    assert server.ends[0].received_messages == [b"0", b"1", b"2", b"3"]
    assert server.ends[0].closed_count == 1


def test_what_was_sent_before_a_remote_close_can_still_be_read(world: World) -> None:
    broker, server = world.broker("server"), Server(listen=None)
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "server")
    messages = [b"1", b"x" * 50_000, b"", b"4"]

    world.send(caller.queue, *messages)
    world.until(lambda: caller.end.sent_messages == messages)
    world.do(caller.queue.close)
    world.until(lambda: len(server.queues) == 1)
    end = Notes(server.queues[0])
    world.do(lambda: server.queues[0].set_listener(end))
    world.until(lambda: end.closed_count == 1)
    assert end.received_messages == messages
    assert end.after_closed == []


def test_a_close_with_unread_messages_does_not_take_back_what_was_sent(world: World) -> None:
    """Over TCP a socket closed with unread bytes would reset the connection."""
    client, server = world.pair()

    def cross() -> None:
        server.queue.send(b"x" * 100_000)
        client.queue.send(b"y" * 100_000)

    class CloseWhenSent(Notes):
        def sent(self, message: bytes) -> None:
            super().sent(message)
            self.queue.close()

    closing = CloseWhenSent(client.queue)
    world.do(lambda: client.queue.set_listener(closing))
    world.do(cross)
    world.until(lambda: server.closed_count == 1)
    assert server.received_messages == [b"y" * 100_000]


def test_after_a_remote_close_sends_are_dropped_and_called_sent(world: World) -> None:
    client, server = world.pair()
    world.do(lambda: server.queue.close())
    world.until(lambda: client.closed_count == 1)
    messages = [b"a", b"b" * 100_000, b""]
    for message in messages:
        world.send(client.queue, message)
    world.until(lambda: client.sent_messages == messages)
    assert world.errors == []


def test_a_remote_close_in_the_middle_of_a_send_ends_it_silently(world: World) -> None:
    """The receiver reads nothing, so the message is stuck half-way when it closes."""
    broker, server = world.broker("server"), Server(listen=None)
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "server")
    world.until(lambda: len(server.queues) == 1)
    big = bytes(30 << 20)

    world.send(caller.queue, big, b"after")
    world.settle()
    assert caller.end.sent_messages == []
    world.do(lambda: server.queues[0].close())
    world.until(lambda: caller.end.closed_count == 1)
    assert [len(message) for message in caller.end.sent_messages] == [len(big), 5]
    assert world.errors == []


def test_a_local_close_in_the_middle_of_a_send_gives_the_receiver_no_part_of_it(
    world: World,
) -> None:
    broker, server = world.broker("server"), Server(listen=None)
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "server")
    world.until(lambda: len(server.queues) == 1)

    world.send(caller.queue, b"whole", bytes(30 << 20))
    world.until(lambda: caller.end.sent_messages == [b"whole"])
    world.do(caller.queue.close)
    end = Notes(server.queues[0])
    world.do(lambda: server.queues[0].set_listener(end))
    world.until(lambda: end.closed_count == 1)
    assert end.received_messages == [b"whole"]


def test_a_peer_that_never_reads_keeps_a_closed_queue_only_for_a_while(tcp_world: World) -> None:
    broker = tcp_world.broker("server", limits=QueueLimits(linger_s=0.05))
    server = Server()
    tcp_world.do(lambda: broker.bind(PORT, server))
    with tcp_world.raw_peer("server") as peer:
        tcp_world.until(lambda: bool(server.ends))
        tcp_world.do(lambda: server.queues[0].close())
        assert peer.recv(1) == b""

        def is_reset() -> bool:
            try:
                peer.sendall(b"anyone?")
            except OSError:
                return True
            return False

        tcp_world.until(is_reset)


def test_a_close_with_unread_bytes_does_not_reset_what_is_on_its_way(tcp_world: World) -> None:
    broker, server = tcp_world.broker("server"), Server()
    tcp_world.do(lambda: broker.bind(PORT, server))
    message = bytes(1 << 20)
    with tcp_world.raw_peer("server") as peer:
        tcp_world.until(lambda: bool(server.ends))
        tcp_world.send(server.queues[0], message)
        tcp_world.until(lambda: server.ends[0].sent_messages == [message])
        peer.sendall(b"\0\0\0\6unread")
        tcp_world.do(server.queues[0].close)
        assert server.ends[0].received_messages == []
        received = b""
        while piece := peer.recv(1 << 20):
            received += piece
    assert len(received) == 4 + len(message)
