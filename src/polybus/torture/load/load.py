"""The load on a bus: writers on every protocol, a session, transactions, topic changes.

The stores beside the log, as accounts and large payloads, have a load of their own (stores.py).
It continues until the bus dies or `stopping` is set. Everything that was promised is in the
ledgers, which outlive the bus, and `Load.check` holds the next bus against them.
"""

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Callable, Container, Coroutine
from typing import Any

import pyarrow as pa

from polybus.client import connect
from polybus.client.http.connection import HttpConnection
from polybus.client.http.sources import PackSource, PollSource, WebSocketSource
from polybus.errors import PolybusError
from polybus.services.transactions.staging import SCHEMA
from polybus.torture.bus.child import SETTINGS, TOPICS, BusChild, ask_on, shown
from polybus.torture.chances import split
from polybus.torture.load.ledger import DIRECT, INLINE_BYTES_MAX, MessageLedger, SessionLedger
from polybus.torture.load.stores import EXPOSED, StoresLoad
from polybus.torture.load.upkeep import UpkeepLoad
from polybus.torture.report import Findings

SCHEMES = ("boson", "boson+properties", "goms", "http", "queue")
FOLLOWED = TOPICS[:2]
WRITER_COUNT = 2
# All that was written is read again after each fault, which costs more than to write it: writers
# pause between two writes. There are enough of them that some wait for a commit at any moment.
PAUSE_S = 0.15
MESSAGES = (1, 1, 2, 5, 20)
DRAIN_S = 15.0
PRODUCER = "torture"
GONE = "gone"
LOADED: dict[str, Any] = {
    "limits": SETTINGS["limits"] | {"inline-bytes-max": INLINE_BYTES_MAX},
}
"""Added to the settings of a bus: some messages of every protocol are large payloads."""
# The bus has died, or cannot store: the load ends, and the next bus is checked.
ENDED = (PolybusError, OSError, TimeoutError)
LoadJob = Callable[[], Coroutine[Any, Any, None]]


