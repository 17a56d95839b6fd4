"""Receipts: in order, once all before them is durable, and counted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from bus_kit import Recorder, SlowLog, new_bus, wanting_receipt

from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.log.memory import MemoryLog
from polybus.testing import ManualClock


def test_receipts_come_in_order_once_all_before_them_is_durable() -> None:
    log = SlowLog(clock=ManualClock(), bytes_max=1 << 20)
    bus, writer, other = new_bus("news", log=log), Recorder(), Recorder()
    first, second = wanting_receipt("news", b"1"), wanting_receipt("news", b"2")
    one = bus.publish([first], writer)
    two = bus.publish([second], other)
    waiter = Recorder()
    bus.when_all_durable(waiter)
    assert (bus.receipts.waiting, writer.receipts) == (3, [])
    bus.settle(one)
    assert (writer.receipts, other.receipts, waiter.receipts) == ([first], [], [])
    bus.settle(two)
    assert other.receipts == [second] and len(waiter.receipts) == 1
    assert bus.receipts.waiting == 0


def test_nobody_overtakes_a_receipt_that_the_loop_has_not_come_to_yet() -> None:
    log = SlowLog(clock=ManualClock(), bytes_max=1 << 20)
    bus = new_bus("news", log=log)
    order: list[str] = []

    class Named(Recorder):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def receipt(self, batch: Batch) -> None:
            order.append(self.name)

    bus.publish([wanting_receipt("news", b"1")], Named("publisher"))
    log.durable_ticket = 1
    bus.when_all_durable(Named("leaver"))
    assert order == []
    bus.settle(1)
    assert order == ["publisher", "leaver"]


def test_what_is_durable_already_gets_its_receipt_at_once() -> None:
    bus, writer = new_bus("news"), Recorder()
    bus.publish([wanting_receipt("news", b"1")], writer)
    assert len(writer.receipts) == 1


def test_receipts_of_one_publish_come_at_once_to_those_who_take_many() -> None:
    class Many(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.many: list[list[Batch]] = []

        def receipt_all(self, batches: Sequence[Batch]) -> None:
            self.many.append(list(batches))

    log = SlowLog(clock=ManualClock(), bytes_max=1 << 20)
    bus, many, plain = new_bus("news", "sport", log=log), Many(), Recorder()
    asked = [wanting_receipt("news", b"1"), wanting_receipt("sport", b"2")]
    ticket = bus.publish([asked[0], Batch.of("news", [b"unasked"]), asked[1]], many)
    others = [wanting_receipt("news", b"3"), wanting_receipt("sport", b"4")]
    last = bus.publish(others, plain)
    assert bus.receipts.waiting == 4
    bus.settle(ticket - 1)
    assert many.many == []
    bus.settle(ticket)
    assert (many.many, many.receipts, plain.receipts) == ([asked], [], [])
    bus.settle(last)
    assert plain.receipts == others
    assert (bus.receipts.waiting, bus.receipts.given) == (0, 4)


def test_receipts_are_counted_one_for_each_id_and_signals_are_none() -> None:
    bus = Bus(MemoryLog(clock=ManualClock(), bytes_max=1 << 20), clock_us=ManualClock())
    bus.create_topic("a")
    batch = Batch.of("a", [b"x", b"y", b"z"])
    batch.receipt_ids = array("i", [0, 1, 1, 1, 1, 2])
    bus.publish([batch], Recorder())
    bus.when_all_durable(Recorder())
    assert bus.receipts.given == 2
