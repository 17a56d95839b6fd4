"""Every bound of the queue framework, with its default."""

from __future__ import annotations

from dataclasses import dataclass

from polybus.errors import UsageError

LENGTH_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What one broker's queues may take; docs/protocols/queues.md says what happens at each."""

    message_bytes_max: int = 64 << 20
    outbox_bytes_max: int = 64 << 20
    """What may wait in a queue before it refuses to take another message to send."""
    ring_bytes: int = 256 << 10
    """The size of a channel's buffer in process, one for each direction."""
    actions_max: int = 10_000
    """How many reads, and how many writes, may wait in a channel."""
    connections_max: int = 10_000
    """Channels of one transport; a bind refuses those who come on top."""
    dial_timeout_s: float = 10.0
    """How long a TCP handshake may take."""
    linger_s: float = 5.0
    """How long a closed TCP channel waits for the other end to have read everything."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise UsageError("queue.limit", f"{name} must be more than 0")
        if self.message_bytes_max > LENGTH_MAX:
            raise UsageError("queue.limit", f"message_bytes_max is at most {LENGTH_MAX}")
