"""Several nodes over real brokers: what a client began at one node continues at another."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import pytest_asyncio
from cluster_kit import (
    ONE_BROKER,
    KilledNode,
    eventually,
    nodes,
    open_session,
    publish,
    url,
)

from polybus.batch import Batch
from polybus.bench import generator
from polybus.bench.cluster import kafka as confluent
from polybus.bench.cluster.nodes import ONE_TOPIC, NodeBench, rate_of_nodes
from polybus.bench.measure import Bench
from polybus.bench.report import figures_of
from polybus.config import Config
from polybus.edges.node import Node, open_log
from polybus.errors import ConfigError, StorageError
from polybus.log.columns import copy_of
from polybus.log.interface import SHARED, Log, LogCallbacks
from polybus.log.kafka.transacting import KafkaTransaction
from polybus.log.layout import admin_token_path
from polybus.services import cluster_table
from polybus.services.cluster_table import ClusterEntry
from polybus.testing import run_bus
from polybus.testing.kafka import KafkaBrokers

sys.path.insert(0, str(Path(__file__).parents[1] / "edges"))

from commit_kit import stage, values_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(brokers: KafkaBrokers) -> AsyncIterator[list[Node]]:
    """Two nodes for the tests that leave nothing behind."""
    async with nodes(brokers, "pair.", "t", "u") as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as found:
        yield found


async def test_what_arrives_while_a_node_opens_its_log_is_read_there(
    brokers: KafkaBrokers, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"prefix": "early.", **ONE_BROKER}
    has_arrived = threading.Event()
    async with run_bus("t", log=brokers.url, cluster=cluster) as first:

        def open_slowly(config: Config, callbacks: LogCallbacks) -> Log:
            tell = callbacks.on_arrived
            assert tell is not None

            def arrived(arrival: Any) -> None:
                tell(arrival)
                if arrival.topic.topic == "t":
                    has_arrived.set()

            log = open_log(config, replace(callbacks, on_arrived=arrived))
            with httpx.Client() as client:
                client.post(f"{url(first)}/v1/topics/t/messages", content="early")
            assert has_arrived.wait(60)
            return log

        monkeypatch.setattr("polybus.edges.node.open_log", open_slowly)
        async with run_bus("t", log=brokers.url, cluster=cluster) as second:
            await publish(http, url(first), "t", "late")
            path = f"{url(second)}/v1/topics/t/messages?offset=0"

            async def has_late() -> bool:
                return "late" in (await http.get(path)).text

            await eventually(has_late, 60)
            found = (await http.get(path)).json()["messages"]
    assert [one["text"] for one in found] == ["early", "late"]


# Sessions


async def test_a_session_moves_between_nodes_with_its_packs_numbers_and_confirmations(
    pair: list[Node], http: httpx.AsyncClient
) -> None:
    first, second = pair
    a, b = url(first), url(second)
    browser = await open_session(http, a, "t")
    await publish(http, b, "t", "one", "two")
    assert await browser.poll(a)
    await browser.poll(a, hangs=False)
    held = await browser.poll(b, hangs=False)
    assert held == browser.packs
    await publish(http, a, "t", "three")
    while "three" not in browser.texts:
        await browser.poll(b, 1)
    # The one that was confirmed at the other node does not come again.
    assert set(await browser.poll(a, hangs=False)) == set(browser.packs) - {1}
    assert browser.texts == ["one", "two", "three"]
    assert list(browser.packs) == [*range(1, len(browser.packs) + 1)]

    async def is_let_go() -> bool:
        return second.services.inboxes.find(browser.key) is None

    await eventually(is_let_go, 5)


async def test_a_long_poll_ends_when_its_session_moves(
    pair: list[Node], http: httpx.AsyncClient
) -> None:
    first, second = pair
    browser = await open_session(http, url(first), "t")
    waiting = asyncio.create_task(browser.poll(url(first)))

    async def hangs() -> bool:
        return first.http.polls_hanging == 1

    await eventually(hangs, 10)
    assert await browser.poll(url(second), hangs=False) == {}
    assert await asyncio.wait_for(waiting, 10) == {}


async def test_direct_packs_topics_and_the_end_of_a_session_work_at_any_node(
    pair: list[Node], http: httpx.AsyncClient
) -> None:
    first, second = pair
    a, b = url(first), url(second)
    browser = await open_session(http, a, "t")
    sent = await http.post(f"{b}/v1/sessions/{browser.key}/packs", json=[["hello", "direct"]])
    assert sent.status_code < 300, sent.text
    changed = await http.put(f"{a}/v1/sessions/{browser.key}/topics", json={"topics": ["u"]})
    assert changed.json() == {"topics": ["u"]}
    await publish(http, a, "u", "one")
    while "one" not in browser.texts:
        await browser.poll(b)
    assert browser.texts == ["direct", "one"]
    assert (await http.delete(f"{a}/v1/sessions/{browser.key}")).status_code < 300
    gone = await browser._http.get(f"{b}/msgstream?transport=shortpolling&sessionKey={browser.key}")
    assert gone.content == b'{"0":[["session.unset","noSession"]]}'


async def test_a_killed_node_leaves_its_sessions_exactly_as_their_clients_have_seen_them(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with nodes(brokers, prefix, "t", count=1) as (living,):
        b = url(living)
        async with KilledNode(brokers, prefix, tmp_path / "n") as killed:
            browser = await open_session(http, killed.url, "t")
            expected = []
            for number in range(5):
                await publish(http, b, "t", f"{number}")
                expected.append(f"{number}")
                while f"{number}" not in browser.texts:
                    await browser.poll(killed.url, *([1, 2] if number == 3 else ()))
            await killed.kill()
        # Confirmed numbers may come again, with what they had; the others come for sure.
        shown = dict(browser.packs)
        again = await browser.poll(b, hangs=False)
        assert {3, 4, 5} <= set(again) <= set(shown)
        await publish(http, b, "t", "after")
        while "after" not in browser.texts:
            await browser.poll(b, *again)
        assert browser.texts == [*expected, "after"]
        assert sorted(browser.packs) == [*range(1, 7)]


async def test_a_broadcast_reaches_the_sessions_of_all_nodes_once(
    pair: list[Node], http: httpx.AsyncClient
) -> None:
    first, second = pair
    a, b = url(first), url(second)
    here, there, moving = [await open_session(http, node, "t") for node in (a, b, a)]
    sent = await http.post(f"{a}/v1/broadcast", json=[["hello", "all"]])
    assert sent.status_code == 202, sent.text
    assert sent.json()["sessions"] >= 3
    for browser, node in ((here, a), (there, b), (moving, b)):
        while "all" not in browser.texts:
            await browser.poll(node, hangs=False)
        await browser.poll(a, hangs=False)
        assert browser.texts == ["all"]
        assert (await http.delete(f"{b}/v1/sessions/{browser.key}")).status_code < 300


async def test_a_session_keeps_its_numbers_if_a_save_comes_after_it_counted_as_failed(
    brokers: KafkaBrokers,
    pair: list[Node],
    http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All brokers pause for longer than a node waits for them."""
    monkeypatch.setattr(cluster_table, "WRITE_TIMEOUT_S", 1.0)
    a, b = map(url, pair)
    browser = await open_session(http, a, "t")
    packs = f"{a}/v1/sessions/{browser.key}/packs"
    for number in range(1, brokers.count + 1):
        brokers.signal(number, signal.SIGSTOP)
    try:
        for text in ("one", "two"):
            refused = await http.post(packs, json=[["hello", text]], timeout=60)
            assert refused.status_code == 503, refused.text
    finally:
        for number in range(1, brokers.count + 1):
            brokers.signal(number, signal.SIGCONT)
    monkeypatch.undo()
    assert (await http.post(packs, json=[["hello", "three"]], timeout=60)).status_code == 202
    for node in (a, b, a):
        while "three" not in browser.texts:
            await browser.poll(node)
        await browser.poll(node, hangs=False)
    # What was refused may come, once, and every number means the same at both nodes.
    assert len(set(browser.texts)) == len(browser.texts)
    assert [one for one in browser.texts if one != "three"] in (
        ["one", "two"],
        ["one"],
        ["two"],
        [],
    )
    assert list(browser.packs) == [*range(1, len(browser.packs) + 1)]


