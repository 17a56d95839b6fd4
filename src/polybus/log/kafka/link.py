"""The connections to a Kafka cluster, on their own event loop in their own thread.

The bus's loop never waits for a broker: it schedules work with `soon`, and other threads wait for
an answer with `run`. Kafka answers the requests of one connection in order, so a request that may
wait (a fetch) never shares a connection with one that must not (a produce): each purpose has its
own connection group.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaError
from aiokafka.protocol.offset import OffsetRequest

from polybus.errors import StorageError
from polybus.log.kafka.metadata import PartitionState, TopicsRequest, states_of

logger = logging.getLogger("polybus.server")

ADMIN, PRODUCE, FOLLOW, READ, TRANSACT = "admin", "produce", "follow", "read", "transact"
REQUEST_TIMEOUT_MS = 10_000
ANSWER_TIMEOUT_S = 30.0
RETRY_S = 0.1
CLOSE_TIMEOUT_S = 10.0
REFRESH_S = 2.0
EARLIEST, LATEST = -2, -1
READ_UNCOMMITTED, READ_COMMITTED = 0, 1
T = TypeVar("T")
LINK_ERRORS = (KafkaError, OSError, asyncio.TimeoutError)


class KafkaClient(AIOKafkaClient):  # type: ignore[misc]  # aiokafka has no types
    """Closes connections that the brokers have ended; its base only forgets them.

    A connection that the broker has closed, and whose reader has not run since, would stay open
    until the garbage collector finds its socket.
    """

    async def _get_conn(self, node_id: Any, *, group: Any = 0, no_hint: bool = False) -> Any:
        known = self._conns.get((node_id, group))
        if known is not None and not known.connected():
            known.close(reason=CloseReason.CONNECTION_BROKEN)
        return await super()._get_conn(node_id, group=group, no_hint=no_hint)


class LinkLoop(asyncio.SelectorEventLoop):
    """Tracks the connections that are made on it, so that none outlives it.

    aiokafka forgets some: that of an abandoned start, or one that is being made when the client is
    closed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    async def create_connection(self, *given: Any, **options: Any) -> Any:
        transport, protocol = await super().create_connection(*given, **options)
        self._made.add(transport)
        return transport, protocol

    def abort_connections(self) -> int:
        """End the connections that are still open; return how many there were."""
        left = [one for one in self._made if not one.is_closing()]
        for transport in left:
            assert isinstance(transport, asyncio.WriteTransport)
            transport.abort()
        return len(left)


