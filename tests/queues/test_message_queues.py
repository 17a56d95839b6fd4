"""Message queues: order, sizes and listeners, on both transports."""

from __future__ import annotations

from functools import partial

import pytest
from queue_world import PORT, Caller, Notes, Server, World, world

from polybus.errors import UsageError
from polybus.queues import MessageQueue
from polybus.queues.message_queue import RUN_BYTES_MAX, SENDING, SMALL_BYTES_MAX, Sending

__all__ = ["world"]


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
