"""Which requests of browsers are let in: every route with every kind of Host and origin."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from itertools import product

import httpx
import pytest
from http_kit import Http, http_bus, raw

from polybus.config import Config, Connector
from polybus.edges.http.origin_check import HOSTS_CACHED_MAX, OriginCheck, RequestHead
from polybus.edges.http.routes import OPERATIONS
from polybus.edges.node import Node
from polybus.testing import ScriptedPeer

ALLOWED = "https://game.example"
UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}
# Method, path, further headers, and whether it may change something.
Route = tuple[str, str, Mapping[str, str], bool]
POLL = "/msgstream?transport=shortpolling&sessionKey=k&confirmIds=1"
ROUTES: list[Route] = [
    *((one.method, one.path, {}, one.method != "GET") for one in OPERATIONS),
    *(("GET", path, {}, False) for path in ("/", "/console/", "/openapi.json", "/nothing-here")),
    ("HEAD", "/v1/topics", {}, False),
    ("OPTIONS", "/v1/topics", {}, False),
    ("PATCH", "/v1/topics", {}, True),
    ("POST", "/nothing-here", {}, True),
    ("GET", POLL, {}, True),
    ("GET", POLL.replace("?", "/?"), {}, True),
    ("GET", POLL.replace("msg", "%6dsg"), {}, True),
    ("HEAD", POLL, {}, False),
    ("OPTIONS", POLL, {}, False),
    ("GET", "/msgstream?sessionKey=k", UPGRADE, True),
    ("GET", "/v1/topics", UPGRADE, True),
]
OWN = "http://{host}"
EVIL = "https://evil.example"
FOREIGN: list[dict[str, str]] = [
    {"origin": EVIL},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"origin": "http://{host}.evil.example"},
    {"origin": "https://{host}"},
    {"origin": ""},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "something-new"},
    {"origin": OWN, "sec-fetch-site": "cross-site"},
    {"origin": EVIL, "sec-fetch-site": "same-origin"},
    {"origin": f"{ALLOWED}/"},
]
KNOWN: list[dict[str, str]] = [
    {},
    {"origin": OWN},
    {"origin": OWN, "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
    {"origin": ALLOWED},
    {"origin": ALLOWED, "sec-fetch-site": "cross-site"},
]


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with http_bus("news", http={"cors-origins": [ALLOWED], "hosts": ["bus.example"]}) as http:
        yield http


async def ask(node: Node, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """The status of the answer, and all of it; `{host}` is the Host header."""
    sent = {"host": f"127.0.0.1:{node.tcp_port}", "connection": "close", **headers}
    lines = [f"{name}: {value.format(host=sent['host'])}" for name, value in sent.items()]
    request = "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""])
    async with ScriptedPeer(node.tcp_port) as peer:
        await peer.send(request.encode())
        if headers.get("upgrade"):
            # A WebSocket that is let in stays open.
            peer.send_eof()
        answer = await peer.read_to_end()
    return int(answer.split(b" ", 2)[1]), answer


def code_of(answer: bytes) -> str:
    body = answer.partition(b"\r\n\r\n")[2]
    return str(json.loads(body)["code"])


async def test_every_route_refuses_a_foreign_host(http: Http) -> None:
    hosts = ("evil.example", "127.0.0.1.evil.example:80", "", "[::1", "192.0.2.1")
    for (method, path, headers, _), host in product(ROUTES, hosts):
        status, answer = await ask(http.node, method, path, {**headers, "host": host})
        assert (status, code_of(answer)) == (421, "http.host-unknown"), (method, path, host)
        assert b"http.hosts" in answer


@pytest.mark.slow
async def test_every_route_that_may_change_something_refuses_foreign_pages(http: Http) -> None:
    for (method, path, headers, changes), said in product(ROUTES, FOREIGN):
        status, answer = await ask(http.node, method, path, {**headers, **said})
        refused = status == 403 and code_of(answer) == "http.origin-foreign"
        assert refused == changes, (method, path, said, answer)
        assert not refused or b"http.cors-origins" in answer


@pytest.mark.slow
async def test_every_route_takes_programs_its_own_page_and_named_origins(http: Http) -> None:
    for (method, path, headers, _), said in product(ROUTES, KNOWN):
        status, answer = await ask(http.node, method, path, {**headers, **said})
        # What only administrators may do is refused by another code.
        is_taken = status != 421 and b"http.origin-foreign" not in answer
        assert is_taken, (method, path, said, answer)


async def test_every_answer_says_what_a_browser_may_do_with_it(http: Http) -> None:
    kinds: list[dict[str, str]] = [{}, {"host": "evil.example"}, {"origin": EVIL}]
    for (method, path, headers, _), said in product(ROUTES, kinds):
        _, answer = await ask(http.node, method, path, {**headers, **said})
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert head.count(b"x-content-type-options: nosniff") == 1, (method, path, said)
        assert head.count(b"cross-origin-resource-policy: same-origin") == 1, (method, path, said)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "LocalHost:80", "localhost:", "[::1]", "[0:0::1]:55545"),
        *("bus.example", "BUS.example:443"),
    ],
)
async def test_names_of_the_bus_are_accepted_with_any_port(http: Http, host: str) -> None:
    """A tunnel or a container has another port."""
    for _ in range(2):
        status, _ = await ask(http.node, "GET", "/healthz", {"host": host})
        assert status == 200


async def test_the_star_lets_every_page_in() -> None:
    async with http_bus("news", http={"cors-origins": ["*"]}) as http:
        said = {"origin": "null", "sec-fetch-site": "cross-site"}
        status, answer = await ask(http.node, "POST", "/v1/topics/news/messages", said)
        assert status == 200
        assert b"cross-origin-resource-policy: cross-origin" in answer


async def test_two_origins_are_foreign_if_one_is() -> None:
    async with http_bus("news", http={"cors-origins": [ALLOWED]}) as http:
        head = "POST /v1/topics/news/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n"
        lines = f"origin: {ALLOWED}\r\norigin: {EVIL}\r\n\r\n"
        assert b" 403 " in await raw(http.node, (head + lines).encode())


async def test_a_refused_message_is_not_stored(http: Http) -> None:
    body = "content-type: text/plain\r\ncontent-length: 5\r\n\r\nhello"
    for lines in ("host: evil.example", f"host: localhost\r\norigin: {EVIL}"):
        request = f"POST /v1/topics/news/messages HTTP/1.1\r\n{lines}\r\n{body}"
        assert b"HTTP/1.1 4" in await raw(http.node, request.encode())
    assert http.node.bus.log.bounds("news").stop == 0
    counts = http.node.bad_peers.counts
    assert counts["http.host-unknown"] == counts["http.origin-foreign"] == 1


async def test_the_admin_socket_is_asked_by_any_name(http: Http) -> None:
    run = json.loads((http.node.data / "run.json").read_text())
    transport = httpx.AsyncHTTPTransport(uds=run["admin"])
    async with httpx.AsyncClient(transport=transport, base_url="http://any.example") as admin:
        answer = await admin.post("/v1/topics/news/messages", headers={"origin": EVIL})
    assert answer.status_code == 200


def head(host: bytes, local_ip: str = "127.0.0.1") -> RequestHead:
    return RequestHead(b"GET", b"/", [], host, "http", local_ip, upgrades=False)


def test_a_bus_on_all_addresses_is_known_by_the_one_that_was_used() -> None:
    check = OriginCheck(Config(connectors=[Connector(ip="0.0.0.0"), Connector(ip="bus.home")]))
    assert check.refusal(head(b"192.0.2.7:55545")) is not None
    assert check.refusal(head(b"192.0.2.7:55545", "192.0.2.7")) is None
    assert check.refusal(head(b"[2001:DB8::7]", "2001:db8::7%eth0")) is None
    assert check.refusal(head(b"bus.home")) is None
    assert check.refusal(head(b"192.0.2.8")) is not None


def test_remembered_hosts_are_bounded() -> None:
    check = OriginCheck(Config())
    for port in range(2 * HOSTS_CACHED_MAX):
        assert check.refusal(head(b"localhost:%d" % port)) is None
    assert len(check._hosts) == HOSTS_CACHED_MAX
