"""A node: a whole bus in one object, from settings to open ports."""

import asyncio
import contextlib
import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from polybus import config_file, names
from polybus.batch import Batch
from polybus.bus.bus import Bus
from polybus.config import Config, Connector, DeclaredTopic
from polybus.edges.admin import RunFile, load_or_make
from polybus.edges.edge import Edge
from polybus.edges.http.edge import HttpEdge
from polybus.edges.http.state import Connections, HttpState
from polybus.edges.port_owner import port_owner
from polybus.edges.protocols.boson import BosonFramesTranslator, BosonPropertiesTranslator
from polybus.edges.protocols.goms import GomsTranslator
from polybus.edges.protocols.queue import QueueTranslator
from polybus.edges.tcp.certificates import Certificates
from polybus.edges.tcp.connection import Connection
from polybus.edges.tcp.context import TcpContext, TranslatorFactory
from polybus.edges.tcp.listener import Listener, bind, bind_path, handed_sockets
from polybus.edges.udp import UdpEdge
from polybus.errors import ConfigError, PolybusError
from polybus.lake import settings as pipeline_settings
from polybus.log import file_modes
from polybus.log.cluster_location import check_location, location_of, write_location
from polybus.log.copying import check_copied
from polybus.log.files import FileLog
from polybus.log.interface import SHARED, Log, LogCallbacks, TopicSettings
from polybus.log.memory import MemoryLog
from polybus.services.accounts.access import Member
from polybus.services.accounts.accounts import Accounts
from polybus.services.accounts.cluster import ClusterAccountStore
from polybus.services.accounts.exposure import check_exposure
from polybus.services.accounts.store import AccountStore
from polybus.services.bad_peers import BadPeers
from polybus.services.cluster_table import ClusterTable
from polybus.services.context import Context, Durability
from polybus.services.events import EventRecorder
from polybus.services.memory import MemoryGate
from polybus.services.services import Services, system_settings
from polybus.services.topics import create_missing, create_topics

RELOADED = ("topics", "topic_config", "retention", "pipeline", "tables")
"""The settings that can change while the bus runs; the files of certificates can too."""
OpenLog = Callable[[Config, LogCallbacks], Log]


def clock_us() -> int:
    return time.time_ns() // 1000


def open_log(config: Config, callbacks: LogCallbacks | None = None) -> Log:
    """The log that the settings ask for: in files, in Kafka, or in memory with topics in files.

    Raises ConfigError `config.log` if the folder belongs to another kind of log; StorageError.
    """
    data = Path(config.data)
    check_location(config)
    file_modes.prepare(data, group=config.group_access)
    if config.is_cluster:
        log = _open_kafka(config, callbacks)
        try:
            write_location(data, location_of(config))
        except BaseException:
            log.close()
            raise
        return log
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


def _open_kafka(config: Config, callbacks: LogCallbacks | None) -> Log:
    try:
        from polybus.log.kafka.log import KafkaLog
        from polybus.log.kafka.registry import KafkaOptions
        from polybus.log.kafka.security import client_settings
    except ModuleNotFoundError as error:
        text = f"log is {config.log!r}, and {error.name} is not installed"
        raise ConfigError("cluster.library-missing", text) from error
    cluster = config.cluster
    return KafkaLog(
        config.log,
        options=KafkaOptions(
            node=socket.gethostname(),
            replicas=cluster.replicas,
            insync_min=cluster.insync_min,
            message_bytes_max=config.limits.message_bytes_max,
            prefix=cluster.prefix,
            retention=TopicSettings(
                retention_age_s=config.retention.age_s, retention_bytes=config.retention.bytes
            ),
            recent_bytes_max=cluster.recent_bytes_max,
            transaction_timeout_s=cluster.transaction_timeout_s,
            security=client_settings(cluster.tls, cluster.login),
            waits=config.durability == "interval",
        ),
        clock=clock_us,
        data=Path(config.data),
        callbacks=callbacks,
    )


def settings_of(topic: DeclaredTopic) -> TopicSettings:
    return TopicSettings(
        retention_age_s=topic.retention.age_s, retention_bytes=topic.retention.bytes
    )


