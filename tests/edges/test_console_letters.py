"""Dead letters and what was not delivered, in the console: searched, chosen, published again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from console_kit import Console, ConsoleBus, console_bus, open_console
from quarantine_kit import quarantine
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    with console_bus(tmp_path_factory.mktemp("bus"), "payments") as bus:
        yield bus


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(tmp_path_factory.mktemp("chromium"), bus) as console:
        console.resize(1280, 900)
        yield console


def report(bus: ConsoleBus, *events: dict[str, Any]) -> None:
    """Write events as the bus does; an administrator may."""
    administrator = {"authorization": f"Bearer {(bus.data / 'admin.token').read_text().strip()}"}
    answer = bus.client.post(
        "/v1/topics/$events/messages", json={"events": events}, headers=administrator
    )
    assert answer.status_code == 200, answer.text


def test_dead_letters_are_sent_again_after_a_dry_run(console: Console, bus: ConsoleBus) -> None:
    quarantine(bus.data, "payments", [b"{one", b"{two", b"{three"], "not JSON")
    held = bus.client.get("/v1/topics/payments").json()["stop"]
    console.open("dead-letters")
    console.sees("{two", within="td.wide")
    console.keys("j", "j")
    console.sees("{two", within="aside pre")
    console.keys(Keys.ESCAPE)
    console.until(lambda: console.texts("aside") == [], "it to be closed")
    console.click("Choose payments:1:1")
    console.click("Redrive 1 chosen")
    console.sees("Dry run: 1 message would be published again", within="dialog")
    assert bus.client.get("/v1/topics/payments").json()["stop"] == held
    console.click("Redrive 1", within="dialog")
    console.sees("1 of 1 message published again")
    console.sees("sent again", within="td")
    console.click("Redrive all 2")
    console.sees("Dry run: 2 messages would be published again", within="dialog")
    console.fill("dialog input", "1000")
    console.click("Redrive 2", within="dialog")
    console.sees("2 of 2 messages published again")
    console.until(
        lambda: bus.client.get("/v1/topics/payments").json()["stop"] == held + 3, "all of them"
    )
    console.open("settings", show="audit")
    console.sees("replay-start", within="td")


def test_what_was_not_delivered_is_listed_and_published_again(
    console: Console, bus: ConsoleBus
) -> None:
    [offset] = bus.publish("payments", {"value": "missed"})
    epoch = bus.client.get("/v1/topics/payments").json()["epoch"]
    missed: dict[str, Any] = {
        "kind": "undelivered",
        "time": "2026-01-31T08:00:00.000000Z",
        "topic": "payments",
    }
    missed |= {"epoch": epoch, "first": offset, "stop": offset + 1, "reason": "session-expired"}
    missed |= {"to": "6b00", "protocol": "msgstream"}
    report(bus, missed)
    console.open("dead-letters")
    console.sees("the session expired before its client confirmed", within="td")
    console.open("dead-letters", q="6b00")
    console.sees("6b00", within="td")
    console.run("document.querySelector('input[aria-label^=\"Choose payments\"]').click()")
    console.click("Redrive 1 chosen")
    console.sees("Dry run: 1 message would be published again", within="dialog")
    console.keys(Keys.ESCAPE)
    console.until(
        lambda: console.run("return document.querySelector('dialog') === null"), "no dialog"
    )
    console.click("Redrive all 1 that match")
    console.sees("Dry run: 1 message would be published again", within="dialog")
    console.click("Redrive 1", within="dialog")
    console.sees("1 of 1 message published again")
    assert bus.client.get("/v1/topics/payments").json()["stop"] == offset + 2


def test_more_than_is_shown_of_what_was_not_delivered_is_published_again(
    console: Console, bus: ConsoleBus
) -> None:
    count = 130
    offsets = bus.publish("payments", *[{"value": number} for number in range(count)])
    held = bus.client.get("/v1/topics/payments").json()
    about = {"kind": "undelivered", "reason": "outbox.full", "to": "7c11", "protocol": "goms"}
    about |= {"topic": "payments", "epoch": held["epoch"]}
    events = [
        about | {"time": f"2026-01-31T07:{n // 60:02}:{n % 60:02}Z", "first": at, "stop": at + 1}
        for n, at in enumerate(offsets)
    ]
    report(bus, *events)
    console.open("dead-letters", q="7c11")
    console.sees("Not delivered", within="h2")
    console.click("Older")
    console.sees(f"{offsets[0]} – {offsets[0]}", within="td")
    console.click("Redrive all that match")
    console.sees(f"Dry run: {count} messages would be published again", within="dialog")
    console.click(f"Redrive {count}", within="dialog")
    console.sees(f"{count} of {count} messages published again")
    assert bus.client.get("/v1/topics/payments").json()["stop"] == held["stop"] + count
