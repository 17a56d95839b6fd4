"""The console finds the messages of an address: a time, an epoch, where nothing can count them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from console_kit import Console, ConsoleBus, console_bus, open_console
from quarantine_kit import quarantine

pytestmark = pytest.mark.slow
# Pages load again 20 times as often.
IMPATIENT = "const every = setInterval; window.setInterval = (act, ms) => every(act, ms / 20);"


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    with console_bus(tmp_path_factory.mktemp("bus"), "clock", queue="clock") as bus:
        yield bus


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chromium")


@pytest.fixture(scope="module")
def console(profile: Path, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(profile, bus) as console:
        yield console


def test_a_chosen_time_has_exactly_its_messages_zoomed_in_or_not(
    console: Console, bus: ConsoleBus
) -> None:
    for number in range(30):
        bus.publish("clock", {"value": number})
    read = bus.client.get("/v1/topics/clock/messages").json()["messages"]
    time = {"since": read[10]["timestamp"], "until": read[20]["timestamp"]}
    wanted = [str(offset) for offset in range(19, 9, -1)]
    for zoom in ({}, {"zoom": 1}):
        console.open("topic", name="clock", **time, **zoom)
        console.until(lambda: console.texts("td .mono") == wanted, "the ten messages")
    console.open("topic", name="clock", since="yesterday")
    console.sees("position.invalid", within=".failure")
    console.open("topic", name="clock", rows="many")
    console.sees("29", within="td .mono")


def test_what_comes_later_is_counted_and_does_not_move_what_is_read(
    console: Console, bus: ConsoleBus
) -> None:
    offset = bus.publish("clock", {"value": "before"})[0]
    with console.answering(IMPATIENT):
        console.open("topic", name="clock")
        console.sees(str(offset), within="td .mono")
        bus.publish("clock", {"value": "later"})
        console.sees("1 new", within=".badge")
        assert console.texts("td .mono")[0] == str(offset)
        console.click("Newest")
        console.sees(str(offset + 1), within="td .mono")


def test_an_answer_that_takes_longer_than_a_page_waits_to_ask_again_is_shown(
    console: Console,
) -> None:
    slow = """
        window.fetch = async (url, options) => {
            if (new URL(url).pathname === "/v1/topics/clock") {
                await new Promise((resolve, reject) => {
                    setTimeout(resolve, 1000);
                    options.signal.onabort = () => reject(options.signal.reason);
                });
            }
            return real(url, options);
        };
    """
    with console.answering(IMPATIENT + slow):
        console.open("topic", name="clock")
        console.sees("Messages", within=".tile-label")


def test_messages_are_listed_where_no_query_can_count_them(
    console: Console, tmp_path: Path
) -> None:
    """A histogram needs DuckDB and a log on disk; choosing a time needs neither."""
    with console_bus(tmp_path, "news", queue="news", durability="memory") as other:
        other.publish("news", {"value": "here"})
        console.browser.get(f"{other.url}/console/topic?name=news&since=2020-01-01T00:00:00Z")
        console.sees("The messages over time cannot be shown", within=".notice")
        console.sees("here", within="td")


def test_a_dead_letter_shows_its_key_and_headers_and_is_saved_as_it_came(
    console: Console, bus: ConsoleBus, profile: Path
) -> None:
    value = b"\xfe" * 70_000
    about: dict[str, Any] = {"key": b"key-7", "headers": {"source": b"till 3"}}
    quarantine(bus.data, "old.topic", [value], "no epoch like this", **about)
    console.open("dead-letters", topic="old.topic", open="old.topic:1:0")
    console.sees("key-7", "till 3", within="aside dd")
    link = "return document.querySelector('aside dd a').href"
    assert "epoch=1" in console.run(link)
    console.click("Save", within="aside")
    file = profile / "downloads" / "old.topic_1_0"
    console.until(lambda: file.exists() and file.stat().st_size == len(value), "the file")
    assert file.read_bytes() == value
