"""Accounts over HTTP: who may call which operation, and what each sees."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pyarrow as pa
import pytest
from accounts_http_kit import Bus, accounts_bus

from polybus.edges.http.routes import OPERATIONS
from polybus.services import pipeline_watch
from polybus.services.accounts import accounts, login_turns, throttle

CALLERS = ("nobody", "wrong", "default", "shop", "other", "token", "admin")
ADMIN_ONLY = "401 401 403 403 403 403"
STAGED = "0-aaaaaaaa.arrows"
COMMIT = {"producer": "p", "query": "q", "batch": 0}
# Messages of an epoch that is over.
GONE = {"topic": "news", "epoch": 1, "first": 0, "stop": 1}
POSITION = {"shop/shared": {"epoch": 1, "offset": 0}}

# An operation, what is sent, and the status for each caller. `token` is one of `shop`, which may
# only read `news`. The topic in paths is `shop/shared`, and the session is one of `shop`.
TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("GET /v1/topics", {}, "401 401 200 200 200 200 200"),
    ("POST /v1/topics", {"json": {"name": "fresh"}}, "401 401 201 201 201 403 201"),
    ("GET /v1/topics/{topic}", {}, "401 401 404 200 200 404 200"),
    ("POST /v1/topics/{topic}/messages", {"content": b"1"}, "401 401 404 200 403 404 200"),
    ("GET /v1/topics/{topic}/messages", {}, "401 401 404 200 200 404 200"),
    ("GET /v1/topics/{topic}/messages/{offset}", {}, "401 401 404 200 404 404 200"),
    ("GET /v1/topics/{topic}/messages/{offset}/wire", {}, "401 401 404 200 404 404 200"),
    ("PUT /v1/topics/{topic}/blob", {"content": b"1"}, "401 401 404 200 403 404 200"),
    (
        "GET /v1/topics/{topic}/blob",
        {"params": {"sha256": "0" * 64}},
        "401 401 404 200 403 404 200",
    ),
    ("GET /v1/blobs/{id}", {}, "401 401 404 404 404 404 404"),
    ("GET /v1/topics/{topic}/search", {}, "401 401 404 200 200 404 200"),
    ("GET /v1/topics/{topic}/histogram", {}, "401 401 404 200 200 404 200"),
    ("GET /v1/topics/{topic}/export", {}, "401 401 404 200 200 404 200"),
    ("POST /v1/sql", {"json": {"query": "SELECT 1"}}, "401 401 200 200 200 200 200"),
    ("DELETE /v1/sql/{id}", {}, "401 401 404 404 404 404 404"),
    ("GET /v1/sql/names", {}, "401 401 200 200 200 200 200"),
    ("GET /v1/tables", {}, "401 401 403 403 403 403 200"),
    ("GET /v1/tables/{table}", {}, "401 401 403 403 403 403 404"),
    ("POST /v1/sessions", {"json": {"topics": ["shop/shared"]}}, "401 401 404 201 201 404 201"),
    ("PUT /v1/sessions/{key}/topics", {"json": {"topics": []}}, "401 401 404 200 404 200 200"),
    ("POST /v1/sessions/{key}/packs", {"json": [["a"]]}, "401 401 404 202 404 403 202"),
    ("POST /v1/broadcast", {"json": [["a"]]}, "401 401 202 202 202 403 202"),
    ("DELETE /v1/sessions/{key}", {}, "401 401 404 204 404 204 204"),
    ("GET /v1/consumers", {}, "401 401 200 200 200 200 200"),
    ("PUT /v1/consumers/{group}", {"json": {"positions": POSITION}}, "401 401 404 204 204 404 204"),
    ("DELETE /v1/consumers/{group}", {}, "401 401 404 204 204 403 204"),
    ("POST /v1/staging/{producer}/{file}", {"content": b"x"}, "401 401 200 200 200 403 200"),
    ("DELETE /v1/staging/{producer}/{file}", {}, "401 401 204 204 204 403 204"),
    ("POST /v1/commits", {"json": COMMIT}, "401 401 200 200 200 403 200"),
    ("GET /v1/commits/{producer}", {}, "401 401 200 200 200 404 200"),
    ("GET /v1/accounts", {}, f"{ADMIN_ONLY} 200"),
    ("POST /v1/accounts", {"json": {"name": "new"}}, f"{ADMIN_ONLY} 201"),
    ("GET /v1/accounts/{account}", {}, f"{ADMIN_ONLY} 200"),
    ("PUT /v1/accounts/{account}/password", {"json": {"password": "x"}}, f"{ADMIN_ONLY} 204"),
    (
        "POST /v1/accounts/{account}/grants",
        {"json": {"to": "other", "topics": "x*", "rights": ["publish"]}},
        f"{ADMIN_ONLY} 204",
    ),
    (
        "DELETE /v1/accounts/{account}/grants",
        {"json": {"to": "other", "topics": "x*"}},
        f"{ADMIN_ONLY} 204",
    ),
    ("POST /v1/accounts/{account}/tokens", {"json": {}}, f"{ADMIN_ONLY} 201"),
    ("DELETE /v1/accounts/{account}/tokens/{id}", {}, f"{ADMIN_ONLY} 404"),
    ("POST /v1/tokens", {"json": {}}, "401 401 403 201 201 403 403"),
    ("DELETE /v1/tokens/{id}", {}, "401 401 404 404 404 403 404"),
    ("PATCH /v1/topics/{topic}", {"json": {}}, "401 401 404 200 403 404 200"),
    ("DELETE /v1/topics/{topic}", {}, "401 401 404 204 403 404 204"),
    ("DELETE /v1/accounts/{account}", {}, f"{ADMIN_ONLY} 204"),
    ("POST /v1/signup", {"json": {"name": "x", "password": "y"}}, "404 404 404 404 404 404 404"),
    ("GET /v1/sessions", {}, "401 401 200 200 200 200 200"),
    ("GET /v1/session/{id}", {}, "401 401 404 404 404 404 404"),
    ("DELETE /v1/session/{id}", {}, "401 401 404 404 404 403 404"),
    ("POST /v1/session/{id}/redeliver", {}, "401 401 404 404 404 403 404"),
    ("GET /v1/dead-letters", {}, "401 401 403 403 403 403 200"),
    ("GET /v1/dead-letters/{id}", {}, "401 401 403 403 403 403 404"),
    ("GET /v1/connections/{id}", {}, "401 401 404 404 404 404 404"),
    ("GET /v1/undelivered", {}, "401 401 403 403 403 403 200"),
    ("POST /v1/undelivered/replay", {"json": {"ranges": [GONE]}}, "401 401 403 403 403 403 416"),
    ("POST /v1/replays", {"json": {"dry-run": True}}, "401 401 403 403 403 403 200"),
    ("GET /v1/replays", {}, "401 401 403 403 403 403 200"),
    ("GET /v1/replays/{id}", {}, "401 401 403 403 403 403 404"),
    ("DELETE /v1/replays/{id}", {}, "401 401 403 403 403 403 404"),
    ("GET /v1/pipelines", {}, "401 401 403 403 403 403 200"),
    ("POST /v1/pipelines/stop", {}, f"{ADMIN_ONLY} 409"),
    ("POST /v1/pipelines/start", {}, f"{ADMIN_ONLY} 202"),
    ("POST /v1/pipelines/refresh", {"json": {"table": "nix"}}, f"{ADMIN_ONLY} 400"),
    ("GET /v1/connections", {}, "401 401 200 200 200 200 200"),
    ("DELETE /v1/connections/{id}", {}, "401 401 404 404 404 403 404"),
    ("GET /v1/graph", {}, "401 401 200 200 200 200 200"),
    ("GET /v1/info", {}, "401 401 200 200 200 200 200"),
    ("GET /v1/settings", {}, "401 401 403 403 403 403 200"),
    ("GET /v1/figures", {}, "401 401 200 200 200 200 200"),
    ("GET /v1/metrics/history", {}, "401 401 403 403 403 403 200"),
    ("GET /healthz", {}, "200 200 200 200 200 200 200"),
    ("GET /readyz", {}, "200 200 200 200 200 200 200"),
    ("GET /metrics", {}, "401 401 200 403 403 403 200"),
]


@pytest.fixture(autouse=True)
def without_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wrong logins are answered at once: their delay has tests of its own."""
    for module in (accounts, throttle):
        monkeypatch.setattr(module, "DELAY_S_MIN", 0.0)
    # Not Spark.
    monkeypatch.setattr(pipeline_watch, "COMMAND", (sys.executable, "-c", ""))
    yield


