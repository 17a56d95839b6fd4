"""Brokers: bind, unbind, connect, on both transports."""

from __future__ import annotations

from functools import partial

import pytest
from queue_world import PORT, Caller, Notes, Server, World, tcp_world, world

from polybus.errors import UsageError
from polybus.queues import MessageQueue, QueueBroker, QueueLimits

__all__ = ["tcp_world", "world"]


def test_a_broker_has_the_name_it_was_given(world: World) -> None:
    assert world.broker("server").name == "server"


def test_a_second_bind_of_a_port_is_false_and_the_first_one_stays(world: World) -> None:
    server = world.broker("server")
    first, second = Server(), Server()
    assert world.do(lambda: server.bind(PORT, first)) is True
    assert world.do(lambda: server.bind(PORT, second)) is False
    world.connect(server, "server")
    world.until(lambda: len(first.queues) == 1)
    assert second.queues == []


def test_unbinding_what_is_not_bound_is_false(world: World) -> None:
    server = world.broker("server")
    assert world.do(lambda: server.unbind(PORT)) is False
    assert world.do(lambda: server.bind(PORT, Server())) is True
    assert world.do(lambda: server.unbind(PORT)) is True
    assert world.do(lambda: server.unbind(PORT)) is False


def test_a_port_can_be_bound_again_after_unbind(world: World) -> None:
    broker, server = world.broker("server"), Server()
    world.do(lambda: broker.bind(PORT, Server()))
    world.do(lambda: broker.unbind(PORT))
    assert world.do(lambda: broker.bind(PORT, server)) is True
    world.connect(broker, "server")
    world.until(lambda: len(server.queues) == 1)


def test_a_connect_after_unbind_is_refused_and_older_queues_stay(world: World) -> None:
    broker, server = world.broker("server"), Server()
    world.do(lambda: broker.bind(PORT, server))
    before = world.connect(broker, "server")
    world.until(lambda: len(server.ends) == 1)
    world.do(lambda: broker.unbind(PORT))
    assert world.connect(broker, "server").refused_count == 1
    world.do(lambda: server.queues[0].send(b"still here"))
    world.until(lambda: before.end.received_messages == [b"still here"])


def test_many_clients_meet_on_one_port(world: World) -> None:
    broker, server = world.broker("server"), Server()
    world.do(lambda: broker.bind(PORT, server))
    clients = [world.broker(f"client {number}") for number in range(50)]
    callers = [Caller() for _ in clients]

    def connect_all() -> None:
        for client, caller in zip(clients, callers, strict=True):
            client.connect("server", PORT, caller)

    world.do(connect_all)
    world.until(lambda: len(server.ends) == 50 and all(caller.done for caller in callers))

    def send_all() -> None:
        for number, caller in enumerate(callers):
            caller.queue.send(b"%d" % number)

    world.do(send_all)
    world.until(lambda: all(end.received_messages for end in server.ends))
    said = sorted(int(message) for end in server.ends for message in end.received_messages)
    assert said == list(range(50))


def test_a_hundred_ports_of_one_broker_each_get_their_own(world: World) -> None:
    broker, client = world.broker("server"), world.broker("client")
    servers = {port: Server() for port in range(100)}
    assert all(world.do(partial(broker.bind, port, server)) for port, server in servers.items())
    for port in servers:
        world.connect(client, "server", port)
    world.until(lambda: all(server.queues for server in servers.values()))
    assert [len(server.queues) for server in servers.values()] == [1] * 100


def test_a_broker_can_connect_to_itself(world: World) -> None:
    broker, server = world.broker("self"), Server()
    world.do(lambda: broker.bind(PORT, server))
    caller = world.connect(broker, "self")
    world.send(caller.queue, b"to me")
    world.until(lambda: bool(server.ends) and server.ends[0].received_messages == [b"to me"])


def test_connected_comes_before_accepted(world: World) -> None:
    order: list[str] = []

    class First(Caller):
        def connected(self, queue: MessageQueue) -> None:
            order.append("connected")
            super().connected(queue)

    class Second(Server):
        def accepted(self, queue: MessageQueue) -> None:
            order.append("accepted")
            super().accepted(queue)

    broker, server = world.broker("server"), Second()
    world.do(lambda: broker.bind(PORT, server))
    for _ in range(10):
        world.connect(broker, "server", caller=First())
    world.until(lambda: len(server.queues) == 10)
    assert order == ["connected", "accepted"] * 10


def test_an_unknown_name_is_refused_at_once_and_the_call_says_false(world: World) -> None:
    client, caller = world.broker("client", connect_timeout_s=60), Caller()
    assert world.do(lambda: client.connect("nobody", PORT, caller)) is False
    world.until(lambda: caller.refused_count == 1)