class Server:
    """Listens on every connector of one bus."""

    def __init__(self, edge: Edge, tcp: TcpContext, certificates: Certificates) -> None:
        self._edge = edge
        self._context = edge.context
        self._tcp = tcp
        self._listeners: list[Listener] = []
        self._udp_edges: list[UdpEdge] = []
        self._certificates = certificates
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> list[str]:
        """Listen on every connector; return the addresses, such as `tcp://127.0.0.1:55545`.

        Raises:
            ConfigError: an address or a certificate cannot be used.
        """
        addresses = []
        for index, connector in enumerate(self._context.config.connectors):
            try:
                addresses.append(await self._listen(connector))
            except ConfigError as error:
                raise ConfigError(error.code, f"connectors[{index}]: {error.text}") from error
            except OSError as error:
                text = f"connectors[{index}]: {_cannot_listen(connector, error)}"
                raise ConfigError("config.address", text) from error
        for one in handed_sockets():
            # Clients that connect there would never get an answer.
            text = f"the service manager listens on {one.getsockname()} for the bus, but no TCP"
            raise ConfigError("config.address", f"{text} connector has this ip and port; add one")
        self._tcp.start()
        self._watching = asyncio.create_task(self._certificates.watch())
        return addresses

    async def _listen(self, connector: Connector) -> str:
        if connector.protocol == "udp":
            edge = UdpEdge(self._edge, connector)
            self._udp_edges.append(edge)
            return f"udp://{connector.ip}:{await edge.listen()}"
        settings = connector.tls
        if settings is not None:
            self._certificates.add(settings)

        def connect() -> Connection:
            tls = None if settings is None else self._certificates.context(settings)
            return Connection(self._tcp, connector, tls)

        sockets = await bind(connector.ip, connector.port)
        self._listeners += [Listener(self._tcp, one, connect) for one in sockets]
        return f"tcp://{connector.ip}:{sockets[0].getsockname()[1]}"

    def members(self) -> list[Member]:
        """All peers whose protocol is known."""
        translators = [one.translator for one in self._tcp.connections]
        found: list[Member] = [one for one in translators if one is not None]
        return [*found, *(one for edge in self._udp_edges for one in edge.members())]

    async def listen_for_admin(self, path: Path) -> None:
        """Listen on a Unix socket that only the user of this process may open."""
        if path.parent != self._context.data.resolve():
            file_modes.prepare_socket_folder(path)
        connect = partial(Connection, self._tcp, Connector(speaks="http"), is_admin=True)
        self._listeners.append(Listener(self._tcp, bind_path(path), connect))

    async def stop(self) -> None:
        """Stop accepting, give receipts for what was read, then close every connection.

        Returns within `shutdown-timeout-s`. The caller closes the log.
        """
        if self._watching is not None:
            self._watching.cancel()
        for listener in self._listeners:
            listener.close()
        for edge in self._udp_edges:
            edge.stop_reading()
        self._tcp.stop_reading()
        patience_s = self._context.config.limits.shutdown_timeout_s / 3
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._context.durability.future(), patience_s)
        for edge in self._udp_edges:
            edge.close()
        await self._tcp.close(patience_s)
        await asyncio.sleep(0)


def _cannot_listen(connector: Connector, error: OSError) -> str:
    text = f"cannot listen on {connector.protocol} {connector.ip}:{connector.port}"
    if error.errno != errno.EADDRINUSE:
        return f"{text}: {error.strerror or error}"
    holder = port_owner(connector.port, connector.protocol)
    taken = f"the port is in use by {holder}" if holder else "the port is in use"
    return f"{text}: {taken}; choose another with --port, or 0 for any free one"