async def caller(bus: Bus, name: str) -> httpx.AsyncClient:
    match name:
        case "nobody":
            return (await bus.client()).client
        case "wrong":
            return (await bus.client(auth=("shop", "guessed"))).client
        case "token":
            store = bus.node.accounts.store
            token = store.make_token("shop", topics=["news"], rights=["subscribe"])
            return (await bus.by_token(token)).client
        case "admin":
            return (await bus.admin()).client
    return (await bus.of(name)).client


def test_the_table_has_every_operation() -> None:
    assert {row[0] for row in TABLE} == {f"{one.method} {one.path}" for one in OPERATIONS}


@pytest.mark.parametrize("name", CALLERS)
async def test_each_caller_gets_the_answer_of_the_table(name: str) -> None:
    async with accounts_bus() as bus:
        key = await (await bus.of("shop")).open_session()
        client = await caller(bus, name)
        places = {"topic": "shop%2Fshared", "key": key, "group": "g", "producer": "p"}
        places |= {"file": STAGED, "id": "none", "offset": "0", "table": "none"}
        wanted, found = {}, {}
        for operation, sent, statuses in TABLE:
            method, _, path = operation.partition(" ")
            # Not that of the caller, which a change of its password would log out.
            account = "other" if name == "admin" and method == "DELETE" else "default"
            if "grants" in path:
                account = "shop"
            answer = await client.request(method, path.format(**places, account=account), **sent)
            found[operation] = answer.status_code
            wanted[operation] = int(statuses.split()[CALLERS.index(name)])
            if answer.status_code == 401:
                assert answer.headers["www-authenticate"] == 'Basic realm="polybus", Bearer'
                assert answer.json()["code"] == f"auth.{'needed' if name == 'nobody' else 'failed'}"
            if answer.status_code == 403:
                assert answer.json()["code"] == "auth.denied"
        assert found == wanted


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic ???", "Basic bm9jb2xvbg==", "Basic /////w==", "Digest x", "Bearer", "b é"],
)
async def test_credentials_of_no_known_form_are_refused(header: str) -> None:
    async with accounts_bus() as bus:
        client = (await bus.client()).client
        sent = {"authorization": header.encode()}
        answer = await client.get("/v1/topics", headers=sent)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["code"]) == (401, "auth.failed")


