"""A dispatcher that distributes jobs to workers and tolerates a worker that disconnects.

    python examples/queues/dispatcher.py [--tcp]

A worker has at most one job. After its answer it gets the next job. If it disconnects, another
worker gets its job. The first jobs are given when all workers are there. In this example worker 2
disconnects during its first job.
"""

from __future__ import annotations

import sys
from collections import deque

from polybus.queues import (
    AcceptListener,
    ConnectListener,
    EventPump,
    MessageListener,
    MessageQueue,
    QueueBroker,
    Registry,
    Task,
    TcpTransport,
)

PORT = 1
WORKER_COUNT = 3
JOBS = range(1, 21)


class Dispatcher(AcceptListener):
    """Holds the waiting jobs, and which worker has which job."""

    def __init__(self, pump: EventPump) -> None:
        self._pump = pump
        self.waiting = deque(JOBS)
        self.answers: dict[int, int] = {}
        self.given_back: list[int] = []
        self._idle: list[Hand] = []

    def accepted(self, queue: MessageQueue) -> None:
        hand = Hand(queue, self)
        queue.set_listener(hand)
        self._idle.append(hand)
        if len(self._idle) == WORKER_COUNT:
            hands, self._idle = self._idle, []
            for one in hands:
                self.next_job(one)

    def next_job(self, hand: Hand) -> None:
        if self.waiting:
            hand.give(self.waiting.popleft())
        else:
            self._idle.append(hand)

    def answered(self, job: int, answer: int) -> None:
        self.answers[job] = answer
        if len(self.answers) == len(JOBS):
            self._pump.stop()

    def left(self, hand: Hand, job: int | None) -> None:
        if hand in self._idle:
            self._idle.remove(hand)
        if job is not None:
            self.given_back.append(job)
            self.waiting.appendleft(job)
            if self._idle:
                self.next_job(self._idle.pop())


class Hand(MessageListener):
    """The dispatcher's end of the queue to one worker."""

    def __init__(self, queue: MessageQueue, dispatcher: Dispatcher) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._job: int | None = None

    def give(self, job: int) -> None:
        self._job = job
        self._queue.send(b"%d" % job)

    def received(self, message: bytes) -> None:
        job, self._job = self._job, None
        if job is not None:
            self._dispatcher.answered(job, int(message))
        self._dispatcher.next_job(self)

    def closed(self) -> None:
        self._dispatcher.left(self, self._job)


class Worker(ConnectListener, MessageListener):
    """Squares numbers; can disconnect instead of answering."""

    def __init__(self, leaves_at_job: int | None = None) -> None:
        self._leaves_at_job = leaves_at_job
        self._job_count = 0

    def connected(self, queue: MessageQueue) -> None:
        self._queue = queue
        queue.set_listener(self)

    def received(self, message: bytes) -> None:
        self._job_count += 1
        if self._job_count == self._leaves_at_job:
            self._queue.close()
        else:
            self._queue.send(b"%d" % (int(message) ** 2))


def main(arguments: list[str]) -> None:
    pump = EventPump()
    transport = None
    if "--tcp" in arguments:
        registry = Registry()
        registry.add("dispatcher", any_port=True)
        transport = TcpTransport(registry)
    broker = QueueBroker("dispatcher", pump, transport=transport)
    dispatcher = Dispatcher(pump)

    def start() -> None:
        broker.bind(PORT, dispatcher)
        for number in range(1, WORKER_COUNT + 1):
            name = f"worker {number}"
            worker = QueueBroker(name, pump, transport=transport)
            worker.connect("dispatcher", PORT, Worker(leaves_at_job=1 if number == 2 else None))

    Task(pump).post(start)
    pump.run()
    right = all(answer == job**2 for job, answer in dispatcher.answers.items())
    print(f"{len(dispatcher.answers)} of {len(JOBS)} jobs done, all right: {right}")
    print(f"given to another worker: {len(dispatcher.given_back)}")


if __name__ == "__main__":
    main(sys.argv[1:])
