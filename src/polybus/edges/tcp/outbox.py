"""What a peer is still to be sent: bounded, written once a loop turn, with a policy for the slow.

A transport holds one write until its socket has taken all of it. Meanwhile it pauses us, and
messages wait here. A subscriber that stays behind meets its policy at `outbox-bytes-max`:

    disconnect    it is told so in its protocol and its connection is closed
    drop-oldest   the oldest waiting messages go, and it is told how many
    wait          its publishers wait for it; only one that stands still is disconnected

Publishers also wait a little for a subscriber that may be disconnected, so that a short burst costs
nobody a connection. That patience is a budget: half a second, refilled at a tenth of the time that
passes, so a subscriber that is always behind does not hold back the others for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import Literal, Protocol

from polybus.batch import Batch, Buffer

Policy = Literal["disconnect", "drop-oldest", "wait"]

WRITE_BYTES = 1 << 20
SLOW_WRITE_BYTES = 64 << 10
"""What is put together for a peer that was behind: it is a copy of its own."""
PATIENCE_S = 0.5
PATIENCE_REFILL = 0.1
STANDSTILL_S = 10.0


class Waiter(Protocol):
    """A publisher, or a replay, that waits for a slow peer."""

    def release(self, gate: Hashable) -> None: ...


@dataclass(slots=True)
class Lost:
    """What a peer did not get: how many messages, and where each topic goes on."""

    messages: int = 0
    next_positions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.messages += len(batch)
            self.next_positions[batch.topic] = (batch.epoch, batch.last_offset + 1)


class Ledger:
    """How many bytes wait in all outboxes, each buffer counted once however many share it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._holders: dict[int, int] = {}

    def hold(self, data: Buffer) -> None:
        holders = self._holders.get(id(data), 0)
        if not holders:
            self.bytes += len(data)
        self._holders[id(data)] = holders + 1

    def release(self, data: Buffer) -> None:
        holders = self._holders[id(data)] - 1
        if holders:
            self._holders[id(data)] = holders
        else:
            del self._holders[id(data)]
            self.bytes -= len(data)


class Joiner:
    """Puts pieces together, once for all outboxes that have the same ones.

    Whoever does not take all of it keeps it, and many slow peers must not keep a copy each.
    """

    def __init__(self) -> None:
        self._pieces: list[Buffer] = []
        self._joined: Buffer = b""

    def join(self, pieces: list[Buffer]) -> Buffer:
        if len(pieces) == 1:
            return pieces[0]
        if len(pieces) != len(self._pieces) or any(map(is_not, pieces, self._pieces)):
            self._pieces, self._joined = pieces, b"".join(pieces)
        return self._joined

    def forget(self) -> None:
        self._pieces, self._joined = [], b""