async def test_credentials_are_in_no_answer_and_no_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with accounts_bus() as bus:
        text = ""
        for how in ({"auth": ("shop", "s3cret")}, {"headers": {"authorization": "Bearer s3cret"}}):
            answer = await (await bus.client(**how)).client.get("/v1/topics")
            assert answer.status_code == 401
            text += answer.text + str(answer.headers)
        admin = await bus.admin()
        made = await admin.client.post("/v1/accounts/shop/tokens", json={})
        secret = made.json()["token"].split("_", 2)[2]
        listed = (await admin.client.get("/v1/accounts")).text
    assert "auth.failed" in caplog.text
    for one in ("s3cret", "czNjcmV0", secret, "argon2", "digest"):
        assert one not in caplog.text + text + listed


async def test_too_many_logins_at_a_time_are_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_turns, "WAITING_PER_SOURCE_MAX", 2)
    async with accounts_bus() as bus:
        client = (await bus.client()).client
        guesses = [client.get("/v1/topics", auth=("shop", f"guess {n}")) for n in range(3)]
        answers = await asyncio.gather(*guesses)
        found = sorted((one.status_code, one.json()["code"]) for one in answers)
        assert found == [(401, "auth.failed"), (401, "auth.failed"), (429, "auth.busy")]


async def test_without_a_login_this_machine_is_the_default_account() -> None:
    async with accounts_bus(accounts={"default": "loopback"}) as bus:
        client = (await bus.client()).client
        listed = (await client.get("/v1/topics")).json()["topics"]
        assert [one["name"] for one in listed] == ["news"]
        assert (await client.get("/v1/topics/shop%2Fnews")).status_code == 404


