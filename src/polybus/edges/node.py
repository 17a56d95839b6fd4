"""A node: a whole bus in one object, from settings to open ports."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from polybus.bus.bus import Bus
from polybus.config import Config
from polybus.edges.admin.socket import Admin
from polybus.edges.admin.token import load_or_make
from polybus.edges.bad_peers import BadPeers
from polybus.edges.edge import Edge
from polybus.edges.http.edge import HttpEdge
from polybus.edges.http.state import HttpState
from polybus.edges.protocols.boson import BosonFramesTranslator, BosonPropertiesTranslator
from polybus.edges.protocols.goms import GomsTranslator
from polybus.edges.protocols.queue import QueueTranslator
from polybus.edges.server import Server
from polybus.edges.tcp.shared import TcpShared, TranslatorFactory
from polybus.lake import settings as pipeline_settings
from polybus.log.files import FileLog
from polybus.log.interface import Log, LogCallbacks, TopicSettings
from polybus.log.memory import MemoryLog
from polybus.services.context import Context
from polybus.services.durability import Durability
from polybus.services.memory import MemoryGate
from polybus.services.services import Services
from polybus.services.system_topics import EventWriter, make_topics

OpenLog = Callable[[Config, LogCallbacks], Log]


def clock_us() -> int:
    return time.time_ns() // 1000


def open_log(config: Config, callbacks: LogCallbacks | None = None) -> Log:
    """The log that the settings ask for: in files, or in memory with its topics in files."""
    data = Path(config.data)
    if config.durability == "memory":
        return MemoryLog(
            clock=clock_us,
            bytes_max=config.journal.memory_log_bytes_max,
            data=data,
            callbacks=callbacks,
        )
    return FileLog(
        data,
        durability=config.durability,
        journal=config.journal,
        retention=config.retention,
        clock=clock_us,
        callbacks=callbacks,
    )


class Node:
    """Opens the log, creates the declared topics, listens; `stop` reverses it.

    The attributes below are there once `start` has returned.
    """

    addresses: list[str]
    bus: Bus
    context: Context
    bad_peers: BadPeers
    services: Services
    http: HttpState
    tcp: TcpShared
    server: Server

    def __init__(self, config: Config, *, open_log: OpenLog | None = None) -> None:
        """`open_log` replaces the log that the settings ask for."""
        self.config = config
        self.data = Path(config.data)
        self._open_log = open_log

    async def start(self) -> None:
        """Accept connections when this returns.

        Raises:
            ConfigError: an address or certificate cannot be used; nothing is left open.
            StorageError: the data folder cannot be used.
        """
        loop = asyncio.get_running_loop()

        def in_loop(callback: Callable[..., None], argument: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback, argument)

        # The log calls the first two only after something was appended: by then `context` is there.
        callbacks = LogCallbacks(
            on_durable=lambda ticket: in_loop(self.context.durability.on_durable, ticket),
            on_failed=lambda error: in_loop(self.context.durability.on_failed, error),
            held_from=self._held_from,
        )
        self._log = (self._open_log or open_log)(self.config, callbacks)
        try:
            self._create_topics()
            self._build(loop)
            await self.services.start()
            self._http_edge.start()
            self.addresses = await self.server.start()
            edge = self.http.edge
            self._admin = Admin(edge, self.services.consumers, self.addresses, self._count)
            await self._admin.start()
        except BaseException:
            if hasattr(self, "services"):
                self._events.close()
                await self.services.close()
            self._log.close()
            raise

    def _create_topics(self) -> None:
        existing = set(self._log.topics())
        for topic in self.config.topic_list():
            if topic.name not in existing:
                settings = TopicSettings(
                    retention_age_s=topic.retention.age_s, retention_bytes=topic.retention.bytes
                )
                self._log.create_topic(topic.name, settings)

    def _build(self, loop: asyncio.AbstractEventLoop) -> None:
        config, limits = self.config, self.config.limits
        self.bus = bus = Bus(self._log, clock_us=clock_us, topics_max=limits.topics_max)
        make_topics(bus, config)
        self._events = EventWriter(bus, loop, clock_us, enabled=config.system.events)
        self.context = context = Context(
            bus=bus,
            config=config,
            loop=loop,
            clock_us=clock_us,
            memory=MemoryGate(self._log, loop, bytes_max=limits.memory_bytes_max),
            durability=Durability(bus),
            events=self._events.book,
        )
        self.bad_peers = BadPeers(
            lines_per_s=limits.error_lines_per_s,
            clock_s=time.monotonic,
            on_slow=self._tell_slow,
        )
        token = load_or_make(context.data)
        pipeline_settings.write(context.data, config)
        self.services = Services(context)
        edge = Edge(context, self.bad_peers)
        self.http = HttpState(edge, self.services, token, self._count)
        self._http_edge = HttpEdge(self.http)
        translators: dict[str, TranslatorFactory] = {
            "boson-frames": partial(BosonFramesTranslator, edge),
            "boson-properties": partial(BosonPropertiesTranslator, edge),
            "goms": partial(GomsTranslator, edge),
            "queue": partial(QueueTranslator, edge),
            "http": self._http_edge.translator,
        }
        self.tcp = TcpShared(edge, translators)
        self.server = Server(edge, self.tcp)

    async def stop(self) -> None:
        """Drain, sync, close: nothing that had a receipt, or was read before, is lost."""
        await self._admin.stop()
        await self._http_edge.stop()
        await self.server.stop()
        self._events.close()
        await self.services.close()
        await asyncio.to_thread(self._log.close)

    def _count(self) -> int:
        return len(self.tcp.connections)

    def _held_from(self, topic: str) -> int | None:
        # Nothing is removed before the consumers are known.
        return self.services.consumers.held_from(topic) if hasattr(self, "services") else 0

    def _tell_slow(self, peer: str, protocol: str, code: str) -> None:
        self.context.events.tell("subscriber-slow", peer=peer, protocol=protocol, code=code)

    @property
    def tcp_port(self) -> int:
        """The port of the first TCP connector."""
        return self._port("tcp")

    @property
    def udp_port(self) -> int:
        """The port of the first UDP connector."""
        return self._port("udp")

    def _port(self, transport: str) -> int:
        address = next(one for one in self.addresses if one.startswith(f"{transport}://"))
        return int(address.rpartition(":")[2])
