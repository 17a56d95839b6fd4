"""Faults in a cluster: three Kafka brokers and three nodes, of which some die or pause under load.

The first node reaches the brokers over links, which are cut at times, while clients still reach it.
The load does not end with a node: its clients continue at another. After each fault everything is
running again, and at the end of a round every node must have the same messages in one order.
"""

import asyncio
import contextlib
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, cast

from polybus.client.options import ClientOptions, Credentials
from polybus.errors import PolybusError
from polybus.testing.kafka import KafkaBrokers
from polybus.torture.bus.child import TOPICS, BusChild, shown
from polybus.torture.chances import split
from polybus.torture.checks import check_exceptions
from polybus.torture.faults.cluster.links import BrokerLink
from polybus.torture.load.load import ENDED, Load, LoadJob
from polybus.torture.report import Findings

NODES = 3
LOAD_S = (0.5, 3.0)
DOWN_S = (0.0, 3.0)
PAUSE_S = (0.5, 12.0)
"""Brokers count one as dead after 9 s."""
HEALTHY_S_MAX = 120.0
SAME_S_MAX = 60.0
CUT_S = (0.5, 20.0)
"""A log counts as unreachable after 15 s."""
FAULTS = (
    "node",
    "broker",
    "leader",
    "controller",
    "pause",
    "cut",
    "two brokers",
    "node and broker",
)


async def node_round(
    folder: Path, chance: random.Random, count: int, faults: Sequence[str] = FAULTS
) -> Findings:
    """Do `count` faults to one cluster under load."""
    findings = Findings()
    brokers = KafkaBrokers(folder / "kafka", is_brief=True)
    links = [BrokerLink(target) for target in brokers.far_targets]
    brokers.advertise_far([await one.open() for one in links])
    urls = [brokers.far_url, *[brokers.url] * (NODES - 1)]
    nodes = [
        BusChild(folder / f"node-{number}", settings={"log": url})
        for number, url in enumerate(urls, 1)
    ]
    try:
        await asyncio.to_thread(brokers.start)
        are_ready = await asyncio.gather(*[node.start() for node in nodes])
        for node, is_ready in zip(nodes, are_ready, strict=True):
            if not is_ready:
                findings.violated("starts", f"no start; see {node.folder}/bus.log")
                return findings
        load = ClusterLoad(AnyNode(nodes, split(chance)), split(chance), findings)
        running = asyncio.create_task(load.run())
        done: Counter[str] = Counter()
        for one in [split(chance) for _ in range(count)]:
            await asyncio.sleep(one.uniform(*LOAD_S))
            fault = one.choice(faults)
            done[fault] += 1
            if fault == "cut":
                await _cut(one, links)
            else:
                await _inject(one, fault, brokers, nodes, findings)
            findings.count += 1
            if not await _is_healthy(nodes, findings):
                break
        findings.notes.append(", ".join(f"{fault}: {done[fault]}" for fault in sorted(done)))
        load.stopping.set()
        await running
        await load.finish()
        for node in nodes:
            check_exceptions(node, findings)
    finally:
        for node in nodes:
            node.kill()
        await asyncio.to_thread(brokers.stop)
        for link in links:
            await link.close()
    return findings


async def _cut(chance: random.Random, links: list[BrokerLink]) -> None:
    """Cut a node off from the brokers for a while."""
    for link in links:
        link.cut()
    await asyncio.sleep(chance.uniform(*CUT_S))
    resets = chance.random() < 0.5
    for link in links:
        link.heal(resets=resets)


async def _chosen(chance: random.Random, fault: str, brokers: KafkaBrokers) -> list[int]:
    """The brokers that a fault concerns."""
    numbers = chance.sample(range(1, brokers.count + 1), 2 if fault == "two brokers" else 1)
    aimed = None
    if fault == "leader":
        aimed = await _leader(brokers, chance.choice(TOPICS))
    elif fault == "controller":
        aimed = brokers.controller()
    return numbers if aimed is None else [aimed]


async def _leader(brokers: KafkaBrokers, topic: str) -> int | None:
    # Only the extra `cluster` has it.
    from aiokafka.admin import AIOKafkaAdminClient

    client = AIOKafkaAdminClient(bootstrap_servers=brokers.addresses)
    await client.start()
    try:
        (found,) = await client.describe_topics([topic])
    finally:
        await client.close()
    leaders = [one["leader"] for one in found["partitions"]]
    return leaders[0] if leaders and leaders[0] > 0 else None


