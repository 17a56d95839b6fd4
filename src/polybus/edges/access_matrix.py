"""Who may do what, on every protocol: the access matrix in docs/reference/access.md. Which request
needs which right.

The role of a peer determines which requests it may make. The check is in one place for each kind of
protocol: `Translator.take` (a login), the dictionaries of an `AccountAccess` (a right to a topic),
and `Call` (both, over HTTP). The tests send every request in every role to a bus. `web_verbs` has
HTTP, `/v1/live` and `/msgstream`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from polybus.services.accounts.records import Right
from polybus.wire import boson, goms
from polybus.wire.codec import Large, Login, Publish, PublishPart

FRAMES, PROPERTIES, GOMS, UDP, QUEUE = (
    "boson-frames",
    "boson-properties",
    "goms",
    "goms over UDP",
    "queue",
)
STREAMS = (FRAMES, PROPERTIES, GOMS, UDP, QUEUE)
PeerRole = Literal[
    "stranger",
    "none",
    "publish",
    "subscribe",
    "administer",
    "owner",
    "administrator",
    "default",
    "token-publish",
    "token-subscribe",
    "token-administer",
    "token-elsewhere",
    "revoked",
    "expired",
    "logging-in",
    "unproven",
]
ROLES: tuple[PeerRole, ...] = get_args(PeerRole)[:7]
"""A peer that has not logged in; accounts without a right to the topic, and with one of them; the
account that the topic belongs to; and administrators, who speak HTTP only."""
LOGINS: tuple[PeerRole, ...] = get_args(PeerRole)[7:]
"""The default account without a login, about its own topic; tokens of the topic's owner that have
one right, or all to another topic; a token that was revoked, or has expired, since the login; a
login that is not answered yet; and an address of UDP that is not proven."""
OWNERS = ("owner", "default")
OVER = ("revoked", "expired")
RIGHT_OF: Mapping[PeerRole, Right] = {
    "publish": "publish",
    "subscribe": "subscribe",
    "administer": "administer",
    "token-publish": "publish",
    "token-subscribe": "subscribe",
    "token-administer": "administer",
}
"""The right to the topic that a role has, if it is one of these."""
CLOSED = "closed"
DONE = "yes"
WAITS = "waits"
DROPPED = "dropped"
PROVE = "prove"
NONE = "–"
"""There is no such peer in this protocol."""
NEEDED: Mapping[str, str] = {
    FRAMES: "auth.needed",
    PROPERTIES: "auth.needed",
    GOMS: "000401",
    UDP: "000401",
    QUEUE: CLOSED,
}
"""The answer to a stranger, for any request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRequest:
    """A request of peers.

    Attributes:
        words: the request in each protocol that has it.
        events: the events of the codecs for it.
        right: to the topic that it names; None if it needs a login only.
        denied: the answer without that right, by protocol.
    """

    name: str
    words: Mapping[str, str]
    events: tuple[type, ...]
    right: Right | None = None
    denied: Mapping[str, str] | None = None
    needs_login: bool = True

    def answer(self, protocol: str, role: PeerRole) -> str:
        """`yes`, the code of the refusal, or another effect on it or its connection."""
        if role == "unproven":
            return PROVE if protocol == UDP else NONE
        if role == "logging-in":
            # A datagram cannot wait in its socket.
            return DROPPED if protocol == UDP else WAITS
        if role in OVER and protocol != UDP:
            return CLOSED
        if protocol == QUEUE:
            return self._queue_answer(role)
        # An address of UDP has no connection that could be closed.
        if role in ("stranger", *OVER) and self.needs_login:
            return NEEDED[protocol]
        if self.right is None or role in OWNERS or RIGHT_OF.get(role) == self.right:
            return DONE
        return (self.denied or {}).get(protocol, DONE)

    def _queue_answer(self, role: PeerRole) -> str:
        """A queue belongs to one account, whatever rights others have to its topic."""
        if role in ("stranger", "default") and not self.needs_login:
            return DONE if role == "stranger" else NONE
        if role in ("token-publish", "token-subscribe"):
            return DONE if self.right in (None, RIGHT_OF[role]) else CLOSED
        return DONE if role in OWNERS else CLOSED


_UNKNOWN = {FRAMES: "topic.unknown", PROPERTIES: "topic.unknown", QUEUE: CLOSED}
REQUESTS = (
    PeerRequest(
        name="log in",
        words={FRAMES: "`$login`", PROPERTIES: "`hbfl`", GOMS: "login", UDP: "login, after prove"}
        | {QUEUE: "the first message, with `token-required`"},
        events=(Login, goms.Prove),
        needs_login=False,
    ),
    PeerRequest(
        name="publish",
        words={FRAMES: "a frame", PROPERTIES: "`topic`, `content`", GOMS: "send", UDP: "send"}
        | {QUEUE: "a message"},
        events=(Publish, goms.Send, boson.ReceiptOwed, *get_args(Large)),
        right="publish",
        denied=_UNKNOWN | {GOMS: "002001", UDP: "002001"},
    ),
    PeerRequest(
        name="publish in parts",
        words={FRAMES: "flags 1 to 3", PROPERTIES: "`hbff`"},
        events=(PublishPart,),
        right="publish",
        denied=_UNKNOWN,
    ),
    PeerRequest(
        name="subscribe, from any position",
        words={FRAMES: "`$subscribe`", PROPERTIES: "`hbfs`", GOMS: "register", UDP: "register"},
        events=(boson.Subscribe, goms.Register),
        right="subscribe",
        denied=_UNKNOWN | {GOMS: "001001", UDP: "001001"},
    ),
    PeerRequest(
        name="subscribe to all topics that one may read",
        words={FRAMES: "`$subscribe` `*`", PROPERTIES: "`hbfs` `*`"},
        events=(boson.Subscribe,),
    ),
    PeerRequest(
        name="unsubscribe from all topics",
        words={FRAMES: "`$unsubscribe`", PROPERTIES: "`hbfu`", GOMS: "logout", UDP: "logout"},
        events=(boson.Unsubscribe, goms.Logout),
    ),
    PeerRequest(
        name="download a payload of the topic",
        words={GOMS: "download", UDP: "download"},
        events=(goms.Download,),
        right="subscribe",
        denied={GOMS: "004001", UDP: "004001"},
    ),
    PeerRequest(
        name="close",
        words={GOMS: "close", UDP: "close"},
        events=(goms.Close,),
        needs_login=False,
    ),
)
