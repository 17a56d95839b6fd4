"""A damaged topic under a whole bus: who needs it is notified, and everything else continues."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from commit_kit import Producer
from http_kit import Http, http_bus

from polybus.log import layout
from polybus.log.files import FileLog
from polybus.log.history.handover import hand_over
from polybus.log.verify.verify import verify
from polybus.testing import ScriptedPeer

TOPICS = ("hurt", "well")


def flip(path: Path, at: int | bytes) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(at) if isinstance(at, bytes) else at] ^= 1
    path.write_bytes(content)


def history_file(data: Path, topic: str) -> Path:
    return next(layout.topic_folder(data, topic).glob("history/*/*.parquet"))


def flip_journal(data: Path, topic: str) -> Path:
    needle = {"hurt": b"hurt 3", "$commits": b'"batch":2', "$events": b'"events":['}[topic]
    path = next(one for one in layout.segments(data) if needle in one.read_bytes())
    flip(path, needle)
    return path


def corrupted(path: Path, corrupt: Callable[[Path], object]) -> Path:
    corrupt(path)
    return path


CORRUPTIONS: dict[str, Callable[[Path, str], Path]] = {
    "flip in topic.json": lambda data, topic: corrupted(
        layout.topic_folder(data, topic) / "topic.json", lambda path: flip(path, b"epoch")
    ),
    "topic.json removed": lambda data, topic: corrupted(
        layout.topic_folder(data, topic) / "topic.json", Path.unlink
    ),
    "flip in manifest.json": lambda data, topic: corrupted(
        layout.topic_folder(data, topic) / "manifest.json", lambda path: flip(path, 20)
    ),
    "manifest.json removed": lambda data, topic: corrupted(
        layout.topic_folder(data, topic) / "manifest.json", Path.unlink
    ),
    "flip in history": lambda data, topic: corrupted(
        history_file(data, topic), lambda path: flip(path, path.stat().st_size // 2)
    ),
    "history file removed": lambda data, topic: corrupted(history_file(data, topic), Path.unlink),
    "flip in the journal": flip_journal,
}


@contextlib.asynccontextmanager
async def bus_on(data: Path) -> AsyncIterator[Http]:
    # No hand-over by itself: each file has what the fixture has put there.
    journal = {"handover-interval-s": 3600, "segment-age-s": 3600}
    async with http_bus(*TOPICS, data=str(data), journal=journal) as http:
        yield http


class Clients:
    """Those who depend on the topics, over several buses."""

    key: str

    async def fill(self, http: Http) -> None:
        """Messages 0 and 1 of each topic are in history, 2 and 3 in the journal; 0 is confirmed."""
        log = http.node.bus.log
        assert isinstance(log, FileLog)
        self.key = await http.open_session(*TOPICS)
        for topic in TOPICS:
            await http.publish(topic, f"{topic} 0".encode())
        packs = await http.packs(self.key)
        await http.packs(self.key, ",".join(packs))
        producer = Producer(http)
        await producer.done(0, {topic: [f"{topic} 1".encode()] for topic in TOPICS})
        report = {"positions": {topic: {"epoch": 1, "offset": 1} for topic in TOPICS}}
        assert (await http.client.put("/v1/consumers/mine", json=report)).status_code == 204
        await until_written(http)
        await asyncio.to_thread(log.seal)
        log.after_handover(await asyncio.to_thread(hand_over, log.data, grace_s=0))
        await producer.done(1, {topic: [f"{topic} 2".encode()] for topic in reversed(TOPICS)})
        for topic in reversed(TOPICS):
            await http.publish(topic, f"{topic} 3".encode())
        await producer.done(2)
        await http.open_session("well")

    async def session(self, http: Http) -> tuple[list[str], list[tuple[str, str]]]:
        """Messages of the session that are new, confirmed; and its notices."""
        values: list[str] = []
        notices: list[tuple[str, str]] = []
        confirm = None
        while packs := await http.packs(self.key, confirm):
            for events in packs.values():
                for name, *content in events:
                    if name in TOPICS:
                        values += content
                    else:
                        notices.append((name, content[0]["topic"]))
            confirm = ",".join(packs)
            if list(packs) == ["0"]:
                break
        return values, notices


async def until_written(http: Http) -> None:
    """The bus has written its events to `$events`."""
    http.node.context.events.write()
    await http.node.context.durability.wait()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Clients]:
    data = tmp_path_factory.mktemp("filled") / "data"
    clients = Clients()

    async def fill() -> None:
        async with bus_on(data) as http:
            await clients.fill(http)

    asyncio.run(fill())
    assert verify(data).intact
    return data, clients


@pytest.fixture
def data(filled: tuple[Path, Clients], tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled[0], tmp_path / "data"))


@pytest.fixture
def clients(filled: tuple[Path, Clients]) -> Clients:
    return filled[1]


async def code_of(answer: httpx.Response) -> str:
    assert answer.status_code == 503, answer.text
    return str(answer.json()["code"])


async def read(http: Http, topic: str) -> httpx.Response:
    return await http.client.get(f"/v1/topics/{topic}/messages?from=earliest")


async def events_of(http: Http) -> list[dict[str, Any]]:
    await until_written(http)
    messages = (await read(http, "$events")).json()["messages"]
    return [event for one in messages for event in one["value"]["events"]]


async def check_named(http: Http, topic: str) -> None:
    """The operator sees which topic is damaged, and that it is the only one."""
    ready = await http.client.get("/readyz")
    assert ready.status_code == 200
    lines = ready.text.splitlines()
    assert lines[0] == "ok" and len(lines) == 2 and f"{topic!r}" in lines[1], lines
    assert (await http.client.get("/healthz")).text == "ok\n"
    metrics = (await http.client.get("/metrics")).text
    assert "polybus_topics_damaged 1\n" in metrics
    listed = (await http.client.get("/v1/topics?system=true")).json()["topics"]
    assert [one["name"] for one in listed if one.get("damaged")] == [topic]


async def check_subscribers(http: Http, topic: str) -> None:
    """A subscriber of each protocol is notified in its form, and gets all of other topics."""
    async with ScriptedPeer(http.node.tcp_port) as boson:
        await boson.send_frame("$subscribe", f"{topic} from=earliest\nwell from=earliest".encode())
        name, content = await boson.read_frame()
        assert name == "$error" and content.startswith(b"log."), content
        assert [await boson.read_frame() for _ in range(4)] == [
            ("well", f"well {number}".encode()) for number in range(4)
        ]
    async with ScriptedPeer(http.node.tcp_port) as goms:
        wanted = {"messagetype": "register", "topics": [topic], "from": "earliest"}
        await goms.send_json(wanted)
        assert (await goms.read_json())["messagetype"] == "error"


async def delete(http: Http, topic: str) -> httpx.Response:
    token = layout.admin_token_path(http.node.data).read_text().strip()
    headers = {"authorization": f"Bearer {token}"}
    return await http.client.delete(f"/v1/topics/{topic}", headers=headers)


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
async def test_those_who_depend_on_a_damaged_topic_are_told_and_others_go_on(
    corrupt: str, data: Path, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Path(shutil.copytree(data, data.with_name("whole")))
    path = CORRUPTIONS[corrupt](data, "hurt")
    assert {damage.topic for damage in verify(data).damages} == {"hurt"}
    async with bus_on(data) as http:
        # A flip in messages is found by whoever reads them.
        assert (await code_of(await read(http, "hurt"))).startswith("log.")
        values, notices = await clients.session(http)
        assert ("topic.damaged", "hurt") in notices and "topic.deleted" not in dict(notices)
        assert values[-3:] == ["well 1", "well 2", "well 3"]
        seen = [value for value in values if value not in values[-3:]]
        await check_named(http, "hurt")
        await check_subscribers(http, "hurt")
        refused = await http.client.post("/v1/topics/hurt/messages", content=b"x")
        assert await code_of(refused) == "log.frozen"
        await Producer(http).refused(503, "log.frozen", 3, {"hurt": [b"x"], "well": [b"x"]})
        await Producer(http).done(3, {"well": [b"well 4"]})
        assert await clients.session(http) == (["well 4"], [])
        (consumer,) = (await http.client.get("/v1/consumers")).json()["consumers"]
        lags = {one["topic"]: (one["offset"], one["data-loss"]) for one in consumer["topics"]}
        assert lags == {"hurt": (1, "damaged"), "well": (1, "epoch")}
        damaged = [one for one in await events_of(http) if one["kind"] == "topic-damaged"]
        assert {one["topic"] for one in damaged} == {"hurt"}, damaged
    assert any("'hurt'" in line and "log.damaged" in line for line in caplog.text.splitlines())

    again = Path(shutil.copytree(data, data.with_name("again")))
    right = (whole / path.relative_to(data)).read_bytes()
    # The bus has appended to the segment since.
    path.write_bytes(right + (path.read_bytes()[len(right) :] if path.exists() else b""))
    async with bus_on(data) as http:
        # The file was restored: everything continues where it was.
        assert (await http.client.get("/readyz")).text == "ok\n"
        values, notices = await clients.session(http)
        assert seen + values == ["hurt 1", "hurt 2", "hurt 3"], notices
        assert not notices
        await Producer(http).done(4, {"hurt": [b"hurt 4"]})
        assert await clients.session(http) == (["hurt 4"], [])
    assert verify(data).intact

    async with bus_on(again) as http:
        # The topic is deleted and created again: no restart.
        await read(http, "hurt")
        assert (await delete(http, "hurt")).status_code == 204
        assert (await http.client.post("/v1/topics", json={"name": "hurt"})).status_code == 201
        assert (await http.client.get("/readyz")).text == "ok\n"
        _, notices = await clients.session(http)
        assert notices[-1] == ("topic.deleted", "hurt")
        await Producer(http).done(4, {"hurt": [b"hurt 0"]})
    assert verify(again).intact


@pytest.mark.parametrize("corrupt", ["flip in the journal", "flip in history"])
async def test_packs_that_were_shown_come_again_when_their_topic_is_repaired(
    corrupt: str, data: Path, clients: Clients
) -> None:
    async with bus_on(data) as http:
        shown = await http.packs(clients.key)
    whole = Path(shutil.copytree(data, data.with_name("whole")))
    path = CORRUPTIONS[corrupt](data, "hurt")
    async with bus_on(data) as http:
        packs = await http.packs(clients.key)
        ((name, damage),) = packs.pop("0")
        assert name == "topic.damaged" and damage["position"].endswith(":1"), damage
        assert packs == {
            number: [] if events[0][0] == "hurt" else events for number, events in shown.items()
        }
        await http.packs(clients.key, ",".join(packs))
    path.write_bytes((whole / path.relative_to(data)).read_bytes())
    async with bus_on(data) as http:
        packs = await http.packs(clients.key)
        assert min(map(int, packs)) > max(map(int, shown))
        assert [event for events in packs.values() for event in events] == [
            ["hurt", f"hurt {number}"] for number in (1, 2, 3)
        ]


@pytest.mark.parametrize("topic", ["$commits", "$events"])
@pytest.mark.parametrize("corrupt", CORRUPTIONS)
async def test_an_administrator_replaces_a_damaged_system_topic(
    corrupt: str, topic: str, data: Path, clients: Clients
) -> None:
    CORRUPTIONS[corrupt](data, topic)
    assert {damage.topic for damage in verify(data).damages} == {topic}
    async with bus_on(data) as http:
        await read(http, topic)
        await check_named(http, topic)
        for name in TOPICS:
            await http.publish(name, f"{name} 4".encode())
        values, notices = await clients.session(http)
        assert sorted(values) == [f"{name} {number}" for name in TOPICS for number in range(1, 5)]
        assert notices == []
        producer = Producer(http)
        assert (await http.client.delete(f"/v1/topics/{topic}")).status_code == 403
        if topic == "$commits":
            await producer.refused(503, "log.frozen", 3, {"well": [b"x"]})
        assert (await delete(http, topic)).status_code == 204
        assert (await http.client.get("/readyz")).text == "ok\n"
        if topic == "$commits":
            # The flips were found later: what the producer has done is still known.
            if "flip in the journal" != corrupt != "flip in history":
                await producer.refused(409, "commit.query", 3, {"well": [b"x"]})
        await producer.done(3, {"well": [b"well 5"]}, **{"take-over": True})
        await producer.done(4, {"well": [b"well 6"]})
        assert (await delete(http, topic)).status_code == 403, "it is not damaged any more"
        if topic == "$events":
            await http.open_session("well")
            assert await events_of(http)
    assert verify(data).intact
    async with bus_on(data) as http:
        assert (await http.client.get("/readyz")).text == "ok\n"
        assert (await Producer(http).done(4))["already"]
