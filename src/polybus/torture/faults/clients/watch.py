"""Invariants of a running bus, whatever its peers do: latency, memory, descriptors."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

from polybus.client import connect
from polybus.errors import PolybusError
from polybus.torture.bus.child import BusChild, shown
from polybus.torture.checks import check_files
from polybus.torture.load.ledger import MessageLedger
from polybus.torture.report import Findings

ANSWER_S_MAX = 1.0
# One late answer may be caused by the machine, but not one this late.
ONE_ANSWER_S_MAX = 5.0
# A bus keeps up to 32 files of history open, which replays have read last, and opens a few at any
# time: a segment, a file of history, a connection of the probe.
DESCRIPTORS_MORE_MAX = 32 + 16
SETTLE_S = 5.0
PROBE_INTERVAL_S = 0.1
# No other peer writes there: all of its messages are known.
PROBE_TOPIC = "probe"
# The errors of a peer whose bus is gone or does not answer.
BROKEN = (OSError, EOFError, ValueError, PolybusError, TimeoutError)


class Lateness:
    """Counts late answers: two or more in a row once, and each that is very late."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._late = 0

    def record(self, took_s: float) -> None:
        self._late = self._late + 1 if took_s > ANSWER_S_MAX else 0
        if self._late == 2 or took_s > ONE_ANSWER_S_MAX:
            self._findings.violated("errors", f"a normal client waited {took_s:.1f} s")


class BusWatch:
    """Watches a bus from `begin` to `end`, with a normal client in a thread of its own.

    The thread keeps the client's delays from being those of the peers under test.
    """

    def __init__(self, child: BusChild, findings: Findings) -> None:
        self._child = child
        self._findings = findings
        self._messages = MessageLedger()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._before_descriptors = 0
        self.peak_bytes = 0
        self.slowest_s = 0.0

    def begin(self) -> None:
        self._child.measure_memory()
        self._before_descriptors = self._child.descriptor_count()
        self._thread.start()

    async def end(self) -> None:
        """Stop the client, compare its topic with its receipts, and wait until memory and
        descriptors are released.

        The memory is checked with the bus's log (`check_log`). Raises PolybusError.
        """
        self.abandon()
        await asyncio.to_thread(self._thread.join)
        stored = (await self._child.messages(PROBE_TOPIC))[1]
        self._messages.check(PROBE_TOPIC, stored, self._findings)
        await self._child.settle()
        more = 0
        for _ in range(round(SETTLE_S / 0.1)):
            more = self._child.descriptor_count() - self._before_descriptors
            if more <= DESCRIPTORS_MORE_MAX:
                break
            await asyncio.sleep(0.1)
        if more > DESCRIPTORS_MORE_MAX:
            self._findings.violated("memory", f"{more} file descriptors more than before")

    def abandon(self) -> None:
        """Stop the client without a check."""
        self._ended.set()

    @property
    def told(self) -> str:
        grown, peak = (one / (1 << 20) for one in (self._child.grown_bytes(), self.peak_bytes))
        return (
            f"memory {grown:+.0f} MiB after, {peak:+.0f} MiB at most; "
            f"slowest answer {self.slowest_s * 1000:.0f} ms"
        )

    def _run(self) -> None:
        try:
            asyncio.run(self._probe())
        except (PolybusError, OSError, TimeoutError) as error:
            # The bus may be gone because the round ends.
            if not self._ended.is_set():
                told = shown(error) if isinstance(error, PolybusError) else repr(error)
                self._findings.violated("errors", f"a normal client is not answered: {told}")

    async def _probe(self) -> None:
        """A normal client is answered in time."""
        lateness = Lateness(self._findings)
        async with connect(f"boson://127.0.0.1:{self._child.port}", reconnect=False) as client:
            while not self._ended.is_set():
                began_s = time.monotonic()
                await client.publish("beta", "probe")
                (value,) = self._messages.take(PROBE_TOPIC, "probe", 1)
                position = await client.publish(PROBE_TOPIC, value, receipt=True)
                assert position is not None
                self._messages.receipt(PROBE_TOPIC, [value], position.offset)
                await self._child.ask("GET", "/v1/topics")
                took_s = time.monotonic() - began_s
                self.slowest_s = max(self.slowest_s, took_s)
                lateness.record(took_s)
                self.peak_bytes = max(self.peak_bytes, self._child.grown_bytes())
                await asyncio.sleep(PROBE_INTERVAL_S)


async def watched_round(
    child: BusChild, findings: Findings, inject: Callable[[BusWatch], Awaitable[None]]
) -> Findings:
    """Start a bus, let `inject` do what it does from `begin` to `end`, and stop the bus cleanly."""
    watch = BusWatch(child, findings)
    try:
        if not await child.start(warm=False):
            findings.violated("starts", f"no start; see {child.folder}/bus.log")
            return findings
        await child.ask("POST", "/v1/topics", {"name": PROBE_TOPIC})
        await inject(watch)
        code = await child.stop()
        if code != 0:
            findings.violated("starts", f"exit code {code} after SIGTERM")
        await check_files(child, findings)
    except BROKEN as error:
        findings.violated("errors", f"the bus is gone or does not answer: {error!r}")
    finally:
        watch.abandon()
        child.kill()
    return findings
