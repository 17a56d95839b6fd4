# cython: annotation_typing=False
"""Outboxes: bytes that wait for a peer, written once per loop turn, and what happens to slow peers.

A transport holds one write until its socket has taken all of it. Meanwhile it pauses us, and
messages wait here. The policy `slow-subscriber` applies at `outbox-bytes-max`:

    disconnect    an error in the peer's protocol, then the connection is closed
    drop-oldest   the oldest waiting messages are dropped, and the peer gets their number
    wait          its publishers are held back; only a peer that takes nothing is disconnected

With `disconnect` publishers are held back too, but only for a budget of half a second, refilled at
a tenth of the elapsed time. So a short burst disconnects nobody, and a subscriber that is always
slow does not hold up the others.

While memory is short (`memory-bytes-max`), the policy applies early to peers that take nothing, the
largest outbox first: slow peers pay for it, not the publishers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from operator import is_not
from typing import Literal, TypeVar

try:
    import cython
except ImportError:
    # Only the compiler needs it.
    from polybus.scan import plain as cython
from polybus.batch import Batch, Buffer
from polybus.bus.subscriptions import Holdable, Publisher
from polybus.edges.protocols.peer import DroppedMessages
from polybus.services.memory import MemoryGate

logger = logging.getLogger("polybus.tcp")

T = TypeVar("T")
Policy = Literal["disconnect", "drop-oldest", "wait"]
# Bytes for a peer, and the batches that they are; none if they are a reply.
Waiting = tuple[Buffer, Sequence[Batch]]

WRITE_BYTES = 1 << 20
SLOW_WRITE_BYTES = 64 << 10
"""The size of writes to a peer that was slow: each is a copy of its own."""
PATIENCE_S = 0.5
PATIENCE_REFILL = 0.1
STANDSTILL_S = 10.0
# How long a peer may take nothing while memory is short, and while catch-ups wait for memory.
SHORT_PATIENCE_S = 0.3
STARVING_PATIENCE_S = 3.0


@cython.cclass
class Outboxes:
    """What all outboxes of a bus share.

    Every outbox that has pending bytes is written once per loop turn, not once per message. In a
    turn of the pump (`in_turn`) the pump calls `flush` itself.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        memory: MemoryGate,
        *,
        policy: Policy,
        bytes_max: int,
    ) -> None:
        self.policy: Policy = policy
        self.bytes_max = bytes_max
        self.ledger = memory.ledger
        self.congested: set[Outbox] = set()
        self._call_soon = call_soon
        self._memory = memory
        self._pending: list[Outbox] = []
        # The last pieces that were joined, and the result.
        self._pieces: list[Buffer] = []
        self._joined: Buffer = b""
        self._short_s = 0.0
        self.in_turn = False

    def flush_soon(self, outbox: Outbox) -> None:
        """Write the outbox at the end of the turn."""
        if not self._pending and not self.in_turn:
            self._call_soon(self.flush)
        self._pending.append(outbox)

    def together(self, call: Callable[[T], None], argument: T) -> None:
        """Call it, and write what it sends before this returns; not in a turn of the pump."""
        self.in_turn = True
        try:
            call(argument)
        finally:
            self.in_turn = False
            self.flush()

    def flush(self) -> None:
        """Write all outboxes."""
        if self._pending:
            pending, self._pending = self._pending, []
            for outbox in pending:
                try:
                    outbox.flush()
                except Exception:
                    # A bug of ours: only this peer loses its messages.
                    logger.exception("an error while writing to a peer")
                    outbox.close()
            self._pieces, self._joined = [], b""

    def join(self, pieces: list[Buffer]) -> Buffer:
        """One buffer of all pieces, shared by all outboxes that hold the same pieces.

        A peer that does not take all of it keeps it in memory; many slow peers share one copy.
        """
        if len(pieces) == 1:
            return pieces[0]
        if len(pieces) != len(self._pieces) or any(map(is_not, pieces, self._pieces)):
            self._pieces, self._joined = pieces, b"".join(pieces)
        return self._joined

    def tick(self, elapsed_s: float) -> None:
        """Apply the policy to peers that have been slow for too long."""
        for outbox in list(self.congested):
            if outbox.tick(elapsed_s):
                outbox.give_up()
        is_full = self._memory.is_full()
        self._short_s = self._short_s + elapsed_s if is_full else 0.0
        if self._short_s > SHORT_PATIENCE_S or self._memory.catch_ups_starve:
            self._shed(is_full)

    def _shed(self, is_full: bool) -> None:
        """Free memory at the expense of peers that take nothing; of all if catch-ups starve."""
        patience_s = SHORT_PATIENCE_S if is_full else STARVING_PATIENCE_S
        if self.policy == "wait":
            patience_s = STANDSTILL_S
        still = [one for one in self.congested if one.quiet_s >= patience_s]
        for outbox in sorted(still, key=lambda one: -one.held_bytes):
            outbox.give_up()
            if is_full and not self._memory.is_full():
                return


