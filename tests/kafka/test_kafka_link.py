"""The end of the connections to Kafka; the brokers are played here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from polybus.errors import StorageError
from polybus.log.kafka import link as link_module
from polybus.log.kafka.link import KafkaClient, KafkaLink


class SilentBroker:
    """Takes connections and answers nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._taken: list[socket.socket] = []
        self.has_taken = threading.Event()
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._taken.append(self._listener.accept()[0])
                self.has_taken.set()

    def all_ended(self) -> bool:
        """Whether the peer of every connection has closed it."""
        for one in self._taken:
            one.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                while one.recv(1 << 16):
                    pass
        return bool(self._taken)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for one in (self._listener, *self._taken):
            one.close()


@pytest.fixture
def broker() -> Iterator[SilentBroker]:
    found = SilentBroker()
    yield found
    found.close()


def running(broker: SilentBroker) -> KafkaLink:
    """A link whose loop runs, and that has not asked a broker yet."""
    found = KafkaLink([broker.address], client_id="t")
    found._thread.start()
    return found


async def forgotten(broker: SilentBroker) -> None:
    """A connection that nobody closes, and that the collector cannot find yet."""
    host, port = broker.address.split(":")
    loop = asyncio.get_running_loop()
    _kept.append(await loop.create_connection(asyncio.Protocol, host, int(port)))


_kept: list[object] = []


def test_a_start_that_is_given_up_leaves_no_connection(
    broker: SilentBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the first answer when its time is over."""
    run = KafkaLink.run
    monkeypatch.setattr(KafkaLink, "run", lambda self, work, timeout_s=0.5: run(self, work, 0.5))
    with pytest.raises(StorageError) as caught:
        KafkaLink([broker.address], client_id="t").open()
    assert caught.value.code == "log.unreachable"
    assert broker.all_ended()


def test_a_connection_that_was_forgotten_ends_with_the_link(broker: SilentBroker) -> None:
    link = running(broker)
    link.run(forgotten(broker))
    assert broker.has_taken.wait(20)
    link.stop()
    assert broker.all_ended()
    assert link.loop.is_closed()


def test_a_task_that_misses_its_end_does_not_keep_connections_open(broker: SilentBroker) -> None:
    link = running(broker)

    async def deaf() -> None:
        await forgotten(broker)
        # As `wait_for` of Python 3.11 does if the answer comes in the same moment.
        with contextlib.suppress(asyncio.CancelledError):
            has_begun.set()
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    has_begun = threading.Event()
    link.soon(lambda: link.start(deaf()))
    assert has_begun.wait(20)
    link.stop()
    assert broker.all_ended()
    assert link.loop.is_closed()


def test_a_close_that_takes_too_long_leaves_no_connection(
    broker: SilentBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "CLOSE_TIMEOUT_S", 0.2)
    link = running(broker)
    link.run(forgotten(broker))
    assert broker.has_taken.wait(20)

    async def never() -> None:
        await asyncio.Event().wait()

    link._client = cast(KafkaClient, SimpleNamespace(close=never))
    link.stop()
    assert broker.all_ended()
    assert link.loop.is_closed()