# Topics


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("default", ["news"]),
        ("shop", ["news", "shared"]),
        ("other", ["shop/shared"]),
        ("token", ["news"]),
        ("admin", ["news", "shop/news", "shop/shared"]),
    ],
)
async def test_each_sees_what_it_may_read_under_its_own_names(name: str, seen: list[str]) -> None:
    async with accounts_bus() as bus:
        client = await caller(bus, name)
        listed = (await client.get("/v1/topics")).json()["topics"]
        assert [one["name"] for one in listed] == seen
        for topic in seen:
            shown = await client.get(f"/v1/topics/{topic.replace('/', '%2F')}")
            assert shown.json()["name"] == topic
        system = (await client.get("/v1/topics?system=true")).json()["topics"]
        # The token is for one topic.
        assert ("$events" in [one["name"] for one in system]) == (name != "token")


async def test_unknown_and_forbidden_are_the_same_answer() -> None:
    async with accounts_bus() as bus:
        # A grant of everything shares no system topic.
        bus.node.accounts.grant("default", "other", "*", ["subscribe"])
        client = (await bus.of("other")).client
        answers = []
        for topic in ("shop%2Fnews", "shop%2Fnone", "none%2Fnews", "none", "default%2F$events"):
            path = f"/v1/topics/{topic}"
            name = topic.replace("%2F", "/")
            some = [
                await client.get(path),
                await client.delete(path),
                await client.get(f"{path}/messages"),
                await client.post(f"{path}/messages", content=b"1"),
                await client.post("/v1/sessions", json={"topics": [name]}),
            ]
            answers.append([(one.status_code, one.text.replace(name, "T")) for one in some])
        assert all(one == answers[0] for one in answers)
        assert {status for status, _ in answers[0]} == {404}


@pytest.mark.parametrize(
    ("name", "topic", "code", "made"),
    [
        ("shop", "Fresh", "", "shop/fresh"),
        ("shop", "a/b", "topic.invalid", ""),
        ("shop", "other/b", "topic.invalid", ""),
        ("shop", "$mine", "topic.reserved", ""),
        ("shop", "*", "topic.invalid", ""),
        ("shop", "news", "topic.exists", ""),
        ("default", "a/b", "", "a/b"),
        ("default", "default/c", "", "c"),
        ("default", "shop/fresh", "auth.denied", ""),
        ("default", "shop/news", "auth.denied", ""),
        ("token", "news", "auth.denied", ""),
        ("admin", "shop/fresh", "", "shop/fresh"),
        ("admin", "shop/a/b", "topic.invalid", ""),
        ("admin", "shop/$mine", "topic.reserved", ""),
        ("admin", "shop/", "topic.invalid", ""),
    ],
)
async def test_a_topic_is_created_in_the_own_account(
    name: str, topic: str, code: str, made: str
) -> None:
    async with accounts_bus() as bus:
        before = set(bus.node.bus.topic_names())
        client = await caller(bus, name)
        answer = await client.post("/v1/topics", json={"name": topic})
        assert answer.json().get("code", "") == code
        assert set(bus.node.bus.topic_names()) - before == ({made} if made else set())
        if made and name == "shop":
            assert answer.json()["name"] == "fresh"