@cython.cclass
class Outbox:
    """One peer's pending bytes. `bytes` excludes what the transport holds."""

    def __init__(
        self,
        outboxes: Outboxes,
        write: Callable[[Buffer], None],
        on_overflow: Callable[[DroppedMessages], None],
    ) -> None:
        self._write = write
        self._on_overflow = on_overflow
        self._shared = outboxes
        self._ledger = outboxes.ledger
        self._limit = outboxes.bytes_max
        # A list while the peer takes everything: an empty deque has 760 bytes.
        self._pending: list[Waiting] | deque[Waiting] = []
        # Publishers that are held back, and catch-ups that wait until the peer takes more.
        self._waiters: list[Holdable] | None = None
        self._drains: list[asyncio.Future[None]] | None = None
        # The last write, while the transport still holds it.
        self._written: Buffer = b""
        self._lost: DroppedMessages | None = None
        self._scheduled = False
        self.bytes = 0
        self.paused = False
        self.closed = False
        self.patience_s = PATIENCE_S
        self.quiet_s = 0.0

    def send(
        self, data: Buffer, batches: Sequence[Batch] = (), publisher: Publisher | None = None
    ) -> None:
        """Queue the bytes of batches, or of a reply; they go out at the end of the loop turn.

        The publisher is held back if the peer is slow.
        """
        if self.closed:
            return
        self._pending.append((data, batches))
        self.bytes += len(data)
        if self.paused:
            self._ledger.hold(data)
            if self.bytes > self._limit:
                self._overflow()
            if publisher is not None and self.wants_wait() and publisher.hold(self):
                self.add_waiter(publisher)
        elif not self._scheduled:
            self._scheduled = True
            self._shared.flush_soon(self)

    @property
    def held_bytes(self) -> int:
        """How much memory this peer occupies."""
        return self.bytes + len(self._written)

    def wants_wait(self) -> bool:
        """Whether publishers should be held back for this peer now."""
        if not self.paused or self._shared.policy == "drop-oldest" or 4 * self.bytes < self._limit:
            return False
        return self._shared.policy == "wait" or self.patience_s > 0

    def add_waiter(self, waiter: Holdable) -> None:
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        self._shared.congested.add(self)

    async def drained(self) -> None:
        """Wait until the peer takes more."""
        if self.paused and not self.closed:
            drained = asyncio.get_running_loop().create_future()
            if self._drains is None:
                self._drains = []
            self._drains.append(drained)
            await drained

    def flush(self) -> None:
        """Write pending bytes, in large pieces, until the transport pauses us."""
        self._scheduled = False
        pending = self._pending
        if self.paused or self.closed or not pending:
            return
        if len(pending) == 1:
            data, _ = pending.pop()
            self.bytes = 0
            self._put(data)
            return
        self._write_pieces(held=False)

    def put(self, data: Buffer) -> None:
        """Write at once: the caller stops while it is paused."""
        if self.paused or self.closed:
            self._write(data)
        else:
            self._put(data)

    def _put(self, data: Buffer) -> None:
        self._written = data
        self._write(data)
        if not self.paused:
            self._written = b""

    def pause(self) -> None:
        """The transport is full. Count what it holds and everything that waits."""
        if not self.paused and not self.closed:
            self.paused = True
            # The whole write: a transport keeps a buffer that the socket took only in part.
            self._ledger.hold(self._written)
            self._shared.congested.add(self)
            self.quiet_s = 0.0
            for data, _ in self._pending:
                self._ledger.hold(data)

    def resume(self) -> None:
        """The transport takes more."""
        if self.closed:
            return
        self.reopen()
        self.quiet_s = 0.0
        if self._lost is not None:
            # Report the drop before the messages that follow it.
            lost, self._lost = self._lost, None
            held = self._pending
            self._pending, self._scheduled = [], True
            self._on_overflow(lost)
            for data, _ in self._pending:
                self._ledger.hold(data)
            self._pending += held
            self._scheduled = False
        self._write_pieces(held=True)
        if not self.paused:
            self._shared.congested.discard(self)
            self._release_drains()
        if 8 * self.bytes < self._limit:
            self.release_waiters()

    def reopen(self) -> None:
        """The transport holds nothing any more: stop counting it."""
        if self.paused:
            self.paused = False
            self._ledger.release(self._written)
            self._written = b""

    def tick(self, elapsed_s: float) -> bool:
        """Account for elapsed time; return whether the peer has taken nothing for too long."""
        self.quiet_s += elapsed_s
        if self._waiters and self._shared.policy != "wait":
            self.patience_s -= elapsed_s
            if self.patience_s <= 0:
                self.release_waiters()
        else:
            self.patience_s = min(PATIENCE_S, self.patience_s + PATIENCE_REFILL * elapsed_s)
        stuck = self.quiet_s > STANDSTILL_S and 4 * self.bytes > self._limit
        return self._shared.policy == "wait" and stuck

    def give_up(self) -> None:
        """Apply the policy: publishers have waited long enough for this peer."""
        self._on_overflow(self.drop_all())

    def release_waiters(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter.release(self)

    def _release_drains(self) -> None:
        drains, self._drains = self._drains, None
        for drained in drains or ():
            if not drained.done():
                drained.set_result(None)

    def drop_all(self) -> DroppedMessages:
        """Drop everything that waits, and return what it was."""
        lost, self._lost = self._lost or DroppedMessages(), None
        for data, batches in self._pending:
            lost.add(batches)
            if self.paused:
                self._ledger.release(data)
        self._pending.clear()
        self.bytes = 0
        return lost

    def close(self) -> None:
        """Drop everything, and release all who wait for this peer."""
        if self.closed:
            return
        self.drop_all()
        self.reopen()
        self.closed = True
        self._shared.congested.discard(self)
        self.release_waiters()
        self._release_drains()

    def write_through(self, write: Callable[[Buffer], None]) -> None:
        """Write with this from now on."""
        self._write = write

    def forget_peer(self) -> None:
        """The connection is lost: refer to it no more, since it refers to this."""
        self.close()
        self._write = self._on_overflow = _nobody

    def _write_pieces(self, *, held: bool) -> None:
        pending = self._queue()
        bytes_max = SLOW_WRITE_BYTES if held else WRITE_BYTES
        while pending and not self.paused:
            piece: list[Buffer] = []
            piece_bytes = 0
            while pending and piece_bytes < bytes_max:
                if held and piece and len(pending[0][0]) > bytes_max:
                    break
                data, _ = pending.popleft()
                piece_bytes += len(data)
                piece.append(data)
                if held:
                    self._ledger.release(data)
            self.bytes -= piece_bytes
            self._put(self._shared.join(piece))
            if self.paused and held:
                # pause() has counted the rest a second time.
                for data, _ in pending:
                    self._ledger.release(data)
        if not pending:
            self._pending = []

    def _queue(self) -> deque[Waiting]:
        """The queue of waiting pieces, oldest first."""
        if isinstance(self._pending, list):
            self._pending = deque(self._pending)
        return self._pending

    def _overflow(self) -> None:
        if self._shared.policy == "drop-oldest":
            self._drop_oldest()
        elif self._shared.policy == "disconnect" and len(self._pending) > 1:
            self._on_overflow(self.drop_all())

    def _drop_oldest(self) -> None:
        """Drop the oldest messages until the rest fits; receipts and errors are never dropped."""
        replies: list[Waiting] = []
        pending = self._queue()
        while self.bytes > self._limit and len(pending) > 1:
            data, batches = pending.popleft()
            if not batches:
                replies.append((data, batches))
                continue
            self._lost = self._lost or DroppedMessages()
            self._lost.add(batches)
            self._ledger.release(data)
            self.bytes -= len(data)
        pending.extendleft(reversed(replies))
        if self.bytes > 2 * self._limit and not any(batches for _, batches in pending):
            # Only replies are left, and the peer reads none of them.
            self._on_overflow(self.drop_all())


def _nobody(_: object) -> None:
    """Stands for a peer that is gone."""
