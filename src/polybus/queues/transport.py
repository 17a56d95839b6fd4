"""What a transport does for brokers: carry channels between names and ports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from polybus.queues.channel import Channel
from polybus.queues.limits import QueueLimits
from polybus.queues.pump import EventPump
from polybus.queues.task import Task


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A broker's port that takes every connect."""

    task: Task
    limits: QueueLimits
    accepted: Callable[[Channel], object]


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A connect under way; exactly one of `connected` and `refused` is called."""

    task: Task
    limits: QueueLimits
    timeout_s: float
    connected: Callable[[Channel], object]
    refused: Callable[[], object]


class Transport(Protocol):
    """Brokers of one transport find each other by name. Every call but `join` is inside the pump.

    Where both ends are in one process, `connected` is called before `accepted`.
    """

    def join(self, name: str, pump: EventPump) -> None:
        """Take a broker in. Raises UsageError `queue.name-taken`."""
        ...

    def bind(self, name: str, port: int, binding: Binding) -> bool:
        """Accept on the broker's port; false if it is bound already."""
        ...

    def unbind(self, name: str, port: int) -> bool:
        """Accept no more; what was accepted stays. False if it is not bound."""
        ...

    def connect(self, name: str, port: int, attempt: Attempt) -> bool:
        """Connect to a broker's port, and say later how it went; false if there is no such name."""
        ...