async def test_messages_are_published_and_read_under_the_own_names() -> None:
    async with accounts_bus() as bus:
        shop, other = await bus.of("shop"), await bus.of("other")
        sent = await shop.client.post("/v1/topics/shared/messages", content=b'"hello"')
        assert sent.json()["topic"] == "shared"
        for client, path, topic in [
            (shop.client, "shared", "shared"),
            (other.client, "shop%2Fshared", "shop/shared"),
        ]:
            read = (await client.get(f"/v1/topics/{path}/messages")).json()
            assert (read["topic"], read["messages"][0]["value"]) == (topic, "hello")
            arrow = {"accept": "application/vnd.apache.arrow.stream"}
            stream = (await client.get(f"/v1/topics/{path}/messages", headers=arrow)).content
            table = pa.ipc.open_stream(io.BytesIO(stream)).read_all()
            assert table.column("topic").to_pylist() == [topic]


async def test_who_may_only_publish_may_publish() -> None:
    async with accounts_bus() as bus:
        bus.node.accounts.grant("shop", "other", "news", ["publish"])
        client = (await bus.of("other")).client
        path = "/v1/topics/shop%2Fnews"
        sent = await client.post(f"{path}/messages", content=b"1")
        assert (sent.status_code, sent.json()["topic"]) == (200, "shop/news")
        assert (await client.get(path)).status_code == 404
        assert (await client.delete(path)).status_code == 404


async def test_a_wait_for_messages_ends_with_the_grant() -> None:
    async with accounts_bus() as bus:
        other, shop = await bus.of("other"), await bus.of("shop")
        path = "/v1/topics/shop%2Fshared/messages"
        assert (await other.client.get(path)).status_code == 200
        request = other.client.get(f"{path}?wait-s=20")
        waiting = asyncio.create_task(request)
        await other.until(lambda: bus.node.http.waiters)
        bus.node.accounts.revoke("shop", "other", "shared")
        await shop.publish("shared", b"1")
        assert (await waiting).status_code == 404


# Administration


