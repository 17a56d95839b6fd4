"""A node: a whole bus in one object, from settings to open ports."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from polybus.config import Config
from polybus.edges.admin.socket import Admin
from polybus.edges.admin.token import load_or_make
from polybus.edges.http.edge import HttpEdge
from polybus.edges.server import Server
from polybus.lake import settings as pipeline_settings
from polybus.log.files import FileLog
from polybus.log.interface import Log, TopicSettings
from polybus.log.memory import MemoryLog
from polybus.services.system_topics import make_topics


class Node:
    """Opens the log, creates the declared topics, listens; `stop` undoes it in reverse."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.data = Path(config.data)
        self.addresses: list[str] = []
        self.server: Server
        self.http: HttpEdge
        self._log: Log
        self._admin: Admin | None = None

    async def start(self) -> None:
        """Accept connections when this returns.

        Raises:
            ConfigError: an address or certificate cannot be used; nothing is left open.
            StorageError: the data folder cannot be used.
        """
        self._log = open_log(self.config)
        http: HttpEdge | None = None
        try:
            existing = set(self._log.topics())
            for topic in self.config.topic_list():
                if topic.name not in existing:
                    settings = TopicSettings(
                        retention_age_s=topic.retention.age_s, retention_bytes=topic.retention.bytes
                    )
                    self._log.create_topic(topic.name, settings)
            self.server = Server(self.config, self._log)
            make_topics(self.server.bus, self.config)
            self.server.admin_token = load_or_make(self.data)
            pipeline_settings.write(self.data, self.config)
            http = self.http = self.server.http = HttpEdge(self.server)
            await http.start()
            self.addresses = await self.server.start()
            self._admin = Admin(self.server, self.data, self.addresses)
            await self._admin.start()
        except BaseException:
            if http is not None:
                await http.close()
            self._log.close()
            raise

    async def stop(self) -> None:
        """Drain, sync, close: nothing that had a receipt, or was read before, is lost."""
        if self._admin is not None:
            await self._admin.stop()
        await self.http.stop()
        await self.server.stop()
        await self.http.close()
        await asyncio.to_thread(self._log.close)

    @property
    def tcp_port(self) -> int:
        """The port of the first TCP connector."""
        address = next(one for one in self.addresses if one.startswith("tcp://"))
        return int(address.rpartition(":")[2])

    @property
    def udp_port(self) -> int:
        address = next(one for one in self.addresses if one.startswith("udp://"))
        return int(address.rpartition(":")[2])


def clock_us() -> int:
    return time.time_ns() // 1000


def open_log(config: Config) -> Log:
    """The log the settings ask for: in files, or in memory with its topics in files."""
    data = Path(config.data)
    if config.durability == "memory":
        return MemoryLog(clock=clock_us, bytes_max=config.journal.memory_log_bytes_max, data=data)
    return FileLog(
        data,
        durability=config.durability,
        journal=config.journal,
        retention=config.retention,
        clock=clock_us,
    )
