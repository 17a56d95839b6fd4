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
    bus.when_durable(waiter.receipt)
    assert (bus.receipts_waiting, writer.receipts) == (3, [])
    bus.settle(one)
    assert (writer.receipts, other.receipts, waiter.receipt_calls) == ([first], [], 0)
    bus.settle(two)
    assert other.receipts == [second] and waiter.receipt_calls == 1
    assert bus.receipts_waiting == 0


def test_nobody_overtakes_a_receipt_that_the_loop_has_not_come_to_yet() -> None:
    log = SlowLog(clock=ManualClock(), bytes_max=1 << 20)
    bus = new_bus("news", log=log)
    order: list[str] = []

    class Named(Recorder):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def receipt(self, batches: Sequence[Batch]) -> None:
            order.append(self.name)

    bus.publish([wanting_receipt("news", b"1")], Named("publisher"))
    log.durable_ticket = 1
    bus.when_durable(Named("leaver").receipt)
    assert order == []
    bus.settle(1)
    assert order == ["publisher", "leaver"]


def test_what_is_durable_already_gets_its_receipt_at_once() -> None:
    bus, writer = new_bus("news"), Recorder()
    bus.publish([wanting_receipt("news", b"1")], writer)
    assert len(writer.receipts) == 1


def test_receipts_of_one_publish_come_at_once() -> None:
    log = SlowLog(clock=ManualClock(), bytes_max=1 << 20)
    bus, writer, other = new_bus("news", "sport", log=log), Recorder(), Recorder()
    asked = [wanting_receipt("news", b"1"), wanting_receipt("sport", b"2")]
    ticket = bus.publish([asked[0], Batch.of("news", [b"unasked"]), asked[1]], writer)
    others = [wanting_receipt("news", b"3"), wanting_receipt("sport", b"4")]
    last = bus.publish(others, other)
    assert bus.receipts_waiting == 4
    bus.settle(ticket - 1)
    assert writer.receipts == []
    bus.settle(ticket)
    assert (writer.receipts, writer.receipt_calls, other.receipts) == (asked, 1, [])
    bus.settle(last)
    assert other.receipts == others
    assert (bus.receipts_waiting, bus.receipts_given) == (0, 4)


def test_receipts_are_counted_one_for_each_id_and_signals_are_none() -> None:
    bus = Bus(MemoryLog(clock=ManualClock(), bytes_max=1 << 20), clock_us=ManualClock())
    bus.create_topic("a")
    batch = Batch.of("a", [b"x", b"y", b"z"])
    batch.receipt_ids = array("i", [0, 1, 1, 1, 1, 2])
    bus.publish([batch], Recorder())
    bus.when_durable(Recorder().receipt)
    assert bus.receipts_given == 2
