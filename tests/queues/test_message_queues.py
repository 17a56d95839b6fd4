"""Message queues: order, sizes, closing, limits, on both transports."""

from __future__ import annotations

from functools import partial

import pytest
from queue_world import PORT, Caller, Notes, Server, World, tcp_world, world

from polybus.errors import BusyError, PeerError, UsageError
from polybus.queues import MessageQueue, QueueLimits
from polybus.queues.message_queue import RUN_BYTES_MAX, SENDING, SMALL_BYTES_MAX, Sending

__all__ = ["tcp_world", "world"]


@pytest.mark.parametrize("size", [0, 1, 360, SMALL_BYTES_MAX, SMALL_BYTES_MAX + 1, 2_000_000])
def test_a_message_of_any_size_arrives_whole(world: World, size: int) -> None:
    client, server = world.pair()
    message = bytes(range(251)) * (size // 251 + 1)
    message = message[:size]
    world.do(lambda: client.queue.send(message))
    world.until(lambda: server.received_messages == [message])
    assert client.sent_messages == [message]


def test_messages_of_all_sizes_keep_their_order_both_ways(world: World) -> None:
    client, server = world.pair()
    sizes = [0, 10, 70_000, 0, 5, 300_000, 1, RUN_BYTES_MAX, 2, 40_000, 40_000, 3] * 3
    messages = [b"%d:" % number + bytes(size) for number, size in enumerate(sizes)]

    def send_all() -> None:
        for message in messages:
            client.queue.send(message)
            server.queue.send(message)

    world.do(send_all)
    world.until(lambda: len(server.received_messages) == len(client.received_messages) == 36)
    assert server.received_messages == client.received_messages == messages
    assert server.sent_messages == client.sent_messages == messages


def test_many_small_messages_of_one_turn_arrive_in_order(world: World) -> None:
    client, server = world.pair()
    messages = [b"%d" % number for number in range(50_000)]

    world.send(client.queue, *messages)
    world.until(lambda: len(server.received_messages) >= 50_000)
    assert server.received_messages == messages
    world.until(lambda: client.sent_messages == messages)


def test_two_senders_on_one_queue_keep_their_order(world: World) -> None:
    client, server = world.pair()
    for number in range(20):
        world.task.post(partial(client.queue.send, b"a%d" % number))
        world.task.post(partial(client.queue.send, b"b%d" % number))
    world.until(lambda: len(server.received_messages) == 40)
    assert server.received_messages == [
        b"%c%d" % (who, number) for number in range(20) for who in b"ab"
    ]


def test_messages_before_a_listener_wait_for_it(world: World) -> None:
    broker, server = world.broker("server"), Server(listen=None)
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "server")
    messages = [b"x" * size for size in (3, 100_000, 0, 900_000)]

    world.send(caller.queue, *messages)
    world.until(lambda: len(server.queues) == 1)
    world.settle()
    end = Notes(server.queues[0])
    world.do(lambda: server.queues[0].set_listener(end))
    world.until(lambda: end.received_messages == messages)


def test_a_new_listener_hears_what_comes_after_it(world: World) -> None:
    client, server = world.pair()
    world.do(lambda: client.queue.send(b"first"))
    world.until(lambda: server.received_messages == [b"first"])
    other = Notes(server.queue)
    world.do(lambda: server.queue.set_listener(other))
    world.do(lambda: client.queue.send(b"second"))
    world.until(lambda: other.received_messages == [b"second"])
    assert server.received_messages == [b"first"]


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


def test_what_is_not_bytes_is_refused_and_what_changes_is_copied(world: World) -> None:
    client, server = world.pair()
    with pytest.raises(UsageError) as raised:
        world.do(lambda: client.queue.send("text"))  # type: ignore[arg-type]
    assert raised.value.code == "queue.message-type"
    changing = bytearray(b"before")

    def send() -> None:
        client.queue.send(changing)
        changing[:] = b"after!"

    world.do(send)
    world.until(lambda: server.received_messages == [b"before"])


def test_a_listener_that_raises_is_reported_and_hears_the_next_message(world: World) -> None:
    class Clumsy(Notes):
        def received(self, message: bytes) -> None:
            super().received(message)
            raise ValueError(message)

        def sent(self, message: bytes) -> None:
            super().sent(message)
            raise KeyError(message)

        def closed(self) -> None:
            super().closed()
            raise OSError("closed")

    broker, server = world.broker("server"), Server(Clumsy)
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "server", caller=Caller(Clumsy))

    world.send(caller.queue, *(b"1", b"2", b"3"))
    world.until(lambda: bool(server.ends) and len(server.ends[0].received_messages) == 3)
    world.do(lambda: server.queues[0].close())
    world.until(lambda: caller.end.closed_count == 1)
    world.until(lambda: server.ends[0].closed_count == 1)
    kinds = sorted(type(error).__name__ for error in world.errors)
    assert kinds == ["KeyError"] * 3 + ["OSError"] * 2 + ["ValueError"] * 3


def test_an_accept_or_connect_listener_that_raises_is_reported(world: World) -> None:
    class Clumsy(Server):
        def accepted(self, queue: MessageQueue) -> None:
            super().accepted(queue)
            raise ValueError("accepted")

    class ClumsyCaller(Caller):
        def connected(self, queue: MessageQueue) -> None:
            super().connected(queue)
            raise ValueError("connected")

    broker, server = world.broker("server"), Clumsy()
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "server", caller=ClumsyCaller())
    world.until(lambda: len(world.errors) == 2)
    world.send(caller.queue, b"works")
    world.until(lambda: server.ends[0].received_messages == [b"works"])


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


def test_sending_goes_by_its_table(world: World) -> None:
    """Each row of the table, seen from the outside: what is sent when a close comes."""
    assert {state for state, _ in SENDING} == {Sending.LENGTH, Sending.MESSAGE}
    assert all(
        SENDING[state, "close"] is Sending.CLOSED for state in (Sending.LENGTH, Sending.MESSAGE)
    )
    client, server = world.pair()
    large = bytes(SMALL_BYTES_MAX + 1)
    states: list[Sending] = []

    class Watch(Notes):
        def sent(self, message: bytes) -> None:
            super().sent(message)
            states.append(client.queue._sending)

    world.do(lambda: client.queue.set_listener(Watch(client.queue)))
    world.send(client.queue, b"a", large, b"b")
    world.until(lambda: server.received_messages == [b"a", large, b"b"])
    assert states == [Sending.LENGTH] * 3
    client.queue._runs.append([large])
    client.queue.wrote(b"\0\0\x80\1")
    assert client.queue._sending is SENDING[Sending.LENGTH, "a large message's length is written"]
    world.do(lambda: client.queue.wrote(large))
    assert client.queue._sending is SENDING[Sending.MESSAGE, "the message is written"]
    world.do(lambda: client.queue.close())
    assert client.queue._sending is SENDING[Sending.LENGTH, "close"]


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
