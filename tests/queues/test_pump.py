"""The event pump: order, errors, starting and stopping, its own loop and another's."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from polybus.errors import BusyError, UsageError
from polybus.queues import EventPump, QueueBroker, Registry, Task, TcpTransport
from polybus.queues.broker import AcceptListener


def test_runnables_run_in_the_order_they_were_posted() -> None:
    pump, ran = EventPump(), list[int]()
    tasks = [Task(pump), Task(pump)]
    for number in range(10):
        tasks[number % 2].post(lambda number=number: ran.append(number))  # type: ignore[misc]
    tasks[0].post(pump.stop)
    pump.run()
    assert ran == list(range(10))


def test_what_a_runnable_posts_runs_after_what_was_posted_before() -> None:
    pump, ran = EventPump(), list[str]()
    task = Task(pump)

    def first() -> None:
        ran.append("first")
        task.post(lambda: ran.append("third"))
        task.post(pump.stop)

    task.post(first)
    task.post(lambda: ran.append("second"))
    pump.run()
    assert ran == ["first", "second", "third"]


def test_a_runnable_that_raises_goes_to_its_tasks_handler_and_the_next_one_runs() -> None:
    pump = EventPump()
    mine: list[Exception] = []
    others: list[Exception] = []
    task, other = Task(pump, mine.append), Task(pump, others.append)
    failure = ValueError("no")

    def fail() -> None:
        raise failure

    task.post(fail)
    other.post(pump.stop)
    pump.run()
    assert (mine, others) == ([failure], [])


def test_without_a_handler_or_with_one_that_fails_the_error_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def worse(error: Exception) -> None:
        raise RuntimeError("worse")

    def fail() -> None:
        raise ValueError("bad")

    pump = EventPump()
    Task(pump).post(fail)
    Task(pump, worse).post(fail)
    Task(pump).post(pump.stop)
    with caplog.at_level(logging.ERROR, logger="polybus.queues"):
        pump.run()
    assert ["bad" in record.message for record in caplog.records] == [True, False]
    assert "worse" in caplog.records[1].message


def test_a_stop_ends_the_pump_before_the_next_runnable() -> None:
    pump, ran = EventPump(), list[str]()
    task = Task(pump)
    task.post(pump.stop)
    task.post(lambda: ran.append("too late"))
    pump.run()
    assert ran == []


def test_a_stop_before_the_run_ends_it_at_once() -> None:
    pump, ran = EventPump(), list[str]()
    Task(pump).post(lambda: ran.append("never"))
    pump.stop()
    pump.run()
    assert ran == []


def test_a_pump_runs_once() -> None:
    pump = EventPump()
    Task(pump).post(pump.stop)
    pump.run()
    with pytest.raises(UsageError) as raised:
        pump.run()
    assert raised.value.code == "queue.pump-running"


def test_a_stopped_pump_takes_no_runnables() -> None:
    pump = EventPump()
    pump.stop()
    pump.stop()
    with pytest.raises(UsageError) as raised:
        Task(pump).post(lambda: None)
    assert raised.value.code == "queue.pump-stopped"


def test_a_full_pump_says_so_and_takes_nothing() -> None:
    pump, ran = EventPump(runnables_max=2), list[int]()
    task = Task(pump)
    task.post(lambda: ran.append(1))
    task.post(pump.stop)
    with pytest.raises(BusyError) as raised:
        task.post(lambda: ran.append(2))
    assert raised.value.code == "queue.pump-full"
    pump.run()
    assert ran == [1]


def test_other_threads_may_post_and_stop() -> None:
    pump, ran = EventPump(), list[int]()
    task = Task(pump)
    runner = threading.Thread(target=pump.run)
    runner.start()
    for number in range(1000):
        task.post(lambda number=number: ran.append(number))  # type: ignore[misc]
    task.post(pump.stop)
    runner.join(10)
    assert not runner.is_alive()
    assert ran == list(range(1000))


def test_an_idle_pump_is_stopped_from_another_thread() -> None:
    pump = EventPump()
    running = threading.Event()
    Task(pump).post(running.set)
    runner = threading.Thread(target=pump.run)
    runner.start()
    assert running.wait(10)
    pump.stop()
    runner.join(10)
    assert not runner.is_alive()


def test_a_call_from_another_thread_is_refused_while_a_runnable_runs() -> None:
    pump = EventPump()
    broker = QueueBroker("broker", pump)
    codes: list[str] = []

    def elsewhere() -> None:
        try:
            broker.unbind(1)
        except UsageError as error:
            codes.append(error.code)

    def run() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        pump.stop()

    Task(pump).post(run)
    pump.run()
    assert codes == ["queue.outside-pump"]


async def test_a_pump_runs_beside_other_work_on_a_loop() -> None:
    pump, ran = EventPump(), list[str]()
    task = Task(pump)
    task.post(lambda: ran.append("before"))
    done = pump.run_in(asyncio.get_running_loop())
    await asyncio.sleep(0)
    arrived = asyncio.Event()
    task.post(arrived.set)
    await arrived.wait()
    with pytest.raises(UsageError):
        QueueBroker("broker", pump).unbind(1)
    task.post(pump.stop)
    await done
    assert ran == ["before"]


def test_keyboard_interrupt_ends_the_pump_and_is_not_swallowed() -> None:
    pump = EventPump()

    def interrupt() -> None:
        raise KeyboardInterrupt

    Task(pump).post(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pump.run()
    with pytest.raises(UsageError):
        Task(pump).post(lambda: None)


def test_stopping_frees_the_ports() -> None:
    registry = Registry()
    registry.add("server", any_port=True)
    pump = EventPump()
    broker = QueueBroker("server", pump, transport=TcpTransport(registry))
    Task(pump).post(lambda: broker.bind(1, AcceptListener()))
    Task(pump).post(pump.stop)
    pump.run()
    address = registry.address("server", 1)
    assert address is not None
    again = EventPump()
    registry.add("server", ports={1: address[1]})
    second = QueueBroker("server", again, transport=TcpTransport(registry))
    bound: list[bool] = []
    Task(again).post(lambda: bound.append(second.bind(1, AcceptListener())))
    Task(again).post(again.stop)
    again.run()
    assert bound == [True]


def test_a_transport_serves_one_pump() -> None:
    transport = TcpTransport(Registry())
    QueueBroker("one", EventPump(), transport=transport)
    with pytest.raises(UsageError) as raised:
        QueueBroker("two", EventPump(), transport=transport)
    assert raised.value.code == "queue.pump-other"


async def test_a_runnable_that_posts_itself_for_ever_leaves_others_their_turn() -> None:
    pump, rounds = EventPump(), list[int]()
    task = Task(pump)

    def again() -> None:
        rounds.append(1)
        task.post(again)

    task.post(again)
    done = pump.run_in(asyncio.get_running_loop())
    for _ in range(10):
        await asyncio.sleep(0)
    pump.stop()
    await done
    assert 1 <= len(rounds) <= 20
