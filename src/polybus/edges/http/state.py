"""What every HTTP request of one bus may use."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from polybus.bus.topic import Topic
from polybus.config import Config
from polybus.edges.admin import AdminToken
from polybus.edges.edge import Edge
from polybus.edges.http.door import Door
from polybus.edges.tcp.certificates import Certificates
from polybus.errors import StorageError
from polybus.scan import Traffic
from polybus.services.accounts.signups import SignUps
from polybus.services.services import Services
from polybus.wire.msgstream import PROTOCOL as MSGSTREAM


class OpenWebSocket(Protocol):
    """A WebSocket, as the set of all of them knows it."""

    def ping(self) -> None: ...

    def shut_down(self) -> None: ...


class HttpState:
    """The bus and its services, and what the requests under way share.

    Attributes:
        count_connections: how many TCP connections are open.
        waiters: reads that wait for a topic to grow.
        polls_hanging: long polls that wait.
    """

    def __init__(
        self,
        edge: Edge,
        services: Services,
        token: AdminToken,
        count_connections: Callable[[], int],
        certificates: Certificates,
    ) -> None:
        self.edge = edge
        self.context = edge.context
        self.accounts = edge.accounts
        self.bad_peers = edge.bad_peers
        self.bus = edge.context.bus
        self.config: Config = edge.context.config
        self.door = Door(self.config)
        self.loop = edge.context.loop
        self.services = services
        self.inboxes = services.inboxes
        self.consumers = services.consumers
        self.state_db = services.state
        self.transactions = services.transactions
        self.token = token
        self.signups = SignUps(self.config.limits, self.loop.time)
        self.count_connections = count_connections
        self.certificates = certificates
        self.stopping = False
        self.waiters: set[asyncio.Event] = set()
        self.websockets: set[OpenWebSocket] = set()
        self.polls_hanging = 0

    @property
    def storage_error(self) -> StorageError | None:
        """Why the log or state.db takes no writes."""
        return self.context.durability.error or self.state_db.error

    def delivered(self, topic: Topic) -> dict[str, Traffic]:
        """What was delivered of a topic since the bus started, by protocol."""
        topic.settle()
        delivered = {**topic.delivered}
        # A feed is one subscriber for all its sessions: their deliveries are counted separately.
        delivered.pop(MSGSTREAM, None)
        if topic.name in self.inboxes.delivered:
            delivered[MSGSTREAM] = self.inboxes.delivered[topic.name]
        return delivered
