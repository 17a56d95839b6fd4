"""The contract between a translator and the connection below it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polybus.batch import Batch, Buffer
from polybus.bus.subscriptions import Holdable, Publisher


class Peer(Holdable, Protocol):
    """Where a translator's bytes go: a TCP connection or a UDP address."""

    name: str
    ip: str
    """Its address without the port; empty on a Unix socket."""

    @property
    def certificate_name(self) -> str | None:
        """The name in its verified certificate, if it has one."""
        return None

    def flush(self) -> None:
        """Write what waits for the end of the loop turn."""
        return

    async def drained(self) -> None:
        """Wait until the peer takes more."""
        return

    def send(
        self, data: Buffer, batches: Sequence[Batch] = (), publisher: Publisher | None = None
    ) -> None:
        """Send the bytes of batches, or of a reply; hold the publisher back if the peer is slow."""
        ...

    def close(self) -> None:
        """Close when everything sent before is out."""
        ...

    def progressed(self, size: int) -> None:
        """A part arrived of a message that is not kept in memory."""
        return

    async def stream_out(self, pieces: AsyncIterator[bytes]) -> None:
        """Send pieces with nothing between them, each when the peer has taken the one before."""
        async for piece in pieces:
            self.send(piece)

    def entered(self) -> None:
        """The peer is logged in."""
        return


@dataclass(slots=True)
class DroppedMessages:
    """Messages that a peer did not get: how many, and where they begin and end in each topic."""

    messages: int = 0
    first_positions: dict[str, tuple[int, int]] = field(default_factory=dict)
    next_positions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.messages += len(batch)
            topic, epoch, offset = batch.topic, batch.epoch, batch.first_offset
            if not epoch and topic in self.next_positions:
                # It is not in the log yet, and will follow those before it.
                epoch, offset = self.next_positions[topic]
            self.first_positions.setdefault(topic, (epoch, offset))
            self.next_positions[topic] = (epoch, offset + len(batch))