def test_a_known_name_without_the_port_is_refused(world: World) -> None:
    world.broker("server")
    client, caller = world.broker("client"), Caller()
    assert world.do(lambda: client.connect("server", PORT, caller)) is True
    world.until(lambda: caller.refused_count == 1)
    assert not caller.connected_once


def test_a_connect_waits_for_a_bind_as_long_as_it_may(world: World) -> None:
    broker, client = world.broker("server"), world.broker("client", connect_timeout_s=60)
    caller, server = Caller(), Server()
    world.do(lambda: client.connect("server", PORT, caller))
    world.settle()
    assert not caller.done
    world.do(lambda: broker.bind(PORT, server))
    world.until(lambda: caller.connected_once and len(server.queues) == 1)


def test_a_connect_that_waited_too_long_is_refused_once(world: World) -> None:
    broker, client = world.broker("server"), world.broker("client", connect_timeout_s=0.05)
    caller, server = Caller(), Server()
    world.do(lambda: client.connect("server", PORT, caller))
    world.until(lambda: caller.refused_count == 1)
    world.do(lambda: broker.bind(PORT, server))
    world.settle()
    assert (caller.refused_count, server.queues) == (1, [])


def test_two_brokers_of_one_name_are_an_error(world: World) -> None:
    world.broker("server")
    with pytest.raises(UsageError) as raised:
        world.broker("server")
    assert raised.value.code == "queue.name-taken"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_an_error(world: World, port: int) -> None:
    broker = world.broker("server")
    for call in (
        lambda: broker.bind(port, Server()),
        lambda: broker.unbind(port),
        lambda: broker.connect("server", port, Caller()),
    ):
        with pytest.raises(UsageError) as raised:
            world.do(call)
        assert raised.value.code == "queue.port-invalid"


def test_every_call_from_outside_a_runnable_is_a_clear_error(world: World) -> None:
    broker = world.broker("server")
    queue: MessageQueue = world.pair()[0].queue
    for call in (
        lambda: broker.bind(PORT, Server()),
        lambda: broker.unbind(PORT),
        lambda: broker.connect("server", PORT, Caller()),
        lambda: queue.send(b"no"),
        lambda: queue.set_listener(Notes(queue)),
        lambda: queue.close(),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        assert raised.value.code == "queue.outside-pump"
    assert not queue.closed


def test_connections_over_the_limit_are_refused_or_closed(world: World) -> None:
    limits = QueueLimits(connections_max=4)
    broker, server = world.broker("server", limits=limits), Server()
    world.do(lambda: broker.bind(PORT, server))
    world.connect(broker, "server")
    world.connect(broker, "server")
    world.until(lambda: len(server.queues) == 2)
    third = world.connect(broker, "server")
    assert third.refused_count == 1
    world.settle()
    assert len(server.queues) == 2


def test_a_tcp_port_that_another_program_has_cannot_be_bound(tcp_world: World) -> None:
    broker = tcp_world.broker("server")
    tcp_world.do(lambda: broker.bind(PORT, Server()))
    address = tcp_world.registry.address("server", PORT)
    assert address is not None
    tcp_world.registry.add("other", ports={PORT: address[1]})
    other = QueueBroker("other", tcp_world.pump, transport=tcp_world.transport)
    assert tcp_world.do(lambda: other.bind(PORT, Server())) is False


def test_binding_a_name_the_registry_does_not_know_is_an_error(tcp_world: World) -> None:
    stranger = QueueBroker("stranger", tcp_world.pump, transport=tcp_world.transport)
    with pytest.raises(UsageError) as raised:
        tcp_world.do(lambda: stranger.bind(PORT, Server()))
    assert raised.value.code == "queue.name-unknown"


def test_a_host_this_machine_does_not_have_cannot_be_bound(tcp_world: World) -> None:
    tcp_world.registry.add("far", host="192.0.2.1", ports={PORT: 4000})
    far = QueueBroker("far", tcp_world.pump, transport=tcp_world.transport)
    with pytest.raises(UsageError) as raised:
        tcp_world.do(lambda: far.bind(PORT, Server()))
    assert raised.value.code == "queue.bind-failed"


def test_a_host_name_is_resolved(tcp_world: World) -> None:
    broker, server = tcp_world.broker("server"), Server()
    tcp_world.do(lambda: broker.bind(PORT, server))
    address = tcp_world.registry.address("server", PORT)
    assert address is not None
    tcp_world.registry.add("alias", host="localhost", ports={PORT: address[1]})
    tcp_world.connect(broker, "alias")
    tcp_world.until(lambda: len(server.queues) == 1)


def test_who_connected_before_an_unbind_is_accepted(tcp_world: World) -> None:
    broker, server = tcp_world.broker("server"), Server()
    tcp_world.do(lambda: broker.bind(PORT, server))
    with tcp_world.raw_peer("server"), tcp_world.raw_peer("server"):
        tcp_world.do(lambda: broker.unbind(PORT))
        tcp_world.until(lambda: len(server.queues) == 2)
