"""Channels: read and write actions that end once, on both transports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from queue_world import PORT, World, tcp_world, world

from polybus.batch import Buffer
from polybus.errors import BusyError, UsageError
from polybus.queues import (
    Broker,
    Channel,
    ChannelAcceptListener,
    ChannelConnectListener,
    ChannelListener,
    QueueLimits,
)
from polybus.queues.channel import CHANNEL_STATES, ChannelState
from polybus.queues.tcp import TcpChannel

__all__ = ["tcp_world", "world"]


class Log(ChannelListener):
    def __init__(self) -> None:
        self.was_read: list[bytes] = []
        self.was_written: list[bytes] = []
        self.disconnected_count = 0

    def read(self, data: Buffer) -> None:
        assert isinstance(data, bytes)
        self.was_read.append(data)

    def wrote(self, data: Buffer) -> None:
        self.was_written.append(bytes(data))

    def disconnected(self) -> None:
        self.disconnected_count += 1


class Ends(ChannelAcceptListener, ChannelConnectListener):
    def __init__(self) -> None:
        self.ours: list[Channel] = []
        self.theirs: list[Channel] = []
        self.refused_count = 0

    def accepted(self, channel: Channel) -> None:
        self.theirs.append(channel)

    def connected(self, channel: Channel) -> None:
        self.ours.append(channel)

    def refused(self) -> None:
        self.refused_count += 1


def pair(world: World, limits: QueueLimits | None = None) -> tuple[Channel, Log, Channel, Log]:
    world.registry.add("channels", any_port=True)
    broker = Broker("channels", world.pump, transport=world.transport, limits=limits)
    ends = Ends()
    assert broker.name == "channels"
    world.do(lambda: broker.bind(PORT, ends))
    world.do(lambda: broker.connect("channels", PORT, ends))
    world.until(lambda: bool(ends.ours and ends.theirs))
    ours, theirs = Log(), Log()
    world.do(lambda: ends.ours[0].set_listener(ours))
    world.do(lambda: ends.theirs[0].set_listener(theirs))
    return ends.ours[0], ours, ends.theirs[0], theirs


def test_a_read_goes_on_until_its_bytes_are_there(world: World) -> None:
    ours, _, theirs, log = pair(world)
    world.do(lambda: theirs.read(10))
    for piece in (b"0123", b"45", b"6789abc"):
        world.do(lambda piece=piece: ours.write(piece))  # type: ignore[misc]
        world.settle()
    assert log.was_read == [b"0123456789"]
    world.do(lambda: theirs.read(3))
    world.until(lambda: log.was_read == [b"0123456789", b"abc"])


def test_reads_end_in_the_order_they_were_given(world: World) -> None:
    ours, _, theirs, log = pair(world)

    def read_all() -> None:
        for size in (1, 2, 3):
            theirs.read(size)

    world.do(read_all)
    world.do(lambda: ours.write(b"abbccc"))
    world.until(lambda: log.was_read == [b"a", b"bb", b"ccc"])


def test_a_read_content_with_less_takes_what_is_there(world: World) -> None:
    ours, _, theirs, log = pair(world)
    world.do(lambda: ours.write(b"abc"))
    world.do(lambda: theirs.read(100, at_least=2))
    world.until(lambda: log.was_read == [b"abc"])


def test_a_write_larger_than_any_buffer_goes_on_by_itself(world: World) -> None:
    ours, log, theirs, reader = pair(world, QueueLimits(ring_bytes=1000))
    big = bytes(range(256)) * 80_000
    world.do(lambda: ours.write(big))
    world.settle()
    assert log.was_written == []
    world.do(lambda: theirs.read(len(big)))
    world.until(lambda: bool(reader.was_read))
    assert reader.was_read == [big]
    assert log.was_written == [big]


def test_an_empty_write_ends_in_its_turn(world: World) -> None:
    ours, log, theirs, reader = pair(world)

    def write_all() -> None:
        for data in (b"", b"a", b"", b"b", b""):
            ours.write(data)

    world.do(write_all)
    world.do(lambda: theirs.read(2))
    world.until(lambda: reader.was_read == [b"ab"])
    world.until(lambda: log.was_written == [b"", b"a", b"", b"b", b""])


def test_more_writes_than_go_in_one_piece_keep_their_order(world: World) -> None:
    ours, log, theirs, reader = pair(world, QueueLimits(ring_bytes=100))
    pieces = [b"%04d" % number for number in range(300)]

    def write_all() -> None:
        for piece in pieces:
            ours.write(piece)
        theirs.read(1200)

    world.do(write_all)
    world.until(lambda: reader.was_read == [b"".join(pieces)])
    assert log.was_written == pieces


def test_a_disconnect_ends_pending_actions_without_a_result(world: World) -> None:
    ours, log, _, reader = pair(world)

    def act() -> None:
        ours.read(5)
        ours.write(bytes(100))
        ours.disconnect()
        ours.disconnect()

    world.do(act)
    world.until(lambda: log.disconnected_count == 1)
    world.settle()
    assert (log.was_read, log.was_written, reader.was_read) == ([], [], [])
    assert ours.disconnected
    for call in (lambda: ours.read(1), lambda: ours.write(b"x")):
        with pytest.raises(UsageError) as raised:
            world.do(call)
        assert raised.value.code == "queue.closed"


def test_after_a_remote_disconnect_what_arrived_is_read_and_then_it_is_over(world: World) -> None:
    ours, log, theirs, reader = pair(world)
    world.do(lambda: ours.write(b"abcdef"))
    world.until(lambda: log.was_written == [b"abcdef"])
    world.do(ours.disconnect)
    world.do(lambda: theirs.read(4))
    world.until(lambda: reader.was_read == [b"abcd"])
    assert reader.disconnected_count == 0
    world.do(lambda: theirs.read(4))
    world.until(lambda: reader.disconnected_count == 1)
    assert reader.was_read == [b"abcd"]
    world.do(lambda: theirs.read(1))
    world.do(lambda: theirs.write(b"dropped"))
    world.until(lambda: reader.was_written == [b"dropped"])
    assert reader.disconnected_count == 1


def test_a_listener_that_writes_for_ever_to_a_closed_end_does_not_stop_the_pump(
    world: World,
) -> None:
    ours, _, theirs, _ = pair(world)

    class Endless(Log):
        def wrote(self, data: Buffer) -> None:
            super().wrote(data)
            ours.write(b"again")

    endless = Endless()
    world.do(theirs.disconnect)
    world.do(lambda: ours.set_listener(endless))
    world.do(lambda: ours.write(b"first"))
    world.until(lambda: len(endless.was_written) > 50)
    assert len(endless.was_written) < 1000, "the pump had no turn in between"
    world.do(ours.disconnect)


def test_a_disconnect_while_the_end_is_told_of_dropped_writes_is_heard_once(world: World) -> None:
    ours, _, theirs, _ = pair(world, QueueLimits(ring_bytes=10))

    class Leaves(Log):
        def wrote(self, data: Buffer) -> None:
            super().wrote(data)
            ours.disconnect()

    leaves = Leaves()
    world.do(lambda: ours.set_listener(leaves))
    world.do(lambda: ours.write(bytes(30 << 20)))
    world.do(lambda: ours.read(1))
    world.do(theirs.disconnect)
    world.until(lambda: leaves.disconnected_count == 1)
    world.settle()
    assert leaves.disconnected_count == 1


@pytest.mark.parametrize(("size", "at_least"), [(0, None), (-1, None), (4, 0), (4, 5)])
def test_a_read_of_nothing_is_refused(world: World, size: int, at_least: int | None) -> None:
    ours, _, _, _ = pair(world)
    with pytest.raises(UsageError) as raised:
        world.do(lambda: ours.read(size, at_least=at_least))
    assert raised.value.code == "queue.read-size"


def test_actions_over_the_limit_are_refused(world: World) -> None:
    ours, _, _, _ = pair(world, QueueLimits(actions_max=2))

    def write_three() -> None:
        for _ in range(3):
            ours.write(b"x")

    with pytest.raises(BusyError) as raised:
        world.do(write_three)
    assert raised.value.code == "queue.actions-full"


def test_a_channel_lives_by_its_table(world: World) -> None:
    ours, _, theirs, _ = pair(world)
    world.do(theirs.disconnect)
    assert theirs._state is CHANNEL_STATES[ChannelState.OPEN, "disconnect"]
    world.do(lambda: ours.read(1))
    world.until(
        lambda: ours._state is CHANNEL_STATES[ChannelState.OPEN, "the end of the stream is read"]
    )
    world.do(ours.disconnect)
    assert ours._state is CHANNEL_STATES[ChannelState.ENDED, "disconnect"]


def test_a_write_to_a_closed_end_is_dropped_and_the_end_still_read(world: World) -> None:
    ours, log, theirs, writer = pair(world)
    world.do(lambda: theirs.write(b"last words"))
    world.until(lambda: writer.was_written == [b"last words"])
    world.do(theirs.disconnect)

    def writes_until_dropped() -> bool:
        world.do(lambda: ours.write(b"x"))
        return ours._state is CHANNEL_STATES[ChannelState.OPEN, "a write meets a closed end"]

    if world.kind == "local":
        world.until(writes_until_dropped)
    world.do(lambda: ours.read(10))
    world.until(lambda: log.was_read == [b"last words"])
    world.do(lambda: ours.read(10))
    world.until(
        lambda: (
            ours._state is CHANNEL_STATES[ChannelState.DROPPING, "the end of the stream is read"]
        )
    )


def test_a_channel_refuses_calls_from_outside(world: World) -> None:
    ours, log, _, _ = pair(world)
    calls: list[Callable[[], None]] = [
        lambda: ours.read(1),
        lambda: ours.write(b"x"),
        lambda: ours.set_listener(log),
        ours.disconnect,
    ]
    for call in calls:
        with pytest.raises(UsageError) as raised:
            call()
        assert raised.value.code == "queue.outside-pump"


def test_a_stuck_write_ends_when_the_other_end_leaves_though_nobody_reads(world: World) -> None:
    ours, log, theirs, _ = pair(world)
    world.do(lambda: ours.write(bytes(30 << 20)))
    world.settle()
    assert log.was_written == []
    world.do(theirs.disconnect)
    world.until(lambda: len(log.was_written) == 1)


def test_an_idle_tcp_channel_is_not_watched(tcp_world: World) -> None:
    """A socket that is watched for what nobody waits for keeps the loop busy forever."""
    ours, log, theirs, reader = pair(tcp_world)
    big = bytes(30 << 20)
    tcp_world.do(lambda: ours.write(big))
    tcp_world.do(lambda: theirs.read(len(big)))
    tcp_world.until(lambda: len(log.was_written) == 1 and len(reader.was_read) == 1)
    tcp_world.do(lambda: ours.write(b"nobody reads this"))
    tcp_world.settle()
    assert isinstance(ours, TcpChannel)
    assert isinstance(theirs, TcpChannel)
    assert not ours._watches_writes
    assert not theirs._watches_reads