async def test_an_account_lives_by_the_api_of_administrators() -> None:
    async with accounts_bus() as bus:
        admin = (await bus.admin()).client
        made = await admin.post("/v1/accounts", json={"name": "New", "password": "four"})
        assert (made.status_code, made.json()["name"], made.json()["password"]) == (
            *(201, "new"),
            True,
        )
        new = (await bus.client(auth=("new", "four"))).client
        assert (await new.get("/v1/topics")).json() == {"topics": []}

        grant = {"to": "new", "topics": "ne*", "rights": ["subscribe", "publish"]}
        assert (await admin.post("/v1/accounts/shop/grants", json=grant)).status_code == 204
        assert [one["name"] for one in (await new.get("/v1/topics")).json()["topics"]] == [
            "shop/news"
        ]
        token = {"rights": ["publish"], "topics": ["shop/*"], "expires": 1e10}
        text = (await admin.post("/v1/accounts/new/tokens", json=token)).json()
        view = (await admin.get("/v1/accounts/new")).json()
        assert view["tokens"] == [
            token | {"id": text["id"], "created": view["tokens"][0]["created"]}
        ]
        assert (await admin.get("/v1/accounts/shop")).json()["grants"][-1] == {
            **grant,
            "rights": ["publish", "subscribe"],
        }
        by_token = (await bus.by_token(text["token"])).client
        path = "/v1/topics/shop%2Fnews/messages"
        assert (await by_token.post(path, content=b"1")).status_code == 200
        assert (await by_token.get(path)).status_code == 404

        old = {"to": "new", "topics": "ne*"}
        gone = await admin.request("DELETE", "/v1/accounts/shop/grants", json=old)
        assert gone.status_code == 204
        assert (await by_token.post(path, content=b"1")).status_code == 404
        gone = await admin.delete(f"/v1/accounts/new/tokens/{text['id']}")
        assert gone.status_code == 204
        assert (await by_token.post(path, content=b"1")).status_code == 401

        assert (
            await admin.put("/v1/accounts/new/password", json={"password": "five"})
        ).status_code == 204
        assert (await new.get("/v1/topics")).status_code == 401
        assert (await new.post("/v1/topics", json={"name": "x"}, auth=("new", "five"))).is_success
        assert (await admin.delete("/v1/accounts/new")).status_code == 204
        assert (await admin.get("/v1/accounts/new")).status_code == 404
        assert (await new.get("/v1/topics", auth=("new", "five"))).status_code == 401
        assert "new/x" not in bus.node.bus.topic_names()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/accounts", {"name": "shop"}, 409, "account.exists"),
        ("POST", "/v1/accounts", {"name": "a/b"}, 400, "account.invalid"),
        ("POST", "/v1/accounts", {"name": "default"}, 400, "account.invalid"),
        ("POST", "/v1/accounts", {"name": "taken"}, 409, "account.taken"),
        ("POST", "/v1/accounts", {"name": "x", "password": ""}, 400, "http.body-invalid"),
        ("DELETE", "/v1/accounts/default", None, 400, "account.invalid"),
        ("DELETE", "/v1/accounts/none", None, 404, "account.unknown"),
        (
            *("POST", "/v1/accounts/shop/grants"),
            {"to": "none", "topics": "*", "rights": ["publish"]},
            *(404, "account.unknown"),
        ),
        (
            *("POST", "/v1/accounts/shop/grants"),
            {"to": "other", "topics": "*", "rights": ["own"]},
            *(400, "http.body-invalid"),
        ),
        (
            *("DELETE", "/v1/accounts/shop/grants"),
            {"to": "other", "topics": "none"},
            *(404, "account.no-grant"),
        ),
        ("DELETE", "/v1/accounts/shop/tokens/none", None, 404, "account.no-token"),
        ("POST", "/v1/accounts/none/tokens", {}, 404, "account.unknown"),
    ],
)
async def test_what_administrators_may_not_do_has_a_code(
    method: str, path: str, body: Any, status: int, code: str
) -> None:
    async with accounts_bus() as bus:
        bus.node.bus.create_topic("taken/news")
        answer = await (await bus.admin()).client.request(method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code)


# Strangers


async def test_a_stranger_signs_up_and_logs_in() -> None:
    settings = {"default": "off", "signup": True}
    limits = {"signups-per-address-hour-max": 4}
    async with accounts_bus(accounts=settings, limits=limits) as bus:
        client = (await bus.client()).client
        codes = []
        bus.node.bus.create_topic("taken/secret")
        for name in ("New", "new", "default", "a/b", "taken", "two", "four"):
            answer = await client.post("/v1/signup", json={"name": name, "password": "secret"})
            codes.append((answer.status_code, answer.json().get("code", answer.json().get("name"))))
        assert codes == [
            (201, "new"),
            (409, "account.exists"),
            (400, "account.invalid"),
            (400, "account.invalid"),
            (409, "account.exists"),
            (201, "two"),
            (429, "signup.too-many"),
        ]
        answer = await client.post("/v1/signup", json={"name": "x"})
        assert (answer.status_code, answer.json()["code"]) == (400, "http.body-invalid")
        new = (await bus.client(auth=("new", "secret"))).client
        assert (await new.post("/v1/topics", json={"name": "mine"})).status_code == 201
        assert (await new.get("/v1/accounts")).status_code == 403


async def test_without_sign_up_its_path_does_not_exist() -> None:
    async with accounts_bus() as bus:
        client = (await bus.client()).client
        answers = [await client.post(f"/v1/{path}", content=b"[") for path in ("signup", "none")]
        assert answers[0].json() == answers[1].json()


async def test_strangers_are_not_told_which_topics_are_damaged() -> None:
    async with accounts_bus() as bus:
        bus.node.bus.log.freeze("shop/news", "shop/news is damaged")
        for client, is_told in [(await bus.client(), False), (await bus.admin(), True)]:
            answer = await client.client.get("/readyz")
            assert answer.status_code == 200
            assert ("shop/news" in answer.text) == is_told