class Flusher:
    """Writes every outbox that has something once per loop turn, not once per message."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._call_soon = call_soon
        self._before = before
        self._after = after
        self._outboxes: list[Outbox] = []
        self.joiner = Joiner()

    def add(self, outbox: Outbox) -> None:
        if not self._outboxes:
            self._call_soon(self._flush)
        self._outboxes.append(outbox)

    def _flush(self) -> None:
        self._before()
        outboxes, self._outboxes = self._outboxes, []
        for outbox in outboxes:
            outbox.flush()
        self.joiner.forget()
        self._after()


@dataclass(slots=True)
class Outboxes:
    """What all outboxes of a bus share."""

    flusher: Flusher
    ledger: Ledger
    policy: Policy
    bytes_max: int
    congested: set[Outbox] = field(default_factory=set)


class Outbox:
    """One peer's pending bytes. `bytes` counts what waits here, beyond what the transport holds."""

    __slots__ = (
        "_congested",
        "_batches",
        "_drains",
        "_flusher",
        "_join",
        "_ledger",
        "_limit",
        "_lost",
        "_on_overflow",
        "_pending",
        "_policy",
        "_scheduled",
        "_waiters",
        "_write",
        "_written",
        "bytes",
        "closed",
        "paused",
        "patience_s",
        "quiet_s",
    )

    def __init__(
        self,
        outboxes: Outboxes,
        write: Callable[[Buffer], None],
        on_overflow: Callable[[Lost], None],
    ) -> None:
        self._write = write
        self._on_overflow = on_overflow
        self._flusher = outboxes.flusher
        self._join = outboxes.flusher.joiner.join
        self._ledger = outboxes.ledger
        self._congested = outboxes.congested
        self._policy = outboxes.policy
        self._limit = outboxes.bytes_max
        self._pending: deque[Buffer] = deque()
        self._batches: deque[Sequence[Batch]] = deque()
        self._waiters: list[Waiter] = []
        self._drains: list[Waiter] = []
        # The last write, while the transport holds it.
        self._written: Buffer = b""
        self._lost = Lost()
        self._scheduled = False
        self.bytes = 0
        self.paused = False
        self.closed = False
        self.patience_s = PATIENCE_S
        self.quiet_s = 0.0

    def send(self, data: Buffer, batches: Sequence[Batch] = ()) -> None:
        """Queue the bytes of batches, or of a reply; they go out at the end of the loop turn."""
        if self.closed:
            return
        self._pending.append(data)
        self._batches.append(batches)
        self.bytes += len(data)
        if self.paused:
            self._ledger.hold(data)
            if self.bytes > self._limit:
                self._overflow()
        elif not self._scheduled:
            self._scheduled = True
            self._flusher.add(self)

    @property
    def held_bytes(self) -> int:
        """What this peer costs while it stands still."""
        return self.bytes + len(self._written)

    def wants_wait(self) -> bool:
        """Whether publishers should wait for this peer now."""
        if not self.paused or self._policy == "drop-oldest" or 4 * self.bytes < self._limit:
            return False
        return self._policy == "wait" or self.patience_s > 0

    def add_waiter(self, waiter: Waiter) -> None:
        self._waiters.append(waiter)
        self._congested.add(self)

    def add_drain(self, waiter: Waiter) -> None:
        """Release somebody who sends only to this peer, however long that takes."""
        self._drains.append(waiter)

    def flush(self) -> None:
        """Write what is pending, in large pieces, until the transport has enough."""
        self._scheduled = False
        pending = self._pending
        if self.paused or self.closed or not pending:
            return
        if len(pending) == 1:
            data = pending.popleft()
            self._batches.clear()
            self.bytes = 0
            self._put(data)
            return
        self._write_pieces(held=False)

    def _put(self, data: Buffer) -> None:
        self._written = data
        self._write(data)
        if not self.paused:
            self._written = b""

    def pause(self) -> None:
        """The transport has enough. It and everything that waits are counted from now on."""
        if not self.paused:
            self.paused = True
            # All of it: a transport keeps a write that the socket took only in part.
            self._ledger.hold(self._written)
            self._congested.add(self)
            self.quiet_s = 0.0
            for data in self._pending:
                self._ledger.hold(data)

    def resume(self) -> None:
        """The transport takes more."""
        if self.closed:
            return
        self.reopen()
        self.quiet_s = 0.0
        if self._lost.messages:
            # What was dropped is told before what comes after it.
            lost, self._lost = self._lost, Lost()
            held, held_batches = self._pending, self._batches
            self._pending, self._batches, self._scheduled = deque(), deque(), True
            self._on_overflow(lost)
            for data in self._pending:
                self._ledger.hold(data)
            self._pending += held
            self._batches += held_batches
            self._scheduled = False
        self._write_pieces(held=True)
        if not self.paused:
            self._congested.discard(self)
            self._release_drains()
        if 8 * self.bytes < self._limit:
            self.release_waiters()

    def reopen(self) -> None:
        """What the transport holds is not counted any more, and it is given more."""
        if self.paused:
            self.paused = False
            self._ledger.release(self._written)
            self._written = b""

    def tick(self, elapsed_s: float) -> bool:
        """Let time pass for a congested outbox; say whether it has stood still for too long."""
        self.quiet_s += elapsed_s
        if self._waiters and self._policy != "wait":
            self.patience_s -= elapsed_s
            if self.patience_s <= 0:
                self.release_waiters()
        else:
            self.patience_s = min(PATIENCE_S, self.patience_s + PATIENCE_REFILL * elapsed_s)
        stuck = self.quiet_s > STANDSTILL_S and 4 * self.bytes > self._limit
        return self._policy == "wait" and stuck

    def give_up(self) -> None:
        """Publishers waited for this peer, and it stands still: it must go."""
        self._on_overflow(self.drop_all())

    def release_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release(self)

    def _release_drains(self) -> None:
        drains, self._drains = self._drains, []
        for waiter in drains:
            waiter.release(self)

    def drop_all(self) -> Lost:
        """Forget what waits; return what that was."""
        for batches in self._batches:
            self._lost.add(batches)
        if self.paused:
            for data in self._pending:
                self._ledger.release(data)
        self._pending.clear()
        self._batches.clear()
        self.bytes = 0
        lost, self._lost = self._lost, Lost()
        return lost

    def close(self) -> None:
        """Forget everything; nobody waits for this peer any more."""
        if self.closed:
            return
        self.drop_all()
        self.reopen()
        self.closed = True
        self._congested.discard(self)
        self.release_waiters()
        self._release_drains()

    def _write_pieces(self, *, held: bool) -> None:
        pending = self._pending
        bytes_max = SLOW_WRITE_BYTES if held else WRITE_BYTES
        while pending and not self.paused:
            piece: list[Buffer] = []
            piece_bytes = 0
            while pending and piece_bytes < bytes_max:
                if held and piece and len(pending[0]) > bytes_max:
                    break
                data = pending.popleft()
                self._batches.popleft()
                piece_bytes += len(data)
                piece.append(data)
                if held:
                    self._ledger.release(data)
            self.bytes -= piece_bytes
            self._put(self._join(piece))
            if self.paused and held:
                # pause() has counted what is left a second time.
                for data in pending:
                    self._ledger.release(data)

    def _overflow(self) -> None:
        if self._policy == "drop-oldest":
            self._drop_oldest()
        elif self._policy == "disconnect" and len(self._pending) > 1:
            self._on_overflow(self.drop_all())

    def _drop_oldest(self) -> None:
        """Drop the oldest messages until the rest fits; receipts and errors are never dropped."""
        replies: list[Buffer] = []
        while self.bytes > self._limit and len(self._pending) > 1:
            data = self._pending.popleft()
            batches = self._batches.popleft()
            if not batches:
                replies.append(data)
                continue
            self._lost.add(batches)
            self._ledger.release(data)
            self.bytes -= len(data)
        self._pending.extendleft(reversed(replies))
        self._batches.extendleft(() for _ in replies)
        if self.bytes > 2 * self._limit and not any(self._batches):
            # Nothing but replies, and the peer reads none of them.
            self._on_overflow(self.drop_all())