# Consumers


async def test_consumers_are_known_and_forgotten_at_every_node(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient
) -> None:
    async with nodes(brokers, prefix, "t") as (first, second):
        a, b = url(first), url(second)
        await publish(http, a, "t", "one", "two")
        epoch = first.bus.log.bounds("t").epoch

        async def report(node: str, offset: int) -> None:
            body = {"kind": "etl", "positions": {"t": {"epoch": epoch, "offset": offset}}}
            answer = await http.put(f"{node}/v1/consumers/g", json=body)
            assert answer.status_code == 204, answer.text

        async def becomes(node: str, expected: list[int]) -> None:
            async def is_so() -> bool:
                found = (await http.get(f"{node}/v1/consumers")).json()["consumers"]
                return [one["topics"][0]["offset"] for one in found] == expected

            await eventually(is_so, 5)

        await report(a, 1)
        await becomes(b, [1])
        await report(b, 2)
        await becomes(a, [2])
        async with nodes(brokers, prefix, count=1) as (third,):
            await becomes(url(third), [2])
        assert (await http.delete(f"{a}/v1/consumers/g")).status_code == 204
        await becomes(b, [])
        await becomes(a, [])


# Transactions


class Commits:
    """Commits batches of one producer at any node."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, node: str, data: Path, batch: int, **topics: list[bytes]) -> httpx.Response:
        files = [stage(data, "p", batch, topics)]
        body = {"producer": "p", "query": "q", "batch": batch, "files": files}
        return await self._http.post(f"{node}/v1/commits", json=body, timeout=60)

    async def done(self, node: Node, batch: int, **topics: list[bytes]) -> Any:
        answer = await self.ask(url(node), node.data, batch, **topics)
        assert answer.status_code == 200, answer.text
        return answer.json()


async def stored(node: Node, topic: str) -> list[bytes]:
    await asyncio.to_thread(node.bus.log.catch_up, topic)
    return await asyncio.to_thread(values_of, node.bus.log, topic)


async def test_a_transaction_is_done_once_whichever_node_is_asked(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient
) -> None:
    async with nodes(brokers, prefix, "t", "u") as (a, b):
        commits = Commits(http)
        first = await commits.done(a, 0, t=[b"1", b"2"], u=[b"3"])
        again = await commits.done(b, 0, t=[b"1", b"2"], u=[b"3"])
        assert again["offsets"] == first["offsets"]
        await publish(http, url(a), "t", "between")
        await commits.done(b, 1, t=[b"4"])
        await commits.done(a, 2, t=[b"5"])
        for node in (a, b):
            assert await stored(node, "t") == [b"1", b"2", b"between", b"4", b"5"]
            assert await stored(node, "u") == [b"3"]
            answer = await http.get(f"{url(node)}/v1/commits/p")
            assert answer.json()["batch"] == 2
        refused = await commits.ask(url(a), a.data, 9, t=[b"6"])
        assert refused.json()["code"] == "commit.gap"
        # A subscriber that catches up is not stopped by what a transaction leaves in the offsets.
        browser = await open_session(http, url(b), "t", **{"from": "earliest"})
        while "5" not in browser.texts:
            await browser.poll(url(b))
        assert browser.texts == ["1", "2", "between", "4", "5"]


async def test_a_node_that_has_not_read_the_last_transaction_reads_it_before_it_refuses_another(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nodes(brokers, prefix, "t") as (a, b):
        commits = Commits(http)
        await commits.done(a, 0, t=[b"1"])
        # Whatever arrives waits until the node makes sure that it has everything.
        late: list[Batch] = []
        transactions: Any = a.services.transactions
        loop = asyncio.get_running_loop()
        deliver, settle = transactions.deliver, transactions._cluster.settle

        def arrive(topic: str) -> None:
            settle(topic)
            loop.call_soon_threadsafe(lambda: [deliver(one) for one in late])

        monkeypatch.setattr(transactions, "deliver", lambda batch, *_: late.append(copy_of(batch)))
        monkeypatch.setattr(transactions._cluster, "settle", arrive)
        await commits.done(b, 1, t=[b"2"])
        await commits.done(a, 2, t=[b"3"])
        assert await stored(a, "t") == [b"1", b"2", b"3"]


async def test_a_transaction_of_many_parts_is_visible_as_a_whole(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient
) -> None:
    limits = {"transaction-part-bytes": 2000}
    async with nodes(brokers, prefix, "t", count=1, limits=limits) as (node,):
        values = [b"%d" % number + b"x" * 1000 for number in range(10)]
        answer = await http.post(
            f"{url(node)}/v1/commits",
            json={
                "producer": "p",
                "query": "q",
                "batch": 0,
                "files": [stage(node.data, "p", 0, {"t": [value]}) for value in values],
            },
        )
        assert answer.status_code == 200, answer.text
        assert sorted(await stored(node, "t")) == sorted(values)


async def test_ranges_over_http_have_each_message_once_where_transactions_leave_gaps(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient
) -> None:
    """Offsets 2, 6 and 8 are the ends of transactions."""
    async with nodes(brokers, prefix, "t", count=1) as (node,):
        await Commits(http).done(node, 0, t=[b"0", b"1"])
        await publish(http, url(node), "t", "3")
        await Commits(http).done(node, 1, t=[b"4", b"5"])
        await Commits(http).done(node, 2, t=[b"7"])
        where = f"{url(node)}/v1/topics/t/messages"

        async def ask(start: int, **query: int) -> tuple[list[int], int]:
            answer = (await http.get(where, params={"offset": start, **query})).json()
            found = answer["messages"]
            assert [one["value"] for one in found] == [one["offset"] for one in found]
            return [one["offset"] for one in found], answer["next"]

        every = [0, 1, 3, 4, 5, 7]
        for start in range(10):
            for stop in range(start, 10):
                within = [one for one in every if start <= one < stop]
                assert await ask(start, stop=stop) == (within, stop)
                query = f"offset={start}&stop={stop}&columns=offset"
                arrow = await http.get(
                    f"{where}?{query}", headers={"accept": "application/vnd.apache.arrow.stream"}
                )
                rows = pa.ipc.open_stream(arrow.content).read_all()
                assert rows.column("offset").to_pylist() == within
            one = await http.get(f"{where}/{start}")
            assert one.status_code == (200 if start in every else 404)
        last = (await http.get(where, params={"offset": 7})).json()["messages"][0]
        shown = (await http.get(f"{url(node)}/v1/topics/t")).json()
        assert shown["last-time"] == last["timestamp"]
        # A limit counts messages, and who reads on from the end waits for the next message.
        assert await ask(2, limit=1) == ([3], 4)
        assert await ask(2, limit=4) == ([3, 4, 5, 7], 8)
        assert await ask(8, limit=4) == ([], 9)


class Died(BaseException):
    """A node that is gone: it does not abort what it has begun."""


async def test_a_node_that_dies_after_any_write_of_a_transaction_leaves_all_of_it_or_nothing(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn after: begin, add topics, each topic's messages, add `$commits`, record, commit."""
    async with nodes(brokers, prefix, "t", "u") as (a, b):
        commits = Commits(http)
        real = KafkaTransaction._until_done
        for step in range(1, 8):
            left = step

            async def until_done(self: KafkaTransaction, ask: Any) -> None:
                nonlocal left
                await real(self, ask)
                left -= 1
                if left == 0:
                    raise Died
                if left < 0:
                    # A dead node asks for nothing more.
                    raise OSError

            with monkeypatch.context() as patched:
                patched.setattr(KafkaTransaction, "_until_done", until_done)
                patched.setattr(
                    "polybus.log.kafka.log.BlockingTransaction.abort", lambda self: None
                )
                with contextlib.suppress(httpx.HTTPError):
                    async with httpx.AsyncClient() as other:
                        texts = [b"%d" % step]
                        await Commits(other).ask(url(a), a.data, step, t=texts, u=texts)
            assert left <= 0
            await commits.done(b, step, t=[b"%d" % step], u=[b"%d" % step])
        for node in (a, b):
            for topic in ("t", "u"):
                assert await stored(node, topic) == [b"%d" % step for step in range(1, 8)]