async def _inject(
    chance: random.Random,
    fault: str,
    brokers: KafkaBrokers,
    nodes: list[BusChild],
    findings: Findings,
) -> None:
    """Do one fault, wait, and bring everything back."""
    numbers = await _chosen(chance, fault, brokers)
    is_broker = fault != "node"
    if fault == "pause":
        brokers.signal(numbers[0], signal.SIGSTOP)
        await asyncio.sleep(chance.uniform(*PAUSE_S))
        brokers.signal(numbers[0], signal.SIGCONT)
        return
    node = chance.choice(nodes)
    if "node" in fault:
        node.kill()
    if is_broker:
        for number in numbers:
            await asyncio.to_thread(brokers.kill, number)
    await asyncio.sleep(chance.uniform(*DOWN_S))
    if is_broker:
        for number in numbers:
            brokers.launch(number)
        for number in numbers:
            await asyncio.to_thread(brokers.wait, number)
    if "node" in fault and not await node.start():
        findings.violated("starts", f"no start after {fault}; see {node.folder}/bus.log")


async def _is_healthy(nodes: list[BusChild], findings: Findings) -> bool:
    """Wait until every node can store messages again, without help."""
    for node in nodes:
        if not await _becomes_true(partial(_answers, node), HEALTHY_S_MAX):
            findings.violated("starts", f"{node.folder.name} is not healthy again")
            return False
    return True


async def _answers(node: BusChild) -> bool:
    await node.ask("GET", "/healthz")
    return True


async def _becomes_true(is_so: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(PolybusError, OSError):
                    if await is_so():
                        return True
                await asyncio.sleep(0.1)
    return False


class AnyNode:
    """The bus interface for the load: a different node for each use, but the same within `one`."""

    def __init__(self, nodes: list[BusChild], chance: random.Random) -> None:
        self.nodes = nodes
        self._chance = chance
        self._chosen: ContextVar[BusChild | None] = ContextVar("chosen", default=None)

    @contextmanager
    def one(self) -> Iterator[None]:
        token = self._chosen.set(self._chance.choice(self.nodes))
        try:
            yield
        finally:
            self._chosen.reset(token)

    @property
    def _node(self) -> BusChild:
        return self._chosen.get() or self._chance.choice(self.nodes)

    @property
    def port(self) -> int:
        return self._node.port

    @property
    def udp_port(self) -> int:
        return self._node.udp_port

    @property
    def queue_port(self) -> int:
        return self._node.queue_port

    def options(self, scheme: str = "http") -> ClientOptions:
        return self._node.options(scheme)

    def connected(self, credentials: Credentials | None = None) -> AbstractAsyncContextManager[Any]:
        return self._node.connected(credentials)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        return await self._node.ask(method, path, body)

    async def messages(self, topic: str) -> tuple[int, list[tuple[int, str]]]:
        return await self._node.messages(topic)


class ClusterLoad(Load):
    """Clients that continue at another node when theirs has ended."""

    def __init__(self, nodes: AnyNode, chance: random.Random, findings: Findings) -> None:
        # It has everything that clients need of a bus.
        super().__init__(cast(BusChild, nodes), chance, findings)
        self._any = nodes

    async def _until_ended(self, job: LoadJob) -> None:
        while not self.stopping.is_set():
            await super()._until_ended(job)
            await self._pause()

    async def _commit(self) -> None:
        # A staged file is committed at its node.
        with self._any.one():
            await super()._commit()

    async def _make_and_delete(self) -> None:
        # Other nodes know a topic some time later.
        with self._any.one():
            await super()._make_and_delete()

    async def check(self) -> None:
        """Check that every node has the same messages, and that they match the ledger."""
        for topic in TOPICS:
            if not await _becomes_true(partial(self._is_same, topic), SAME_S_MAX):
                self.findings.violated("order", f"{topic}: the nodes have different messages")
                continue
            messages = (await self._any.messages(topic))[1]
            self.messages.check(topic, messages, self.findings, of_cluster=True)
        receipts = sum(map(len, self.messages.receipted.values()))
        self.findings.notes.append(f"{receipts} messages with a receipt, the same at all nodes")
        try:
            await self.check_deleted(self.child, self.findings)
        except ENDED as error:
            text = shown(error) if isinstance(error, PolybusError) else repr(error)
            self.findings.violated("errors", f"the node does not answer: {text}")

    async def _is_same(self, topic: str) -> bool:
        found = [await node.messages(topic) for node in self._any.nodes]
        return all(one == found[0] for one in found)
