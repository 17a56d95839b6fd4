"""Who may do what over HTTP, `/v1/live` and `/msgstream`: the rest of the table in `verbs`."""

from collections.abc import Mapping
from dataclasses import dataclass

from polybus.edges.access_matrix import CLOSED, DONE, NONE, OVER, OWNERS, RIGHT_OF, PeerRole
from polybus.edges.http.calls import Operation
from polybus.services.accounts.records import Right

LIVE, POLL, WEBSOCKET = "`/v1/live`", "`/msgstream`, a poll", "`/msgstream`, a WebSocket"
TOKENS = ("token-publish", "token-subscribe", "token-administer", "token-elsewhere")
OF_ACCOUNTS = {("POST", "/v1/tokens"): 403, ("DELETE", "/v1/tokens/{id}"): 404}
"""Administrators have no token of their own."""
PACKS = "/v1/sessions/{key}/packs"
"""A pack looks like a message of any topic."""


def right_of(operation: Operation) -> Right | None:
    """The right to a topic that it needs; None if it concerns only the caller's own objects."""
    if "{topic}" in operation.path:
        return operation.right or "subscribe"
    # A blob belongs to the topics whose messages refer to it.
    return "subscribe" if operation.path.startswith("/v1/blobs/") else None


def http_answer(operation: Operation, role: PeerRole) -> int | None:
    """The status of an operation: that of its success, or of the refusal; None if there is none."""
    if role in ("logging-in", "unproven"):
        # A request says itself who sends it.
        return None
    if role == "administrator":
        return OF_ACCOUNTS.get((operation.method, operation.path), operation.status)
    if operation.asks == "nothing":
        return operation.status
    if role in ("stranger", *OVER):
        return 401
    if operation.asks != "login":
        sees = role == "default" and operation.asks == "figures"
        return operation.status if sees else 403
    right = right_of(operation)
    if right is None:
        return 403 if _is_beyond(operation, role) else operation.status
    if role in OWNERS or RIGHT_OF.get(role) == right:
        return operation.status
    return 403 if RIGHT_OF.get(role) == "subscribe" else 404


def _is_beyond(operation: Operation, role: PeerRole) -> bool:
    """Whether an operation without a topic is denied to the default account, or to a token."""
    if operation.path == "/v1/tokens":
        return role == "default" or role in TOKENS
    if role not in TOKENS:
        return False
    if operation.path == "/v1/tokens/{id}":
        # A token revokes itself only.
        return True
    if role == "token-elsewhere":
        # What it asks for uses other topics.
        return operation.right == "administer" or operation.path == PACKS
    return operation.right not in (None, RIGHT_OF[role])


@dataclass(frozen=True, slots=True, kw_only=True)
class WebRequest:
    """A request of clients of WebSockets and polls.

    Attributes:
        right: to the topic that it names; None if it needs a login only.
        denied: the answer without that right, or to those who may not see the bus as a whole.
        answers: special answers for some roles.
    """

    name: str
    where: str
    words: str
    right: Right | None = None
    denied: str = ""
    needs_login: bool = True
    answers: Mapping[PeerRole, str]

    def answer(self, role: PeerRole) -> str:
        if role in self.answers:
            return self.answers[role]
        if role == "unproven":
            return NONE
        if role == "stranger" and self.needs_login:
            return "auth.needed"
        if not self.denied or role == "administrator":
            return DONE
        is_allowed = self.right and (role in OWNERS or RIGHT_OF.get(role) == self.right)
        return DONE if is_allowed else self.denied


_ENDED: Mapping[PeerRole, str] = {"revoked": "auth.ended", "expired": "auth.ended"}
_SUBSCRIBING: Mapping[PeerRole, str] = {**_ENDED, "logging-in": "auth.needed"}
_UNSET: Mapping[PeerRole, str] = {
    "revoked": "session.unset",
    "expired": "session.unset",
    "logging-in": NONE,
}
WEB_REQUESTS = (
    WebRequest(
        name="log in",
        where=LIVE,
        words="`login`",
        needs_login=False,
        answers={"logging-in": CLOSED},
    ),
    WebRequest(
        name="subscribe to the tail of the topic",
        where=LIVE,
        words="`subscribe` `tail`",
        right="subscribe",
        denied="topic.unknown",
        answers=_SUBSCRIBING,
    ),
    WebRequest(
        name="subscribe to figures, connections, graph: one's own",
        where=LIVE,
        words="`subscribe` `figures`, …",
        answers=_SUBSCRIBING,
    ),
    WebRequest(
        name="subscribe to pipelines, which concern all accounts",
        where=LIVE,
        words="`subscribe` `pipeline`",
        denied="auth.denied",
        answers=_SUBSCRIBING,
    ),
    WebRequest(
        name="unsubscribe",
        where=LIVE,
        words="`unsubscribe`",
        needs_login=False,
        answers={},
    ),
    WebRequest(
        name="receive and confirm, with a session's key",
        where=POLL,
        words="`GET`",
        needs_login=False,
        answers=_UNSET,
    ),
    WebRequest(
        name="receive and confirm, with a session's key",
        where=WEBSOCKET,
        words="connect",
        needs_login=False,
        answers=_UNSET,
    ),
)
