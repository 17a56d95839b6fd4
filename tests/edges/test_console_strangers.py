"""The console and strangers: their messages stay as they are, and who may not look logs in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_kit import open_browser
from console_kit import WAIT_S, Console, ConsoleBus, console_bus, open_console
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow
TURNED = "abc\u202efdp.exe\u0000\u200b"
PASSWORD = "a long and quiet password"


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    # The browser complains of every 429, though the page asks again.
    settings = {
        "queries": {"workers-max": 16},
        "limits": {"inline-bytes-max": 4096},
        "http": {"masks": [{"topics": "people", "fields": ["$.card"]}]},
    }
    topics = ("orders", "people", "exact")
    with console_bus(tmp_path_factory.mktemp("bus"), *topics, **settings) as bus:
        yield bus


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(tmp_path_factory.mktemp("chromium"), bus) as console:
        yield console


def stored(bus: ConsoleBus, offset: int) -> tuple[bytes, object, object]:
    """The bytes of a message, its key and its headers."""
    path = f"/v1/topics/exact/messages/{offset}"
    message = bus.client.get(path).json()["message"]
    value = bus.client.get(path, headers={"accept": "application/octet-stream"}).content
    return value, message["key"], message["headers"]


EXACT: dict[str, dict[str, Any]] = {
    "large integers and spaces": {"text": '{"n": 12345678901234567890,\r\n  "x": 1.10}\n'},
    "text with a key and headers": {"text": "hello", "key": "k", "headers": {"a": "b: c"}},
    "bytes": {"base64": "/wD+", "key": {"base64": "/w=="}, "headers": {"h": {"base64": "/w=="}}},
    "headers that are not a line": {
        "text": "\ufeffx",
        "key": "",
        "headers": {"a": "1\n2", "b:": " c "},
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_a_message_that_is_sent_again_unchanged_has_the_same_bytes(
    console: Console, bus: ConsoleBus, name: str
) -> None:
    [offset] = bus.publish("exact", EXACT[name])
    console.open("topic", name="exact", tab="publish", resend=offset)
    console.click("Publish", within="form")
    console.sees("Show message")
    assert stored(bus, offset + 1) == stored(bus, offset)


def test_text_is_published_as_text_with_its_key(console: Console, bus: ConsoleBus) -> None:
    console.open("topic", name="exact", tab="publish")
    console.fill("textarea", "hello")
    console.fill("form input", "k")
    console.click("Publish", within="form")
    console.sees("Show message")
    end = bus.client.get("/v1/topics/exact").json()["stop"]
    assert stored(bus, end - 1) == (b"hello", "k", {})


def test_a_large_payload_is_sent_again_as_it_is(console: Console, bus: ConsoleBus) -> None:
    payload = "large " * 1000
    for about in ({}, {"key": "k", "headers": {"a": "b"}}):
        [offset] = bus.publish("exact", {"text": payload, **about})
        console.open("topic", name="exact", tab="publish", resend=offset)
        console.sees("stored apart")
        console.click("Publish it again")
        console.sees("Show message")
        path = f"/v1/topics/exact/messages/{offset + 1}"
        message = bus.client.get(path).json()["message"]
        blob = bus.client.get(f"/v1/blobs/{message['reference']['id']}")
        assert (blob.text, message["key"]) == (payload, about.get("key"))
        assert message["headers"] == about.get("headers", {})


def test_a_masked_message_is_not_sent_again(console: Console, bus: ConsoleBus) -> None:
    [offset] = bus.publish("people", {"value": {"card": "4111"}})
    console.open("topic", name="people", message=offset, before=offset + 1)
    console.until(lambda: console.texts(".message button:disabled") == ["Resend"], "no way to send")
    console.open("topic", name="people", tab="publish", resend=offset)
    console.sees("This message cannot be sent again")
    assert console.texts("form") == []


def test_characters_that_turn_or_hide_text_are_shown_by_their_codes(
    console: Console, bus: ConsoleBus
) -> None:
    answer = bus.client.post("/v1/topics/orders/messages", content=TURNED.encode())
    [offset] = answer.json()["offsets"]
    console.open("topic", name="orders", message=offset, before=offset + 1, view="text")
    console.sees("abc⟨U+202E⟩fdp.exe␀⟨U+200B⟩", within=".message")
    console.sees("abc⟨U+202E⟩fdp.exe␀⟨U+200B⟩", within="td.wide")
    assert "\u202e" not in console.run("return document.body.textContent")


def test_an_error_says_what_happened_and_what_to_do(console: Console) -> None:
    console.open("topic", name="nowhere")
    console.sees("There is no topic nowhere", within=".empty")
    console.click("create it")
    console.sees("Create a topic", within="dialog")
    assert console.run("return document.querySelector('dialog input').value") == "nowhere"
    console.open("topic", name="orders", message=10**9)
    console.sees("Try again", within=".message .failure")
    console.open("nonsense")
    console.sees("has no such page")


def test_a_login_is_asked_for_and_stays_in_the_tab(tmp_path: Path) -> None:
    accounts = {"signup": True, "default": "off"}
    with (
        console_bus(tmp_path, accounts=accounts) as bus,
        open_browser(tmp_path / "chromium") as browser,
    ):
        browser.set_script_timeout(WAIT_S)
        answer = bus.client.post("/v1/signup", json={"name": "anna", "password": PASSWORD})
        assert answer.status_code == 201, answer.text
        console = Console(browser, bus)
        console.open("topics")
        console.sees("Log in", within="h1")
        console.fill("input[name=name]", "anna")
        console.fill("input[name=password]", "wrong")
        console.keys(Keys.ENTER)
        console.sees("auth.failed", within=".failure")
        console.fill("input[name=password]", PASSWORD)
        console.keys(Keys.ENTER)
        console.sees("This bus has no topics yet", "anna")
        console.until(lambda: console.texts(".connection") == ["Live"], "the live connection")
        kept = console.run("return JSON.stringify({ ...sessionStorage, ...localStorage })")
        assert PASSWORD not in kept and "anna" in kept
        assert console.run("return Object.keys(localStorage).join()").find("token") < 0
        console.open("topics")
        console.sees("This bus has no topics yet")
        token = console.run("return sessionStorage.getItem('polybus.token')")
        console.click("Log out")
        console.sees("Log in", within="h1")
        gone = bus.client.get("/v1/topics", headers={"authorization": f"Bearer {token}"})
        assert gone.status_code == 401
