"""Every operation of the HTTP API: method, path, function, and the problems it may answer.

The functions' docstrings are the summaries in OpenAPI, and their signatures the types. `/`,
`/console`, `/openapi.json`, `/asyncapi.json` and `/msgstream` are not operations of the API: `app`
routes them, and every other path under `/v1/blobs` to the answer for an unknown blob.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from polybus.edges.http.api import (
    accounts,
    blobs,
    browse,
    commits,
    consumers,
    graph,
    info,
    letters,
    messages,
    peers,
    pipelines,
    publish,
    queries,
    sessions,
    topics,
)
from polybus.edges.http.api.accounts import SignUp
from polybus.edges.http.api.cloud_events import EVENT, EVENTS
from polybus.edges.http.api.publish import NDJSON, NewMessage
from polybus.edges.http.api.sessions import PackBody
from polybus.edges.http.calls import OCTETS, TEXT, Operation
from polybus.edges.http.live.hub import LiveChannel
from polybus.edges.http.metrics import gather as metrics

TOPICS = "/v1/topics"
TOPIC = "/v1/topics/{topic}"
MESSAGES = "/v1/topics/{topic}/messages"
MESSAGE = "/v1/topics/{topic}/messages/{offset}"
BLOB = "/v1/blobs/{id}"
SESSIONS = "/v1/sessions"
SESSION = "/v1/sessions/{key}"
PACKS = "/v1/sessions/{key}/packs"
SESSION_ID = "/v1/session/{id}"
REDELIVER = "/v1/session/{id}/redeliver"
CONNECTIONS = "/v1/connections"
CONNECTION = "/v1/connections/{id}"
REPLAYS = "/v1/replays"
UNDELIVERED = "/v1/undelivered"
REPLAY = "/v1/replays/{id}"
PIPELINES = "/v1/pipelines"
BROADCAST = "/v1/broadcast"
CONSUMER = "/v1/consumers/{group}"
COMMITS = "/v1/commits"
STAGED = "/v1/staging/{producer}/{file}"
ACCOUNTS = "/v1/accounts"
ACCOUNT = "/v1/accounts/{account}"
GRANTS = "/v1/accounts/{account}/grants"
TOKENS = "/v1/accounts/{account}/tokens"
LINES = (NDJSON, EVENT, EVENTS, "*/*")


def _admin(
    method: str, path: str, run: Callable[..., Awaitable[Any]], status: int = 200, *fails: int
) -> Operation:
    """An operation of administrators."""
    return Operation(method, path, run, status, (403, *fails), asks="administrator")


CHANNELS = {
    "figures": LiveChannel(info.live_sample, 1.0),
    "connections": LiveChannel(peers.live_connections, 2.0),
    "graph": LiveChannel(graph.live_graph, 2.0),
    "pipeline": LiveChannel(pipelines.live, 1.0, only_changes=True),
    "replay": LiveChannel(letters.live_replay, 0.5, only_changes=True),
}
"""The channels of `/v1/live`, besides the tails of topics."""

ACTIONS = {
    ("POST", TOPICS): "topic-create",
    ("PATCH", TOPIC): "topic-change",
    ("DELETE", TOPIC): "topic-delete",
    ("DELETE", CONSUMER): "consumer-forget",
    ("DELETE", CONNECTION): "connection-end",
    ("POST", REPLAYS): "replay-start",
    ("POST", f"{UNDELIVERED}/replay"): "replay-start",
    ("DELETE", REPLAY): "replay-stop",
    ("POST", f"{PIPELINES}/stop"): "pipeline-stop",
    ("POST", f"{PIPELINES}/start"): "pipeline-start",
    ("DELETE", SESSION_ID): "session-end",
    ("POST", REDELIVER): "session-redeliver",
    ("POST", ACCOUNTS): "account-create",
    ("POST", "/v1/signup"): "account-create",
    ("DELETE", ACCOUNT): "account-delete",
    ("PUT", f"{ACCOUNT}/password"): "account-password",
    ("POST", GRANTS): "account-grant",
    ("DELETE", GRANTS): "account-revoke",
    ("POST", TOKENS): "account-token",
    ("POST", "/v1/tokens"): "account-token",
    ("DELETE", f"{TOKENS}/{{id}}"): "account-token-revoke",
    ("DELETE", "/v1/tokens/{id}"): "account-token-revoke",
}
"""What `$audit` calls the changes that operations make."""

_ALL = (
    Operation("GET", TOPICS, topics.list_topics, fails=[400]),
    Operation("POST", TOPICS, topics.create, status=201, fails=[400, 403, 409], right="administer"),
    Operation("GET", TOPIC, topics.show, fails=[404]),
    Operation("PATCH", TOPIC, topics.change, fails=[400, 403, 404], right="administer"),
    Operation("DELETE", TOPIC, topics.delete, status=204, fails=[403, 404], right="administer"),
    Operation(
        "POST",
        MESSAGES,
        publish.publish,
        fails=[400, 403, 404, 507],
        right="publish",
        body=NewMessage,
        media=LINES,
    ),
    Operation("GET", MESSAGES, messages.fetch, fails=[400, 404, 409, 416]),
    Operation("GET", MESSAGE, browse.show, fails=[400, 404, 409]),
    Operation("GET", f"{MESSAGE}/wire", browse.wire, fails=[400, 404, 409]),
    Operation(
        "PUT",
        f"{TOPIC}/blob",
        blobs.put,
        fails=[400, 403, 404, 409, 503, 507],
        right="publish",
        media=("*/*",),
    ),
    Operation("GET", f"{TOPIC}/blob", blobs.arrived, fails=[400, 403, 404], right="publish"),
    Operation("GET", BLOB, blobs.get, fails=[404, 416], produces=OCTETS),
    Operation("GET", f"{TOPIC}/search", queries.search, fails=[400, 404, 413, 429]),
    Operation("GET", f"{TOPIC}/histogram", queries.histogram, fails=[400, 404, 429]),
    Operation(
        "GET",
        f"{TOPIC}/export",
        queries.export,
        fails=[400, 404, 429],
        produces=OCTETS,
        headers={queries.TRUNCATED: "`true` if the file ends at a limit and more may match."},
    ),
    Operation(
        "POST",
        "/v1/sql",
        queries.run_sql,
        fails=[400, 403, 409, 413, 429],
        headers={queries.TRUNCATED: "For a file: `true` if rows are missing because of a limit."},
    ),
    Operation("GET", "/v1/sql/names", queries.names, fails=[429]),
    Operation("DELETE", "/v1/sql/{id}", queries.stop_sql, status=204, fails=[404]),
    Operation("GET", "/v1/tables", queries.list_tables, fails=[403, 429], asks="overview"),
    Operation(
        "GET", "/v1/tables/{table}", queries.show_table, fails=[403, 404, 429], asks="overview"
    ),
    Operation(
        "POST",
        SESSIONS,
        sessions.create,
        status=201,
        fails=[400, 403, 404, 409],
        right="subscribe",
    ),
    Operation(
        "PUT",
        f"{SESSION}/topics",
        sessions.put_topics,
        fails=[400, 403, 404],
        right="subscribe",
    ),
    Operation(
        "POST",
        PACKS,
        sessions.post_pack,
        status=202,
        fails=[400, 403, 404],
        right="publish",
        body=PackBody,
    ),
    Operation("DELETE", SESSION, sessions.delete, status=204, fails=[404]),
    Operation(
        "POST",
        BROADCAST,
        sessions.broadcast,
        status=202,
        fails=[400, 403],
        right="administer",
        body=PackBody,
    ),
    Operation("GET", "/v1/consumers", consumers.list_consumers),
    Operation(
        "PUT",
        CONSUMER,
        consumers.report,
        status=204,
        fails=[400, 403, 404, 409],
        right="subscribe",
    ),
    Operation(
        "DELETE", CONSUMER, consumers.forget, status=204, fails=[403, 404], right="administer"
    ),
    Operation("POST", COMMITS, commits.commit, fails=[400, 403, 404, 409, 507], right="publish"),
    Operation("GET", f"{COMMITS}/{{producer}}", commits.last_commit, fails=[404]),
    Operation(
        "POST",
        STAGED,
        commits.stage,
        fails=[400, 403, 409, 507],
        right="publish",
        media=(OCTETS,),
    ),
    Operation("DELETE", STAGED, commits.unstage, status=204, fails=[400, 403], right="publish"),
    _admin("GET", ACCOUNTS, accounts.list_accounts),
    _admin("POST", ACCOUNTS, accounts.create, 201, 400, 409),
    _admin("GET", ACCOUNT, accounts.show, 200, 404),
    _admin("DELETE", ACCOUNT, accounts.delete, 204, 400, 404, 409),
    _admin("PUT", f"{ACCOUNT}/password", accounts.set_password, 204, 400, 404),
    _admin("POST", GRANTS, accounts.grant, 204, 400, 404, 409),
    _admin("DELETE", GRANTS, accounts.revoke, 204, 400, 404),
    _admin("POST", TOKENS, accounts.make_token, 201, 400, 404, 409),
    _admin("DELETE", f"{TOKENS}/{{id}}", accounts.revoke_token, 204, 404),
    Operation(
        "POST", "/v1/tokens", accounts.make_own_token, status=201, fails=[400, 403, 404, 409]
    ),
    Operation("DELETE", "/v1/tokens/{id}", accounts.revoke_own_token, status=204, fails=[403, 404]),
    Operation(
        "POST",
        "/v1/signup",
        accounts.sign_up,
        status=201,
        fails=[400, 404, 409, 429],
        asks="nothing",
        body=SignUp,
    ),
    Operation("GET", CONNECTIONS, peers.list_connections, fails=[400]),
    Operation("GET", CONNECTION, peers.show_connection, fails=[404]),
    Operation(
        "DELETE",
        CONNECTION,
        peers.end_connection,
        status=204,
        fails=[403, 404],
        right="administer",
    ),
    Operation("GET", SESSIONS, peers.list_sessions, fails=[400]),
    Operation("GET", SESSION_ID, peers.show_session, fails=[404]),
    Operation(
        "DELETE",
        SESSION_ID,
        peers.end_session,
        status=204,
        fails=[403, 404],
        right="administer",
    ),
    Operation("POST", REDELIVER, peers.redeliver, status=202, fails=[403, 404], right="administer"),
    Operation(
        "GET", "/v1/dead-letters", letters.list_letters, fails=[400, 403, 429], asks="overview"
    ),
    Operation(
        "GET",
        "/v1/dead-letters/{id}",
        letters.show_letter,
        fails=[403, 404, 429],
        asks="overview",
    ),
    Operation("GET", UNDELIVERED, letters.list_undelivered, fails=[400, 403, 429], asks="overview"),
    Operation(
        "POST",
        f"{UNDELIVERED}/replay",
        letters.replay_undelivered,
        fails=[400, 403, 404, 409, 416, 429],
        asks="overview",
    ),
    Operation("GET", REPLAYS, letters.list_replays, fails=[403], asks="overview"),
    Operation(
        "POST",
        REPLAYS,
        letters.start_replay,
        fails=[400, 403, 409, 429],
        asks="overview",
    ),
    Operation("GET", REPLAY, letters.show_replay, fails=[403, 404], asks="overview"),
    Operation("DELETE", REPLAY, letters.stop_replay, status=204, fails=[403, 404], asks="overview"),
    Operation("GET", PIPELINES, pipelines.show, fails=[403], asks="overview"),
    _admin("POST", f"{PIPELINES}/stop", pipelines.stop, 202, 409),
    _admin("POST", f"{PIPELINES}/start", pipelines.start, 202, 400, 409),
    _admin("POST", f"{PIPELINES}/refresh", pipelines.refresh, 202, 400, 409),
    Operation("GET", "/v1/graph", graph.graph),
    Operation("GET", "/v1/info", info.info),
    Operation("GET", "/v1/settings", info.settings, fails=[403], asks="overview"),
    Operation("GET", "/v1/figures", info.sample),
    Operation("GET", "/v1/metrics/history", info.history, fails=[400, 403, 429], asks="overview"),
    Operation("GET", "/healthz", metrics.healthz, fails=[503], asks="nothing", produces=TEXT),
    Operation("GET", "/readyz", metrics.readyz, fails=[503], asks="nothing", produces=TEXT),
    Operation("GET", "/metrics", metrics.metrics, fails=[403], asks="figures", produces=TEXT),
)
OPERATIONS = tuple(replace(one, action=ACTIONS.get((one.method, one.path), "")) for one in _ALL)
