"""Large payloads with the client: from files and iterators, by reference, and downloaded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from client_kit import Proxy, take, url_of

import polybus
from polybus.client.blobs import Source
from polybus.edges.node import Node
from polybus.errors import PolybusError, UsageError
from polybus.log.blobs import blobs_folder
from polybus.testing import run_bus

LARGE = bytes(range(256)) * 10_000
ID = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture
async def bus() -> AsyncIterator[Node]:
    async with run_bus("news", limits={"inline-bytes-max": 100_000}) as node:
        yield node


@pytest.mark.parametrize("scheme", ["boson", "boson+properties", "goms", "http", "ws"])
async def test_a_payload_is_sent_and_received_on_every_protocol(
    bus: Node, scheme: str, tmp_path: Path
) -> None:
    async with (
        polybus.connect(url_of(scheme, bus.tcp_port)) as c,
        c.subscribe("news") as subscription,
    ):
        await c.publish("news", b"1")
        await c.publish("news", LARGE, receipt=True)
        await c.publish("news", b"2")
        before, message, after = await take(subscription, 3)
        assert (before.value, after.value) == (b"1", b"2")
        assert before.reference is None
        if scheme.startswith("boson"):
            assert message.value == LARGE and message.reference is None
            assert (message.offset, after.offset) == (1, 2)
            return
        reference = message.reference
        assert reference is not None and (reference.id, reference.size) == (ID, len(LARGE))
        path = await c.download(reference, tmp_path / "payload")
        assert path.read_bytes() == LARGE


async def test_a_file_an_open_file_and_an_iterator_can_be_published(
    bus: Node, tmp_path: Path
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), 70_000):
            yield LARGE[start : start + 70_000]

    path = tmp_path / "film.mp4"
    path.write_bytes(LARGE)
    seen: list[int] = []
    async with polybus.connect(url_of("boson", bus.tcp_port)) as c:
        sources: list[Source] = [path, str(path), io.BytesIO(LARGE), pieces()]
        for number, source in enumerate(sources):
            position, reference = await c.publish_file(
                "news",
                source,
                content_type="video/mp4",
                progress=lambda done, _: seen.append(done),
            )
            assert (position.offset, reference.id) == (number, ID)
            assert reference.type == "video/mp4" and seen[-1] == len(LARGE)
        with pytest.raises(UsageError, match=r"topic\.unknown"):
            await c.publish_file("nowhere", path)


async def test_an_iterator_that_fails_publishes_nothing(bus: Node) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield LARGE
        raise ValueError("broken")

    async with polybus.connect(url_of("boson", bus.tcp_port)) as c:
        with pytest.raises(ValueError, match="broken"):
            await c.publish_file("news", pieces())
    assert bus.bus.topic("news").messages_in == 0


@pytest.mark.parametrize("topic", ["news", "nowhere"])
async def test_an_iterator_that_never_ends_holds_nothing_up(bus: Node, topic: str) -> None:
    begun = asyncio.Event()
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor()
    loop.set_default_executor(threads)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        begun.set()
        await asyncio.Event().wait()

    async with polybus.connect(url_of("boson", bus.tcp_port)) as c:
        task = asyncio.create_task(c.publish_file(topic, pieces()))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        loop.set_default_executor(ThreadPoolExecutor())
        # All threads of uploads end: else this would wait for one of them.
        await asyncio.to_thread(threads.shutdown)


async def test_a_download_goes_on_where_it_ended(bus: Node, tmp_path: Path) -> None:
    async with polybus.connect(url_of("http", bus.tcp_port)) as c:
        await c.publish_file("news", io.BytesIO(LARGE))
        target = tmp_path / "payload"
        part = tmp_path / "payload.part"
        part.write_bytes(LARGE[:1_000_000])
        seen: list[tuple[int, int | None]] = []
        await c.download(ID, target, progress=lambda *how: seen.append(how))
        assert seen[0][0] > 1_000_000 and seen[-1] == (len(LARGE), len(LARGE))
        assert target.read_bytes() == LARGE and not part.exists()
        # Complete, but not renamed.
        part.write_bytes(LARGE)
        assert (await c.download(ID, target)).read_bytes() == LARGE
        part.write_bytes(b"wrong" + LARGE[5:1000])
        with pytest.raises(PolybusError, match=r"blob\.damaged"):
            await c.download(ID, target)
        assert not part.exists()
        for bad in ("0" * 64, "../../etc/passwd"):
            with pytest.raises(UsageError, match=r"blob\.unknown"):
                await c.download(bad, target)


async def test_a_connection_that_breaks_delays_a_download_only(bus: Node, tmp_path: Path) -> None:
    async with Proxy(bus.tcp_port) as proxy:
        async with polybus.connect(url_of("http", proxy.port)) as c:
            await c.publish_file("news", io.BytesIO(LARGE))
            cuts = 0
            loop = asyncio.get_running_loop()

            def cut() -> None:
                proxy.cut()
                proxy.restore()

            def progress(done: int, total: int | None) -> None:
                nonlocal cuts
                if cuts < 2 and done < len(LARGE):
                    cuts += 1
                    loop.call_soon_threadsafe(cut)

            path = await c.download(ID, tmp_path / "payload", progress=progress)
            assert path.read_bytes() == LARGE


def stored_bytes(folder: Path) -> int:
    """How much of payloads is on the disk, at least."""
    found = 0
    for one in folder.glob("*/content"):
        with contextlib.suppress(FileNotFoundError):
            # It has got its name meanwhile.
            found += one.stat().st_size
    return found


async def test_a_connection_that_breaks_delays_an_upload_only(bus: Node, tmp_path: Path) -> None:
    path = tmp_path / "film"
    path.write_bytes(LARGE * 8)
    async with Proxy(bus.tcp_port) as proxy:
        async with polybus.connect(url_of("http", proxy.port)) as c:
            seen: list[int] = []
            cutting: list[Future[None]] = []
            cuts = 0
            loop = asyncio.get_running_loop()

            folder = blobs_folder(bus.data, "default")

            async def cut() -> None:
                # What was sent may still be on its way: the bus has some of it first.
                while stored_bytes(folder) < 2 << 20:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                proxy.cut()
                proxy.restore()

            def progress(done: int, total: int | None) -> None:
                nonlocal cuts
                seen.append(done)
                assert total == 8 * len(LARGE)
                if cuts < 2 and done > (cuts + 1) * 6_000_000:
                    cuts += 1
                    cutting.append(asyncio.run_coroutine_threadsafe(cut(), loop))

            _, reference = await c.publish_file("news", path, progress=progress)
    assert [one.result(0) for one in cutting] == [None, None]
    assert cuts == 2 and seen[-1] == 8 * len(LARGE)
    # Nobody has to begin again.
    assert seen.count(1 << 20) == 1
    assert reference.id == hashlib.sha256(LARGE * 8).hexdigest()
    assert bus.bus.topic("news").messages_in == 1
