"""Whatever the bus has answered is on disk: every route that changes something, every receipt.

Each step says before its request which facts may change, and after the answer what they must be. A
start after each end of the process must show all of them, and `$audit` must have each change that
it records: after the change, and before the answer.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from crash_kit import Crash, Run, crashes
from opened_kit import all_messages, on_node, running_node
from opened_kit import messages as messages_of
from staging_kit import stage

from polybus.client import connect
from polybus.edges.http.routes import ACTIONS, OPERATIONS
from polybus.edges.node import Node
from polybus.services.accounts import passwords
from polybus.services.audit import AUDIT_TOPIC

pytestmark = pytest.mark.slow

TOPICS = ["a", "b"]
SCHEMES = ("boson", "boson+properties", "goms", "http")


Step = Callable[["Requests"], Awaitable[Any]]


class Requests:
    """Sends requests to a bus, and says what each answer has promised."""

    def __init__(self, run: Run, node: Node, http: httpx.AsyncClient) -> None:
        self.run = run
        self.node = node
        self.http = http
        self.keys: dict[str, str] = {}
        self._audited = 0

    async def do(self, route: tuple[str, str], step: Step) -> None:
        """Take a step, whose change is the next that `$audit` has."""
        action = ACTIONS.get(route)
        if action is None:
            await step(self)
            return
        fact = f"audit {self._audited} {action}"
        self._audited += 1
        self.run.acknowledge("will", fact)
        await step(self)
        self.run.acknowledge("is", fact)

    async def ask(
        self, method: str, path: str, *, now: str = "", gone: str = "", **request: Any
    ) -> Any:
        """The answer to a request, after which a fact is `now` true, or `gone`."""
        await self.promised(self.http.request(method, path, **request), now=now, gone=gone)

    async def promised(self, request: Awaitable[Any], *, now: str = "", gone: str = "") -> Any:
        for kind, fact in (("will", now), ("will-not", gone)):
            if fact:
                self.run.acknowledge(kind, fact)
        answer = await request
        if isinstance(answer, httpx.Response):
            assert answer.is_success, answer.text
        for kind, fact in (("is", now), ("not", gone)):
            if fact:
                self.run.acknowledge(kind, fact)
        return answer

    @property
    def admin(self) -> dict[str, str]:
        token = (self.run.data / "admin.token").read_text().strip()
        return {"authorization": f"Bearer {token}"}

    async def as_admin(self, method: str, path: str, **given: Any) -> None:
        await self.ask(method, f"/v1/accounts{path}", headers=self.admin, **given)

    async def make_token(self, path: str, **given: Any) -> None:
        made = self.http.post(path, json={}, **given)
        answer = await self.promised(made, now="token of shop")
        self.keys["token"] = answer.json()["id"]

    async def open(self, name: str, *topics: str) -> None:
        """Open a session; its number on disk is not known before."""
        answer = await self.http.post("/v1/sessions", json={"topics": topics})
        key = self.keys[name] = answer.json()["sessionKey"]
        session = self.node.services.inboxes.find(key)
        assert session is not None
        self.run.acknowledge("is", f"session {session.number}")


PASSWORD = "another"
GRANT = {"to": "default", "topics": "x"}
STEPS: dict[tuple[str, str], Step] = {
    ("POST", "/v1/topics"): lambda ask: ask.ask(
        "POST", "/v1/topics", json={"name": "new"}, now="topic new"
    ),
    ("POST", "/v1/topics/{topic}/messages"): lambda ask: ask.ask(
        "POST", "/v1/topics/a/messages", content=b"published", now="message published"
    ),
    ("PUT", "/v1/topics/{topic}/blob"): lambda ask: ask.ask(
        "PUT", "/v1/topics/a/blob", content=b"put", now="blob put"
    ),
    ("PATCH", "/v1/topics/{topic}"): lambda ask: ask.ask(
        "PATCH", "/v1/topics/a", json={"retention-bytes": 10**9}, now="retention of a"
    ),
    ("POST", "/v1/sessions"): lambda ask: ask.open("first", "a", "new"),
    ("PUT", "/v1/sessions/{key}/topics"): lambda ask: ask.ask(
        *("PUT", f"/v1/sessions/{ask.keys['first']}/topics"),
        json={"topics": ["b", "new"]},
        now="1 follows b",
        gone="1 follows a",
    ),
    ("POST", "/v1/sessions/{key}/packs"): lambda ask: ask.ask(
        *("POST", f"/v1/sessions/{ask.keys['first']}/packs"),
        json=[["direct", "posted"]],
        now="1 has posted",
    ),
    ("POST", "/v1/broadcast"): lambda ask: ask.ask(
        "POST", "/v1/broadcast", json=[["direct", "broadcast"]], now="1 has broadcast"
    ),
    ("PUT", "/v1/consumers/{group}"): lambda ask: ask.ask(
        "PUT", "/v1/consumers/group", json={"kind": "test"}, now="consumer group"
    ),
    ("DELETE", "/v1/consumers/{group}"): lambda ask: ask.ask(
        "DELETE", "/v1/consumers/group", gone="consumer group"
    ),
    ("POST", "/v1/staging/{producer}/{file}"): lambda ask: ask.ask(
        *("POST", f"/v1/staging/upload/0-{'1' * 32}.arrows?end=true"),
        content=b"some bytes",
        now="staged upload",
    ),
    ("DELETE", "/v1/staging/{producer}/{file}"): lambda ask: ask.ask(
        "DELETE", f"/v1/staging/upload/0-{'1' * 32}.arrows", gone="staged upload"
    ),
    ("POST", "/v1/commits"): lambda ask: ask.ask(
        *("POST", "/v1/commits"),
        json={
            **{"producer": "spark", "query": "query", "batch": 0},
            "files": [stage(ask.run.data, "spark", 0, [("a", "committed")])],
        },
        now="message committed",
    ),
    ("DELETE", "/v1/topics/{topic}"): lambda ask: ask.ask(
        "DELETE", "/v1/topics/new", gone="topic new", now="1 has topic.deleted"
    ),
    ("DELETE", "/v1/sessions/{key}"): lambda ask: _open_and_delete(ask, by_key=True),
    ("DELETE", "/v1/session/{id}"): lambda ask: _open_and_delete(ask, by_key=False),
    ("POST", "/v1/accounts"): lambda ask: ask.as_admin(
        "POST", "", json={"name": "shop", "password": "pw"}, now="account shop"
    ),
    ("PUT", "/v1/accounts/{account}/password"): lambda ask: ask.as_admin(
        "PUT", "/shop/password", json={"password": PASSWORD}, now="password of shop"
    ),
    ("POST", "/v1/accounts/{account}/grants"): lambda ask: ask.as_admin(
        "POST", "/shop/grants", json={**GRANT, "rights": ["publish"]}, now="grant of shop"
    ),
    ("DELETE", "/v1/accounts/{account}/grants"): lambda ask: ask.as_admin(
        "DELETE", "/shop/grants", json=GRANT, gone="grant of shop"
    ),
    ("POST", "/v1/accounts/{account}/tokens"): lambda ask: ask.make_token(
        "/v1/accounts/shop/tokens", headers=ask.admin
    ),
    ("DELETE", "/v1/accounts/{account}/tokens/{id}"): lambda ask: ask.as_admin(
        "DELETE", f"/shop/tokens/{ask.keys['token']}", gone="token of shop"
    ),
    ("POST", "/v1/tokens"): lambda ask: ask.make_token("/v1/tokens", auth=("shop", PASSWORD)),
    ("DELETE", "/v1/tokens/{id}"): lambda ask: ask.ask(
        *("DELETE", f"/v1/tokens/{ask.keys['token']}"),
        auth=("shop", PASSWORD),
        gone="token of shop",
    ),
    ("POST", "/v1/signup"): lambda ask: ask.ask(
        "POST", "/v1/signup", json={"name": "guest", "password": "pw"}, now="account guest"
    ),
    ("DELETE", "/v1/accounts/{account}"): lambda ask: _delete_account(ask),
}
# They begin or end what lives in memory: a query, a connection, a replay (what it has published
# is a transaction of its own), the pipeline's driver, or the packs that a connection was shown.
NOTHING_SAVED = {
    ("POST", "/v1/sql"),
    ("DELETE", "/v1/sql/{id}"),
    ("DELETE", "/v1/connections/{id}"),
    ("POST", "/v1/replays"),
    ("POST", "/v1/undelivered/replay"),
    ("DELETE", "/v1/replays/{id}"),
    ("POST", "/v1/pipelines/stop"),
    ("POST", "/v1/pipelines/start"),
    ("POST", "/v1/pipelines/refresh"),
    ("POST", "/v1/session/{id}/redeliver"),
}


async def _open_and_delete(ask: Requests, *, by_key: bool) -> None:
    await ask.open("ended", "a")
    session = ask.node.services.inboxes.find(ask.keys["ended"])
    assert session is not None
    path = f"/v1/sessions/{ask.keys['ended']}" if by_key else f"/v1/session/{session.digest.hex()}"
    await ask.ask("DELETE", path, gone=f"session {session.number}")


async def _delete_account(ask: Requests) -> None:
    ask.run.acknowledge("may", "password of shop")
    await ask.as_admin("DELETE", "/shop", gone="account shop")


def everything(run: Run) -> None:
    async def main() -> None:
        connectors = [{"port": 0}]
        settings = {"topics": TOPICS, "connectors": connectors, "accounts": {"signup": True}}
        async with running_node(run.data, **settings) as node:
            base = f"http://127.0.0.1:{node.tcp_port}"
            async with httpx.AsyncClient(base_url=base) as http:
                run.resume()
                ask = Requests(run, node, http)
                for route, step in STEPS.items():
                    await ask.do(route, step)
                for scheme in SCHEMES:
                    async with connect(f"{scheme}://127.0.0.1:{node.tcp_port}") as client:
                        receipt = client.publish("b", f"by {scheme}", receipt=True)
                        await ask.promised(receipt, now=f"message by {scheme}")
                run.pause()

    run.pause()
    asyncio.run(main())


def look(data: Path) -> Any:
    """All facts."""
    staged = list(data.glob("staging/*/*"))

    async def shown(node: Node) -> list[str]:
        messages = all_messages(node.bus.log)
        audited = map(json.loads, messages_of(node.bus.log, AUDIT_TOPIC))
        facts = [f"audit {index} {one['action']}" for index, one in enumerate(audited)]
        facts += [f"topic {topic}" for topic in messages]
        facts += [f"message {value}" for values in messages.values() for value in values]
        facts += [f"blob {text}" for text in await blobs_of(node, messages)]
        settings = [(topic, node.bus.log.settings(topic)) for topic in messages]
        facts += [f"retention of {topic}" for topic, one in settings if one.retention_bytes]
        facts += [f"consumer {one.group}" for one in node.services.consumers.views()]
        facts += [f"staged {path.parent.name}" for path in staged]
        for account in node.accounts.store.accounts.values():
            facts.append(f"account {account.name}")
            facts += [f"token of {account.name}"] * len(account.tokens)
            facts += [f"grant of {account.name}"] * len(account.grants)
            if account.password and has_password(account.password):
                facts.append(f"password of {account.name}")
        for session in node.services.inboxes.sessions():
            packs = await node.services.inboxes.collect(session, 0)
            text = b"".join(content for _, content in packs).decode()
            facts += [f"session {session.number}"]
            facts += [f"{session.number} follows {topic}" for topic in session.follows]
            for word in ("posted", "broadcast", "topic.deleted"):
                facts += [f"{session.number} has {word}"] * text.count(word)
        return sorted(facts)

    return on_node(shown, data)


@functools.cache
def has_password(stored: str) -> bool:
    """Whether this is the hash of the new password: most disks have the same few."""
    return passwords._verify(stored, PASSWORD)


async def blobs_of(node: Node, messages: dict[str, list[str]]) -> list[str]:
    """The content of every blob that a message refers to."""
    found = []
    for topic, values in messages.items():
        for value in values:
            if value.startswith('{"reference"'):
                blobs = node.services.blobs
                blob = blobs.of_message(topic, json.loads(value)["reference"]["id"])
                pieces = blobs.pieces(await blobs.reader(blob))
                found.append(b"".join([piece async for piece in pieces]).decode())
    return found


def started(run: Run) -> None:
    on_node(_nothing, run.data, topics=TOPICS)


async def _nothing(node: Node) -> None: ...


def nothing_more(run: Run) -> None:
    """Each look is a start."""


def check(crash: Crash) -> None:
    latest = {fact: kind for kind, fact in crash.acknowledged}
    for fact, kind in latest.items():
        if kind in ("is", "not"):
            assert crash.seen.count(fact) == (kind == "is"), f"{fact}\n{crash}"
    waiting = [fact for fact, kind in latest.items() if kind == "will"]
    if any(fact.startswith("audit") and fact in crash.seen for fact in waiting):
        # Not answered yet, but recorded: then it was done.
        for fact, kind in latest.items():
            if kind in ("will", "will-not"):
                assert crash.seen.count(fact) == (kind == "will"), f"{fact}\n{crash}"


def test_every_route_that_changes_something_has_a_step() -> None:
    changing = {(one.method, one.path) for one in OPERATIONS if one.method != "GET"}
    assert changing == set(STEPS) | NOTHING_SAVED


def test_an_answer_means_that_it_is_saved() -> None:
    for crash in crashes(
        everything, look, start=started, proceed=nothing_more, ends=("kill", "cut")
    ):
        check(crash)