async def test_a_node_that_is_killed_before_a_commit_publishes_nothing_and_another_takes_over(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    patch = (
        "from polybus.log.kafka.transacting import KafkaTransaction\nKafkaTransaction.end = die\n"
    )
    async with nodes(brokers, prefix, "t", count=1) as (living,):
        commits = Commits(http)
        async with KilledNode(brokers, prefix, tmp_path / "n", patch) as killed:
            with pytest.raises(httpx.HTTPError):
                await commits.ask(killed.url, killed.data, 0, t=[b"1"])
        await commits.done(living, 0, t=[b"1"])
        assert await stored(living, "t") == [b"1"]


# Accounts


async def test_accounts_passwords_tokens_and_grants_are_known_at_every_node(
    brokers: KafkaBrokers, prefix: str
) -> None:
    async with nodes(brokers, prefix) as (a, b), httpx.AsyncClient() as http:

        def admin(node: Node) -> dict[str, str]:
            return {"authorization": f"Bearer {admin_token_path(node.data).read_text().strip()}"}

        async def ask(node: Node, method: str, path: str, body: Any = None) -> Any:
            answer = await http.request(
                method, f"{url(node)}/v1/accounts{path}", json=body, headers=admin(node)
            )
            assert answer.status_code < 300, answer.text
            return answer.json() if answer.content else None

        async def may(node: Node, token: str) -> bool:
            headers = {"authorization": f"Bearer {token}"}
            return (await http.get(f"{url(node)}/v1/topics", headers=headers)).status_code == 200

        async def becomes(node: Node, token: str, expected: bool) -> None:
            async def is_so() -> bool:
                return await may(node, token) is expected

            await eventually(is_so, 2)

        await ask(a, "POST", "", {"name": "shop", "password": "long enough 1"})

        async def is_known() -> bool:
            found = await http.get(f"{url(b)}/v1/accounts/shop", headers=admin(b))
            return found.status_code == 200

        await eventually(is_known, 2)
        # Both nodes change it at once: nothing is lost.
        tokens = await asyncio.gather(
            *(ask(node, "POST", "/shop/tokens", {}) for node in (a, b, a, b))
        )
        for token in tokens:
            await becomes(a, token["token"], True)
            await becomes(b, token["token"], True)
        headers = {"authorization": f"Bearer {tokens[0]['token']}"}
        made = await http.post(f"{url(a)}/v1/sessions", json={"topics": []}, headers=headers)
        polled = f"/msgstream?transport=shortpolling&sessionKey={made.json()['sessionKey']}"
        # It moves, and stays the token's.
        assert (await http.get(f"{url(b)}{polled}")).status_code == 204
        await ask(b, "DELETE", f"/shop/tokens/{tokens[0]['id']}")
        await becomes(a, tokens[0]["token"], False)
        for node in (a, b):
            assert b"session.unset" in (await http.get(f"{url(node)}{polled}")).content
        await ask(a, "POST", "", {"name": "office"})
        await ask(b, "DELETE", "/shop")
        await becomes(a, tokens[1]["token"], False)
        async with nodes(brokers, prefix, count=1) as (third,):
            found = await ask(third, "GET", "")
            assert [one["name"] for one in found["accounts"]] == ["default", "office"]


async def test_entries_that_no_node_can_read_stop_none(brokers: KafkaBrokers, prefix: str) -> None:
    async with nodes(brokers, prefix, count=1) as (a,):
        bad = [
            ClusterEntry("account", "shop", b"{"),
            ClusterEntry("session", "zz/n", b"\xc1"),
            ClusterEntry("consumer", "g", b"[]"),
            ClusterEntry("of-a-newer-version", "x", b"1"),
        ]
        await a._cluster_table.write(bad)
        async with nodes(brokers, prefix, count=1) as (b,):
            for node in (a, b):
                assert list(node.accounts.store.damaged) == ["shop"]
                assert SHARED not in node.bus.log.topics()


# Security


async def test_a_node_uses_tls_and_a_login_to_the_brokers(
    brokers: KafkaBrokers, prefix: str, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    login = {"user": "bus", "password-file": str(brokers.folder / "password"), "mechanism": "PLAIN"}
    cluster: dict[str, Any] = {**ONE_BROKER, "prefix": prefix, "login": login}
    cluster["tls"] = {"ca": str(brokers.folder / "authority.pem")}
    async with run_bus("t", log=brokers.secure_url, cluster=cluster) as node:
        await publish(http, url(node), "t", "safe")
        assert await stored(node, "t") == [b"safe"]
    (tmp_path / "wrong").write_text("wrong")
    cluster["login"] = login | {"password-file": str(tmp_path / "wrong")}
    with pytest.raises(StorageError) as refused:
        async with run_bus(log=brokers.secure_url, cluster=cluster):
            pass
    assert refused.value.code == "log.unreachable"
    cluster["login"] = login | {"password-file": str(tmp_path / "missing")}
    with pytest.raises(ConfigError) as missing:
        async with run_bus(log=brokers.secure_url, cluster=cluster):
            pass
    assert missing.value.code == "config.cluster"


# The benchmark


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(program=generator.compiled(), data_root=tmp_path, rounds=1, run_s=0.1)


async def test_the_benchmark_publishes_through_nodes_beside_kafka_itself(
    brokers: KafkaBrokers, bench: Bench, tmp_path: Path
) -> None:
    own = NodeBench(program=bench.program, data_root=tmp_path, rounds=1, run_s=0.1, kafka=brokers)
    scenario = replace(ONE_TOPIC, entries=ONE_TOPIC.entries[:1])
    (figure,) = figures_of(scenario, await asyncio.to_thread(own.measure, scenario, print))
    assert figure.value and not figure.error
    assert figure.shown_target == "≥ 0.80 M/s"
    peer = await asyncio.to_thread(confluent.measure_producing, bench, brokers, print, like=figure)
    assert peer.value and peer.who == confluent.WHO
    assert await asyncio.to_thread(rate_of_nodes, bench, brokers, 2) > 0


async def test_the_benchmark_reads_every_message_of_a_topic(
    brokers: KafkaBrokers, bench: Bench
) -> None:
    read = asyncio.to_thread(confluent.measure_reading, bench, brokers, 20_000, print)
    ours, peer = await read
    assert ours.value and peer.value
    assert peer.ratio == ours.value / peer.value