class KafkaLink:
    """Requests to the brokers. Its coroutines run on its own loop."""

    def __init__(self, addresses: list[str], *, client_id: str, **security: Any) -> None:
        """`security` is what `client_settings` gives."""
        self._addresses = addresses
        self._client_id = client_id
        self._security = security
        self.loop = LinkLoop()
        self.partitions: dict[str, PartitionState] = {}
        self.broker_ids: list[int] = []
        self._is_stale = asyncio.Event()
        self._refreshed = asyncio.Event()
        self.on_refreshed: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="polybus-kafka", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # Connections that are left if the close took too long.
        self.loop.run_until_complete(self._abandon())
        self.loop.close()

    # From other threads

    def open(self) -> None:
        """Connect. Raises StorageError `log.unreachable` if no broker answers."""
        # aiokafka logs every attempt to reach a broker, many per second; this log reports the
        # failure.
        logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
        self._thread.start()
        try:
            self.run(self._open())
        except StorageError:
            self.stop()
            raise
        except LINK_ERRORS as error:
            self.stop()
            text = f"no Kafka broker of {','.join(self._addresses)} answers: {error}"
            raise StorageError("log.unreachable", text) from error

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = ANSWER_TIMEOUT_S) -> T:
        """Wait for a coroutine.

        Raises StorageError: `log.unreachable` if it takes too long; `log.closed` if the link was
        stopped.
        """
        future = self.begin(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError as error:
            raise StorageError("log.closed", "the log is closed") from error
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            text = f"Kafka did not answer within {timeout_s:.0f} s; the next call may succeed"
            raise StorageError("log.unreachable", text) from error

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine. Raises StorageError `log.closed`."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:
            work.close()
            raise StorageError("log.closed", "the log is closed") from error

    def soon(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):
            # The loop is closed: nothing waits for this any more.
            self.loop.call_soon_threadsafe(callback, *arguments)

    def stop(self) -> None:
        """End the tasks, the connections and the thread."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(StorageError):
            self.run(self._close(), timeout_s=CLOSE_TIMEOUT_S)
        self.soon(self.loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    # On the loop

    async def _open(self) -> None:
        self._client = KafkaClient(
            bootstrap_servers=self._addresses,
            client_id=self._client_id,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            retry_backoff_ms=int(RETRY_S * 1000),
            **self._security,
        )
        await self._client.bootstrap()
        await self._ask_metadata()
        self.start(self._refresh())

    async def _close(self) -> None:
        # Also tasks that other threads still wait for: they could open connections after the close.
        # Until Python 3.12 a task that gets its answer in the same moment continues (`wait_for`).
        while await self._cancel_all():
            pass
        if hasattr(self, "_client"):
            await self._client.close()
        await self._abandon()

    async def _cancel_all(self) -> bool:
        """Cancel all other tasks; return whether some have not ended yet."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if not tasks:
            return False
        _, open_tasks = await asyncio.wait(tasks, timeout=RETRY_S)
        return bool(open_tasks)

    async def _abandon(self) -> None:
        """Close connections that aiokafka has forgotten."""
        await self._cancel_all()
        if self.loop.abort_connections():
            # Their sockets are closed in the next turn of the loop.
            await asyncio.sleep(0)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until the link stops."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # When the program ends, no address can be resolved any more.
        is_ending = not threading.main_thread().is_alive()
        if not task.cancelled() and (error := task.exception()) is not None and not is_ending:
            logger.error("a task of the Kafka log has ended", exc_info=error)

    async def send(self, broker: int, request: Any, group: str) -> Any:
        """Raises one of LINK_ERRORS."""
        return await self._client.send(broker, request, group=group)

    async def coordinator(self, kind: CoordinationType, key: str) -> int:
        """The broker that coordinates a group or transactional id. Raises one of LINK_ERRORS."""
        return int(await self._client.coordinator_lookup(kind, key))

    async def ask(self, request: Any, *, controller: bool = False) -> Any:
        """Ask any broker, or the controller; try others. Raises StorageError `log.unreachable`."""
        last: BaseException | None = None
        deadline = self.loop.time() + ANSWER_TIMEOUT_S
        while self.loop.time() < deadline:
            for broker in [one.nodeId for one in self._client.cluster.brokers()]:
                try:
                    return await self.send(broker, request, ADMIN)
                except LINK_ERRORS as error:
                    last = error
            await asyncio.sleep(RETRY_S)
        raise StorageError("log.unreachable", f"no Kafka broker answers: {last!r}")

    def stale(self) -> None:
        """A broker or leader may have changed: refresh the metadata soon."""
        self._is_stale.set()

    async def refreshed(self, tries: int = 0) -> None:
        """Wait until the metadata was refreshed; longer after each attempt.

        A broker needs seconds to make a thousand topics, and each answer lists all of them.
        """
        await asyncio.sleep(min(tries * RETRY_S, REFRESH_S / 2))
        self._refreshed.clear()
        self.stale()
        await self._refreshed.wait()

    async def _refresh(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_stale.wait(), REFRESH_S)
            self._is_stale.clear()
            with contextlib.suppress(StorageError):
                await self._ask_metadata()
            # Many calls of `stale` must not become as many requests.
            await asyncio.sleep(RETRY_S)

    async def _ask_metadata(self) -> None:
        answer = await self.ask(TopicsRequest(None))
        self.partitions = states_of(answer)
        self.broker_ids = [one[0] for one in answer.brokers]
        self._refreshed.set()
        for callback in self.on_refreshed:
            callback()

    def leader_of(self, name: str) -> int | None:
        state = self.partitions.get(name)
        return None if state is None else state.leader

    async def offsets(
        self, names: list[str], when: int, isolation: int = READ_COMMITTED
    ) -> dict[str, int]:
        """Offsets of topics: EARLIEST, LATEST, or of a time in ms (-1: none at or after it).

        LATEST is the offset after the last message; with READ_COMMITTED, the last one before any
        open transaction.

        Waits for leaders; topics that no longer exist are left out. Raises StorageError.
        """
        found, silent = await self.offsets_known(names, when, isolation)
        if silent:
            raise StorageError("log.unreachable", f"no leader for {sorted(silent)[:3]}")
        return found

    async def offsets_known(
        self, names: list[str], when: int, isolation: int = READ_COMMITTED
    ) -> tuple[dict[str, int], set[str]]:
        """`offsets` of the topics whose leaders answer, and the other existing topics."""
        found: dict[str, int] = {}
        missing = set(names)
        deadline = self.loop.time() + ANSWER_TIMEOUT_S
        tries = 0
        while missing:
            by_leader: dict[int, list[str]] = {}
            for name in missing:
                leader = self.leader_of(name)
                if leader is not None:
                    by_leader.setdefault(leader, []).append(name)
            for leader, its_names in by_leader.items():
                wanted = [(name, [(0, when)]) for name in its_names]
                try:
                    answer = await self.send(leader, OffsetRequest(-1, isolation, wanted), READ)
                except LINK_ERRORS:
                    continue
                for name, ((_, error, _, offset),) in answer.topics:
                    if error == 0:
                        found[name] = offset
                        missing.discard(name)
            if missing:
                if self.loop.time() > deadline:
                    break
                await self.refreshed(tries)
                tries += 1
                missing &= set(self.partitions)
        return found, missing & self.partitions.keys()
