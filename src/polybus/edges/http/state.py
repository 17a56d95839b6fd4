"""The context of all HTTP requests of one bus."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from polybus.bus.topic import Topic
from polybus.config import Config
from polybus.edges.admin import AdminToken
from polybus.edges.edge import Edge
from polybus.edges.http.origin_check import OriginCheck
from polybus.edges.tcp.certificates import Certificates
from polybus.errors import StorageError
from polybus.scan import Traffic
from polybus.services.accounts.access import Member
from polybus.services.accounts.pace import ChangePace
from polybus.services.accounts.signups import SignUps
from polybus.services.audit import AuditLog
from polybus.services.figures.figures import BusFigures
from polybus.services.figures.senders import Senders
from polybus.services.masks import Masks
from polybus.services.pipeline_watch import PipelineWatch
from polybus.services.queries.pool import QueryPool
from polybus.services.redrives import Redrives
from polybus.services.services import Services
from polybus.wire.msgstream import PROTOCOL as MSGSTREAM


class OpenWebSocket(Protocol):
    """A WebSocket in the set of all open ones."""

    def ping(self) -> None: ...

    def shut_down(self) -> None: ...


class Connections(NamedTuple):
    """The number of open TCP connections, and all peers whose protocol is known."""

    count_open: Callable[[], int]
    members: Callable[[], list[Member]]


class HttpState:
    """The bus and its services, and the state that pending requests share.

    Attributes:
        count_connections, members: see Connections.
        waiters: reads that wait for a topic to grow.
        polls_hanging: long polls that wait.
        figures: the figures of the bus.
    """

    def __init__(
        self,
        edge: Edge,
        services: Services,
        token: AdminToken,
        connections: Connections,
        certificates: Certificates,
    ) -> None:
        self.edge = edge
        self.context = edge.context
        self.accounts = edge.accounts
        self.bad_peers = edge.bad_peers
        self.bus = edge.context.bus
        self.config: Config = edge.context.config
        self.origin_check = OriginCheck(self.config)
        self.loop = edge.context.loop
        self.services = services
        self.inboxes = services.inboxes
        self.consumers = services.consumers
        self.state_db = services.state
        self.transactions = services.transactions
        self.blobs = services.blobs
        self.token = token
        self.signups = SignUps(self.config.limits, self.loop.time)
        self.change_pace = ChangePace(self.loop)
        self.count_connections = connections.count_open
        self.members = connections.members
        self.certificates = certificates
        self.stopping = False
        self.waiters: set[asyncio.Event] = set()
        self.websockets: set[OpenWebSocket] = set()
        self.polls_hanging = 0
        self.audit = AuditLog(edge.context)
        self.started_us = edge.context.clock_us()
        self.started_s = self.loop.time()
        self.masks = Masks(self.config.http.masks)
        self.queries = QueryPool(
            self.context.data,
            self.config.queries,
            self.loop,
            is_readable=self.config.durability != "memory",
        )
        self.redrives = Redrives(self.context, self.audit, self.context.data)
        self.pipelines = PipelineWatch(self.context.data)
        self.figures = BusFigures(self)
        self.senders = Senders(self.bus, self.figures, self.loop.time)

    def reconfigure(self, config: Config) -> None:
        """Take over settings that the bus has reloaded."""
        self.config = config

    @property
    def storage_error(self) -> StorageError | None:
        """Why the log or state.db takes no writes."""
        return self.context.durability.error or self.state_db.error

    def delivered(self, topic: Topic) -> dict[str, Traffic]:
        """The delivered traffic of a topic since the bus started, by protocol."""
        topic.settle()
        delivered = {**topic.delivered}
        # A feed is one subscriber for all its sessions: their deliveries are counted separately.
        delivered.pop(MSGSTREAM, None)
        if topic.name in self.inboxes.delivered:
            delivered[MSGSTREAM] = self.inboxes.delivered[topic.name]
        return delivered