class Node:
    """Opens the log, creates the declared topics, listens; `stop` reverses it.

    Its other attributes exist once `start` has returned.
    """

    def __init__(
        self, config: Config, *, open_log: OpenLog | None = None, insecure: bool = False
    ) -> None:
        """`open_log` replaces the log that the settings ask for.

        With `insecure` it listens beyond loopback even if strangers can use it.
        """
        if config.is_cluster:
            # A blob would be in the files of one node only, so no message becomes one.
            whole = msgspec.structs.replace(
                config.limits, inline_bytes_max=config.limits.message_bytes_max
            )
            config = msgspec.structs.replace(config, limits=whole)
        self.config = config
        self._insecure = insecure
        self.data = Path(config.data)
        self._open_log = open_log
        self._run_note = RunFile(self.data)
        self._watched = -1
        self._taking_thread = 0
        """The thread that takes results of the log now: it may give receipts at once."""
        self._early: list[object] = []
        """Messages that arrived before the log was open."""

    async def start(self) -> None:
        """Accept connections when this returns.

        Raises:
            ConfigError: an address or certificate cannot be used, or strangers could use the
                bus; nothing is left open.
            StorageError: the data folder cannot be used.
        """
        loop = asyncio.get_running_loop()
        callbacks = self._log_callbacks(loop)
        check_copied(self.data)
        self._cluster_table = ClusterTable(loop, secrets.token_hex(4))
        open_it = self._open_log or open_log
        if self.config.is_cluster:
            self._log = await asyncio.to_thread(open_it, self.config, callbacks)
            for arrival in self._early:
                self._log.admit(arrival)
            self._early.clear()
        else:
            self._log = open_it(self.config, callbacks)
        self._cluster_table.connect(self._log.cluster)
        try:
            accounts = self._account_store(loop)
            if not self._insecure:
                check_exposure(self.config, accounts)
            await self._create_topics()
            self._build(loop, accounts)
            # First: a session keeps only the topics that its account may read.
            await self.accounts.start()
            await self.services.start()
            for name in self._log.frozen:
                self._tell_frozen(name)
            self._watch(loop)
            self._http_edge.start()
            self.addresses = await self.server.start()
            await self.server.listen_for_admin(self._run_note.socket)
            self._run_note.write(self.config.connectors, self.addresses)
        except BaseException:
            if hasattr(self, "server"):
                await self.stop()
            else:
                await asyncio.to_thread(self._log.close)
            raise

    def _log_callbacks(self, loop: asyncio.AbstractEventLoop) -> LogCallbacks:
        def in_loop(callback: Callable[..., None], *arguments: object) -> None:
            try:
                loop.call_soon_threadsafe(callback, *arguments)
            except RuntimeError:
                # The loop is closed, so there is no waiter.
                pass

        def on_durable(ticket: int) -> None:
            if threading.get_ident() == self._taking_thread:
                self._settle(ticket)
            else:
                in_loop(self._settle, ticket)

        # The log calls the first two only after an append: `tcp` exists by then.
        return LogCallbacks(
            on_durable=on_durable,
            on_failed=lambda error: in_loop(self.context.durability.on_failed, error),
            on_frozen=lambda topic: in_loop(self._tell_frozen, topic),
            held_from=self._held_from,
            on_arrived=lambda arrival: in_loop(self._arrive, arrival),
            on_refused=lambda batch, error: in_loop(self._refuse_late, (batch, error)),
            on_topic=lambda topic, exists: in_loop(self._topic_changed, topic, exists),
            on_shared=lambda batches: in_loop(self._cluster_table.arrive, batches),
        )

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take the log's results on the loop, so that receipts do not wait for another thread."""
        if isinstance(self._log, FileLog):
            self._watched = self._log.watch()
            if self._watched >= 0:
                loop.add_reader(self._watched, self._take_results, self._log)

    def _take_results(self, log: FileLog) -> None:
        self._taking_thread = threading.get_ident()
        try:
            log.take_results()
        finally:
            self._taking_thread = 0

    def _settle(self, ticket: int) -> None:
        # Send receipts at once. After another turn of the loop the committer may hold the
        # interpreter's lock.
        self.tcp.outboxes.together(self.context.durability.on_durable, ticket)

    def _account_store(self, loop: asyncio.AbstractEventLoop) -> AccountStore:
        if self._log.cluster is None:
            return AccountStore(self.data)
        return ClusterAccountStore(self.data, self._cluster_table, loop)

    async def _create_topics(self) -> None:
        """Create the declared topics that are missing; another node may be faster."""
        if not self.config.is_cluster:
            self._log.create_topics(self._missing_topics())
            return
        system = dict.fromkeys(names.SYSTEM_TOPICS, system_settings(self.config.system))
        await create_missing(self._log, self._missing_topics(system))

    def _arrive(self, arrival: object) -> None:
        # Messages that arrive before the bus exists have no subscribers.
        if hasattr(self, "bus"):
            self.bus.arrive(arrival)
        elif hasattr(self, "_log"):
            self._log.admit(arrival)
        else:
            self._early.append(arrival)

    def _topic_changed(self, topic: str, exists: bool) -> None:
        if hasattr(self, "bus"):
            self.bus.topic_changed(topic, exists=exists)

    def _refuse_late(self, refused: tuple[Batch, PolybusError]) -> None:
        if refused[0].topic == SHARED:
            self._cluster_table.refuse(*refused)
        else:
            self.bus.refuse_late(refused)

    def reload(self, config: Config) -> list[str]:
        """Take over RELOADED settings and certificates; return the keys of others that differ.

        Raises:
            ConfigError: a certificate cannot be used; nothing has changed.
            StorageError: the file for the pipeline cannot be written; only certificates have
            changed.
        """
        taken = {name: getattr(config, name) for name in RELOADED}
        changed = msgspec.structs.replace(self.config, **taken)
        self.http.certificates.reload()
        pipeline_settings.write(self.data, changed)
        self.config = changed
        if isinstance(self._log, FileLog):
            self._log.set_retention(config.retention)
        self.services.consumers.set_retention(config.retention)
        self.http.reconfigure(self.config)
        return config_file.differences(self.config, config)

    async def create_declared(self) -> None:
        """Create the declared topics that do not exist; one call after the other.

        Raises StorageError, UsageError if a topic cannot be created; call again.
        """
        await create_topics(self.bus, self._missing_topics())

    def _missing_topics(
        self, more: Mapping[str, TopicSettings] | None = None
    ) -> dict[str, TopicSettings]:
        """The declared, or otherwise required, topics that do not exist."""
        wanted = {topic.name: settings_of(topic) for topic in self.config.topic_list()}
        existing = set(self._log.topics())
        wanted |= more or {}
        return {name: settings for name, settings in wanted.items() if name not in existing}

    def _build(self, loop: asyncio.AbstractEventLoop, accounts: AccountStore) -> None:
        config, limits = self.config, self.config.limits
        self.bus = bus = Bus(self._log, clock_us=clock_us, topics_max=limits.topics_max)
        self._events = EventRecorder(bus, loop, clock_us, enabled=config.system.events)
        self.context = context = Context(
            bus=bus,
            config=config,
            loop=loop,
            clock_us=clock_us,
            memory=MemoryGate(self._log, loop, bytes_max=limits.memory_bytes_max),
            durability=Durability(bus),
            events=self._events,
            cluster_table=self._cluster_table if self._log.cluster is not None else None,
            node=f"@{self._cluster_table.node}" if config.is_cluster else "",
        )
        self.bad_peers = BadPeers(
            lines_per_s=limits.error_lines_per_s,
            clock_s=time.monotonic,
            events=self._events,
        )
        token = load_or_make(context.data)
        pipeline_settings.write(context.data, config)
        self.accounts = Accounts(accounts, bus, config, loop, lambda: self.server.members())
        self.services = Services(context, self.accounts)
        edge = Edge(context, self.bad_peers, self.accounts, self.services.blobs)
        certificates = Certificates()
        connections = Connections(lambda: len(self.tcp.connections), lambda: self.server.members())
        self.http = HttpState(edge, self.services, token, connections, certificates)
        self.accounts.edits.record = self.http.audit.record
        self._http_edge = HttpEdge(self.http)
        translators: dict[str, TranslatorFactory] = {
            "boson-frames": partial(BosonFramesTranslator, edge),
            "boson-properties": partial(BosonPropertiesTranslator, edge),
            "goms": partial(GomsTranslator, edge),
            "queue": partial(QueueTranslator, edge),
            "http": self._http_edge.translator,
        }
        self.tcp = TcpContext(edge, translators)
        self.server = Server(edge, self.tcp, certificates)

    async def stop(self) -> None:
        """Drain, sync, close: no message that had a receipt, or was read before, is lost."""
        self._run_note.remove()
        await self._http_edge.stop()
        await self.server.stop()
        self._events.close()
        self.accounts.close()
        await self.services.close()
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
        await asyncio.to_thread(self._log.close)

    def _tell_frozen(self, topic: str) -> None:
        error = self._log.frozen.get(topic)
        if error is not None:
            owner = self.accounts.default.owner_of(topic)
            self._events.tell("topic-damaged", account=owner, topic=topic, reason=error.text)

    def _held_from(self, topic: str) -> int | None:
        # Remove nothing before the consumers are known.
        return self.services.consumers.held_from(topic) if hasattr(self, "services") else 0

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
