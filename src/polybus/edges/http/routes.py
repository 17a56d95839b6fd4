"""Every operation of the HTTP API: method, path, function, and the problems it may answer.

The functions' docstrings are the summaries in OpenAPI, and their signatures the types. `/`,
`/openapi.json` and `/msgstream` are not operations of the API: `app` routes them.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from polybus.edges.http import (
    accounts_api,
    commits_api,
    consumers_api,
    messages_api,
    metrics,
    publish_api,
    sessions_api,
    topics_api,
)
from polybus.edges.http.accounts_api import SignUp
from polybus.edges.http.calls import OCTETS, TEXT, Operation
from polybus.edges.http.publish_api import NDJSON, NewMessage
from polybus.edges.http.sessions_api import PackBody

TOPICS = "/v1/topics"
TOPIC = "/v1/topics/{topic}"
MESSAGES = "/v1/topics/{topic}/messages"
SESSIONS = "/v1/sessions"
SESSION = "/v1/sessions/{key}"
PACKS = "/v1/sessions/{key}/packs"
BROADCAST = "/v1/broadcast"
CONSUMER = "/v1/consumers/{group}"
COMMITS = "/v1/commits"
STAGED = "/v1/staging/{producer}/{file}"
ACCOUNTS = "/v1/accounts"
ACCOUNT = "/v1/accounts/{account}"
GRANTS = "/v1/accounts/{account}/grants"
TOKENS = "/v1/accounts/{account}/tokens"
LINES = (NDJSON, "*/*")


def _admin(
    method: str, path: str, run: Callable[..., Awaitable[Any]], status: int = 200, *fails: int
) -> Operation:
    """An operation of administrators."""
    return Operation(method, path, run, status, (403, *fails), asks="administrator")


OPERATIONS = (
    Operation("GET", TOPICS, topics_api.list_topics, fails=[400]),
    Operation("POST", TOPICS, topics_api.create, status=201, fails=[400, 403, 409]),
    Operation("GET", TOPIC, topics_api.show, fails=[404]),
    Operation("DELETE", TOPIC, topics_api.delete, status=204, fails=[403, 404], right="administer"),
    Operation(
        "POST",
        MESSAGES,
        publish_api.publish,
        fails=[400, 403, 404, 507],
        right="publish",
        body=NewMessage,
        media=LINES,
    ),
    Operation("GET", MESSAGES, messages_api.fetch, fails=[400, 404, 409, 416]),
    Operation("POST", SESSIONS, sessions_api.create, status=201, fails=[400, 404, 409]),
    Operation("PUT", f"{SESSION}/topics", sessions_api.put_topics, fails=[400, 404]),
    Operation(
        "POST",
        PACKS,
        sessions_api.post_pack,
        status=202,
        fails=[400, 403, 404],
        right="publish",
        body=PackBody,
    ),
    Operation("DELETE", SESSION, sessions_api.delete, status=204, fails=[404]),
    Operation(
        "POST",
        BROADCAST,
        sessions_api.broadcast,
        status=202,
        fails=[400, 403],
        right="publish",
        body=PackBody,
    ),
    Operation("GET", "/v1/consumers", consumers_api.list_consumers),
    Operation("PUT", CONSUMER, consumers_api.report, status=204, fails=[400, 403, 404, 409]),
    Operation(
        "DELETE", CONSUMER, consumers_api.forget, status=204, fails=[403, 404], right="subscribe"
    ),
    Operation(
        "POST", COMMITS, commits_api.commit, fails=[400, 403, 404, 409, 507], right="publish"
    ),
    Operation("GET", f"{COMMITS}/{{producer}}", commits_api.last_commit, fails=[404]),
    Operation(
        "POST",
        STAGED,
        commits_api.stage,
        fails=[400, 403, 409, 507],
        right="publish",
        media=(OCTETS,),
    ),
    Operation("DELETE", STAGED, commits_api.unstage, status=204, fails=[400, 403], right="publish"),
    _admin("GET", ACCOUNTS, accounts_api.list_accounts),
    _admin("POST", ACCOUNTS, accounts_api.create, 201, 400, 409),
    _admin("GET", ACCOUNT, accounts_api.show, 200, 404),
    _admin("DELETE", ACCOUNT, accounts_api.delete, 204, 400, 404, 409),
    _admin("PUT", f"{ACCOUNT}/password", accounts_api.set_password, 204, 400, 404),
    _admin("POST", GRANTS, accounts_api.grant, 204, 400, 404, 409),
    _admin("DELETE", GRANTS, accounts_api.revoke, 204, 400, 404),
    _admin("POST", TOKENS, accounts_api.make_token, 201, 400, 404, 409),
    _admin("DELETE", f"{TOKENS}/{{id}}", accounts_api.revoke_token, 204, 404),
    Operation(
        "POST", "/v1/tokens", accounts_api.make_own_token, status=201, fails=[400, 403, 404, 409]
    ),
    Operation(
        "DELETE", "/v1/tokens/{id}", accounts_api.revoke_own_token, status=204, fails=[403, 404]
    ),
    Operation(
        "POST",
        "/v1/signup",
        accounts_api.sign_up,
        status=201,
        fails=[400, 404, 409, 429],
        asks="nothing",
        body=SignUp,
    ),
    Operation("GET", "/healthz", metrics.healthz, fails=[503], asks="nothing", produces=TEXT),
    Operation("GET", "/readyz", metrics.readyz, fails=[503], asks="nothing", produces=TEXT),
    Operation("GET", "/metrics", metrics.metrics, fails=[403], produces=TEXT),
)