class Load:
    """The clients of one data folder over many buses, with the promises that they got."""

    def __init__(
        self,
        child: BusChild,
        chance: random.Random,
        findings: Findings,
        *,
        pause_s: float = PAUSE_S,
    ) -> None:
        """`pause_s` is the longest pause of a writer."""
        self.child = child
        self._pause_s = pause_s
        self.findings = findings
        self.messages = MessageLedger()
        self._chance = chance
        self.session: SessionLedger | None = None
        self.batch = 0
        self._transaction: dict[str, list[str]] = {}
        self._gone = 0
        self._deleted_topics: set[str] = set()
        self._deleted_sessions: set[str] = set()
        self.stopping = asyncio.Event()
        self.stores = (
            StoresLoad(child, split(chance), findings, self.messages, self.stopping)
            if isinstance(child, BusChild)
            else None
        )
        """None in a cluster, where such things belong to a node."""
        self.upkeep = (
            UpkeepLoad(child, split(chance), findings, self.messages, self.stopping)
            if isinstance(child, BusChild)
            else None
        )

    async def run(self) -> None:
        """Send until the bus dies or `stopping` is set."""
        jobs: list[LoadJob] = [
            self._push, self._follow, self._transact, self._make_and_delete, self._send_datagrams
        ]  # fmt: skip
        writers = [(scheme, number) for scheme in SCHEMES for number in range(WRITER_COUNT)]
        try:
            if self.session is None:
                body = {"topics": list(FOLLOWED), "from": "earliest"}
                answer = await self.child.ask("POST", "/v1/sessions", body)
                self.session = SessionLedger(answer["sessionKey"], self.messages)
        except ENDED:
            return
        if self.stores is not None:
            jobs += self.stores.jobs()
        if self.upkeep is not None:
            jobs += self.upkeep.jobs()
        tasks = [asyncio.create_task(self._until_ended(job)) for job in jobs]
        for scheme, number in writers:
            write = _bound(self._write, scheme, number)
            tasks.append(asyncio.create_task(self._until_ended(write)))
        await asyncio.gather(*tasks)

    async def _until_ended(self, job: LoadJob) -> None:
        with contextlib.suppress(*ENDED):
            await job()

    async def _write(self, scheme: str, number: int) -> None:
        writer = f"{scheme}{number}"
        self.messages.connected(writer)
        port = self.child.queue_port if scheme == "queue" else self.child.port
        url = f"{scheme}://127.0.0.1:{port}"
        # Without a receipt a refusal is only reported: many come while the disk fails.
        async with connect(url, reconnect=False, on_error=lambda _: None) as client:
            while not self.stopping.is_set():
                topic = TOPICS[2] if scheme == "queue" else self._chance.choice(FOLLOWED)
                values = self.messages.take(topic, writer, self._chance.choice(MESSAGES))
                position = await client.publish_many(topic, values, receipt=scheme != "queue")
                if position is not None:
                    self.messages.receipt(topic, values, position.offset)
                else:
                    await client.flush()
                await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, self._pause_s))

    async def _send_datagrams(self) -> None:
        """goMS over UDP: a datagram may be lost, but not come twice, late or changed."""
        self.messages.connected("udp")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            # A dead bus refuses the next datagram.
            peer.connect(("127.0.0.1", self.child.udp_port))
            peer.setblocking(False)
            # goMS sends only to topics for which the peer is registered. It reads nothing of them.
            peer.send(json.dumps({"messagetype": "register", "topics": [TOPICS[2]]}).encode())
            while not self.stopping.is_set():
                (value,) = self.messages.take(TOPICS[2], "udp", 1)
                request = {"messagetype": "send", "topics": [TOPICS[2]], "data": value}
                peer.send(json.dumps(request).encode())
                await self._pause()

    # The session.

    async def _push(self) -> None:
        """Put packs of their own into the session."""
        assert self.session is not None
        connection = HttpConnection(self.child.options())
        try:
            while not self.stopping.is_set():
                text = str(self.session.tried)
                self.session.tried += 1
                path = f"/v1/sessions/{self.session.key}/packs"
                body = f'[["{DIRECT}",{text}]]'.encode()
                await connection.request("POST", path, body, timeout_s=20.0)
                self.session.pushed.add(text)
                await self._pause()
        finally:
            connection.close()

    async def _source(self) -> PackSource:
        assert self.session is not None
        if self._chance.random() < 0.7:
            return await WebSocketSource.open(self.child.options("ws"), self.session.key)
        return PollSource(self.child.options(), self.session.key, interval_s=0.01)

    async def _follow(self) -> None:
        """Read the session over many connections, and confirm some of what comes."""
        assert self.session is not None
        while not self.stopping.is_set():
            source = await self._source()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._chance.uniform(0.02, 0.3)):
                    while True:
                        for pack in await source.receive():
                            self.session.see(pack, self.findings)
                            if pack.pack_id and self._chance.random() < 0.5:
                                source.confirm(pack.pack_id)
            await source.close()

    async def drain(self, *, confirm: bool) -> None:
        """Read the session until everything that it was promised has come."""
        assert self.session is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                source = await WebSocketSource.open(self.child.options("ws"), self.session.key)
                try:
                    while self.session.missing(FOLLOWED):
                        for pack in await source.receive():
                            self.session.see(pack, self.findings)
                            if confirm and pack.pack_id:
                                source.confirm(pack.pack_id)
                finally:
                    await source.close()
        missing = self.session.missing(FOLLOWED)
        if missing:
            text = f"{len(missing)} messages never came, the first is {missing[0]}"
            self.findings.violated("packs", text[:200])

    # Transactions, and what is deleted.

    async def _transact(self) -> None:
        while not self.stopping.is_set():
            await self._commit()
            await asyncio.sleep(self._chance.uniform(0, 2 * self._pause_s))

    async def _commit(self) -> None:
        """The next transaction, or again the one whose answer did not come."""
        if not self._transaction:
            for topic in self._chance.sample(FOLLOWED, self._chance.randint(1, len(FOLLOWED))):
                count = self._chance.choice((1, 3, 40))
                self._transaction[topic] = self.messages.take(topic, "transaction", count)
        file = f"{self.batch}-{'0' * 8}.arrows"
        connection = HttpConnection(self.child.options())
        try:
            content = _staged(self._transaction)
            path = f"/v1/staging/{PRODUCER}/{file}?end=true"
            await connection.request("POST", path, content, timeout_s=20.0)
            body = {"producer": PRODUCER, "query": "q", "batch": self.batch, "files": [file]}
            await self.child.ask("POST", "/v1/commits", body)
        finally:
            connection.close()
        for topic, values in self._transaction.items():
            self.messages.receipt(topic, values, None)
        self.batch += 1
        self._transaction = {}

    async def _make_and_delete(self) -> None:
        while not self.stopping.is_set():
            self._gone += 1
            topic = f"{GONE}-{self._gone}"
            await self.child.ask("POST", "/v1/topics", {"name": topic})
            await self.child.ask("POST", f"/v1/topics/{topic}/messages", "going")
            body = {"topics": [topic], "from": "earliest"}
            key = (await self.child.ask("POST", "/v1/sessions", body))["sessionKey"]
            await self.child.ask("DELETE", f"/v1/sessions/{key}")
            self._deleted_sessions.add(key)
            await self.child.ask("DELETE", f"/v1/topics/{topic}")
            self._deleted_topics.add(topic)
            await asyncio.sleep(self._chance.uniform(0, 2 * self._pause_s))

    # Checks of a bus that has just started.

    async def check(self) -> None:
        """Compare the data of the bus with the ledgers."""
        try:
            for topic in TOPICS:
                stored = (await self.child.messages(topic))[1]
                self.messages.check(topic, stored, self.findings)
                if self.stores is not None and topic == EXPOSED:
                    await self.stores.check_table(dict(stored))
            if self.stores is not None:
                await self.stores.check()
            if self.upkeep is not None:
                await self.upkeep.check()
            await self.check_deleted(self.child, self.findings)
        except ENDED as error:
            self.findings.violated("errors", f"the bus does not answer: {_told(error)}")

    async def check_deleted(
        self, child: BusChild, findings: Findings, damaged: Container[str] = ()
    ) -> None:
        """Deleted topics and sessions are gone. Raises PolybusError.

        A topic whose tombstone is `damaged` may be listed as damaged.
        """
        listed = await child.ask("GET", "/v1/topics")
        names = {
            one["name"]
            for one in listed["topics"]
            if one["name"] not in damaged or not one.get("damaged")
        }
        for topic in sorted(self._deleted_topics & names):
            findings.violated("deleted", f"topic {topic} is back")
        async with child.connected() as connection:
            for key in sorted(self._deleted_sessions):
                try:
                    await ask_on(connection, "PUT", f"/v1/sessions/{key}/topics", {"topics": []})
                except PolybusError as error:
                    if error.code != "session.unknown":
                        raise
                    continue
                findings.violated("deleted", f"session {key} is back")
        if self.stores is not None:
            await self.stores.check_deleted(child, findings, damaged)

    async def finish(self) -> None:
        """Finish what is open, then check everything that must come in the end."""
        try:
            if self._transaction:
                await self._commit()
        except ENDED as error:
            text = f"batch {self.batch} is refused after the restart: {_told(error)}"
            self.findings.violated("transactions", text)
        await self.check()
        if self.session is not None:
            try:
                await self.drain(confirm=True)
            except ENDED as error:
                self.findings.violated("packs", f"the session is not served: {_told(error)}")


def _bound(
    job: Callable[[str, int], Coroutine[Any, Any, None]], scheme: str, number: int
) -> LoadJob:
    return lambda: job(scheme, number)


def _told(error: BaseException) -> str:
    return shown(error) if isinstance(error, PolybusError) else repr(error)


def _staged(topics: dict[str, list[str]]) -> bytes:
    """Messages as a staged file of a transaction."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for topic, values in topics.items():
            for value in values:
                columns = [[topic], [None], [value.encode()], [None]]
                arrays = [
                    pa.array(column, field.type)
                    for column, field in zip(columns, SCHEMA, strict=True)
                ]
                writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
    return bytes(sink.getvalue())
