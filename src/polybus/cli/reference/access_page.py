"""docs/reference/access.md: who may do what, on every protocol."""

from collections.abc import Sequence

from polybus.edges.access_matrix import LOGINS, NONE, REQUESTS, ROLES, PeerRole
from polybus.edges.http.calls import Operation
from polybus.edges.http.routes import OPERATIONS
from polybus.edges.web_access_matrix import WEB_REQUESTS, http_answer, right_of

TEXT = """\
Who may do what. The columns are roles of a peer: it has not logged in, and is not the default
account without a login; it is logged in to an [account](../howto/accounts.md) that has no right to
the topic, or one of the rights `publish`, `subscribe` and `administer`; the topic belongs to its
account; it is an administrator. Several rights allow what each of them allows. A topic that one may
not use is answered as one that does not exist.

The second table of each section has peers that came in another way: the default account without a
login, asking for a topic of its own; tokens of the topic's owner that are limited to one right, or
to another topic; a token that was revoked or has expired after the peer had logged in by it; a peer
whose login is not answered yet; and an address of UDP that is not proven. No account writes system
topics, and each reads its own."""
STREAMS_TEXT = """\
Administrators speak HTTP only. A queue is for the account of its connector: it subscribes to the
topic by connecting, if it may read it.

`waits`: it is done after the login, or refused. `dropped`: a datagram cannot wait. `prove`: the
answer is a key to send back, and nothing else. `closed`: `auth.ended` (in goMS `000401`) says why,
except to queues."""
HTTP_TEXT = """\
A status below 300 is that of success. What has no topic in its path is about the caller's own
topics, sessions, consumers, producers and tokens; those of others do not exist for it. The token
for another topic is asked here about what uses this one. A request says itself who sends it, so no
login is under way."""
WEB_TEXT = """\
`/msgstream` asks for the key of a session and nothing else. A session that was made with a token
ends with it. A page of `/v1/live` whose token is over gets `auth.ended` and is closed."""
HEADINGS: dict[PeerRole, str] = {
    "stranger": "not logged in",
    "none": "no right",
    "publish": "`publish`",
    "subscribe": "`subscribe`",
    "administer": "`administer`",
    "owner": "own topic",
    "administrator": "administrator",
    "default": "default account",
    "token-publish": "token, `publish`",
    "token-subscribe": "token, `subscribe`",
    "token-administer": "token, `administer`",
    "token-elsewhere": "token, another topic",
    "revoked": "revoked",
    "expired": "expired",
    "logging-in": "login under way",
    "unproven": "unproven address",
}


def access_page(note: str) -> str:
    lines = ["# Access", "", note, "", TEXT, "", "## Boson, goMS and queues", "", STREAMS_TEXT, ""]
    streamed: list[PeerRole] = [role for role in ROLES if role != "administrator"]
    roles: Sequence[PeerRole]
    for roles in (streamed, LOGINS):
        lines += [*_head(["request", "protocol", "words"], roles), *_requests(roles), ""]
    lines += ["## HTTP", "", HTTP_TEXT, ""]
    asked: list[PeerRole] = [
        role for role in LOGINS if http_answer(OPERATIONS[0], role) is not None
    ]
    for roles in (ROLES, asked):
        rows = [_operation(one, roles) for one in OPERATIONS]
        lines += [*_head(["operation", "right"], roles), *rows, ""]
    lines += ["## Live pages and msgstream", "", WEB_TEXT, ""]
    told: list[PeerRole] = [role for role in LOGINS if role != "unproven"]
    for roles in (ROLES, told):
        lines += [*_head(["request", "where", "words"], roles), *_web_requests(roles), ""]
    return "\n".join(lines)


def _head(first: list[str], roles: Sequence[PeerRole]) -> list[str]:
    cells = [*first, *(HEADINGS[role] for role in roles)]
    return [_row(cells), "|" + "---|" * len(cells)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _requests(roles: Sequence[PeerRole]) -> list[str]:
    return [
        _row([request.name, protocol, words, *(request.answer(protocol, role) for role in roles)])
        for request in REQUESTS
        for protocol, words in request.words.items()
    ]


def _operation(operation: Operation, roles: Sequence[PeerRole]) -> str:
    right = right_of(operation)
    statuses = [str(http_answer(operation, role)) for role in roles]
    return _row(
        [f"`{operation.method} {operation.path}`", right and f"`{right}`" or NONE, *statuses]
    )


def _web_requests(roles: Sequence[PeerRole]) -> list[str]:
    return [
        _row([one.name, one.where, one.words, *(one.answer(role) for role in roles)])
        for one in WEB_REQUESTS
    ]
