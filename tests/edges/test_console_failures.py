"""What the console does is shown when it fails, and works where the page is not secure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_kit import Console, ConsoleBus, console_bus, open_console
from quarantine_kit import quarantine
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow
NAME = "bus.test"
# A bus that lets nobody change anything, and gives no files.
REFUSING = """
    const refused = { code: "auth.denied", detail: "you may not do this" };
    window.fetch = (url, options) => {
        const isRefused = window.mayAsk !== options.method && options.method !== "GET";
        return isRefused || String(url).includes("/export")
            ? Promise.resolve(Response.json(refused, { status: 403 })) : real(url, options);
    };
"""


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    folder = tmp_path_factory.mktemp("bus")
    with console_bus(folder, "news", queue="news", http={"hosts": [NAME]}) as bus:
        bus.publish("news", {"value": "first"})
        yield bus


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chromium")


@pytest.fixture(scope="module")
def console(profile: Path, bus: ConsoleBus) -> Iterator[Console]:
    rules = f"--host-resolver-rules=MAP {NAME} 127.0.0.1"
    with open_console(profile, bus, rules) as console:
        yield console


@pytest.fixture
def by_name(console: Console) -> Iterator[Console]:
    """The console over HTTP from another machine: browsers do not take such a page as secure."""
    console.host = NAME
    yield console
    console.host = "127.0.0.1"


def press(console: Console, text: str) -> None:
    """A click of a person: only then may a page copy."""
    console.sees(text, within="button")
    console.browser.find_element(By.XPATH, f"//button[normalize-space()='{text}']").click()


def test_queries_run_and_are_saved_where_the_page_is_not_secure(
    by_name: Console, profile: Path
) -> None:
    by_name.open("sql", query="SELECT 6 * 7 AS answer")
    assert by_name.run("return [isSecureContext, typeof crypto.randomUUID]") == [False, "undefined"]
    by_name.click("Run")
    by_name.sees("42", within="td")
    by_name.choose("select[aria-label='Download the results']", "csv")
    by_name.until((profile / "downloads" / "query.csv").exists, "the file")


def test_a_link_is_copied_where_the_page_is_not_secure(by_name: Console) -> None:
    by_name.open("topic", name="news", message=0, before=1)
    press(by_name, "Copy link")
    press(by_name, "Copied")
    by_name.run("document.querySelector('[data-search]').focus()")
    by_name.press(Keys.CONTROL, "v")
    pasted = "return document.querySelector('[data-search]').value"
    assert by_name.run(pasted).startswith(f"http://{NAME}:")


def test_a_text_that_cannot_be_copied_is_shown_to_be_selected(by_name: Console) -> None:
    by_name.open("topic", name="news", message=0, before=1)
    by_name.sees("Copy link", within="button")
    by_name.run("document.execCommand = () => false")
    by_name.click("Copy link")
    by_name.sees("The browser does not let this page copy")
    link = by_name.run("return document.querySelector('.message input[readonly]').value")
    assert link.startswith(f"http://{NAME}:")


def test_what_nothing_else_has_caught_is_noted(console: Console) -> None:
    console.open("topics")
    forgotten = """
        const source = document.querySelector("script[type=module]").src;
        const { get } = await import(new URL("api.js", source).href);
        get("/v1/info", {}, { signal: AbortSignal.abort() });
        get("/v1/topics/nothing");
    """
    console.run_async(forgotten)
    console.sees("nothing", within=".notes [data-tone=bad]")
    assert len(console.texts(".notes p")) == 1


def test_refused_redeliveries_exports_and_downloads_say_why(
    console: Console, bus: ConsoleBus
) -> None:
    key = bus.client.post("/v1/sessions", json={"topics": ["news"]}).json()["sessionKey"]
    try:
        with console.answering(REFUSING):
            console.open("consumers", show="sessions")
            console.click("Redeliver")
            console.sees("You may not do this.", within=".failure")
            console.open("topic", name="news")
            console.until(lambda: console.texts("td.wide"), "the messages")
            console.choose("select[aria-label='Export what is shown']", "csv")
            console.sees("You may not do this.", within=".failure")
            console.open("sql", query="SELECT 1 AS one")
            console.run("window.mayAsk = 'POST'")
            console.click("Run")
            console.sees("1 row in", within=".card-head")
            console.run("window.mayAsk = ''")
            console.choose("select[aria-label='Download the results']", "csv")
            console.sees("You may not do this.", within=".failure")
    finally:
        bus.client.delete(f"/v1/sessions/{key}")


def test_an_export_that_ends_at_a_limit_of_the_bus_says_so(console: Console) -> None:
    answer = """
        const headers = { "polybus-truncated": "true" };
        window.fetch = (url, options) => String(url).includes("/export")
            ? Promise.resolve(new Response("{}", { headers })) : real(url, options);
    """
    with console.answering(answer):
        console.open("topic", name="news")
        console.until(lambda: console.texts("td.wide"), "the messages")
        console.choose("select[aria-label='Export what is shown']", "jsonl")
        console.sees("it lacks messages that are shown", within=".notes [data-tone=bad]")


def test_a_redelivery_says_that_the_bus_is_away(console: Console, bus: ConsoleBus) -> None:
    key = bus.client.post("/v1/sessions", json={"topics": ["news"]}).json()["sessionKey"]
    try:
        console.open("consumers", show="sessions")
        console.sees("Redeliver", within="button")
        away = """
            const real = window.fetch;
            window.fetch = (url, options) => options.method === "GET" ? real(url, options)
                : Promise.reject(new TypeError("no connection"));
        """
        console.run(away)
        console.click("Redeliver")
        console.sees("bus.away", within=".failure")
    finally:
        bus.client.delete(f"/v1/sessions/{key}")


def test_tokens_and_shares_end_after_a_confirmation_that_shows_a_failure(
    console: Console, bus: ConsoleBus
) -> None:
    token = (bus.data / "admin.token").read_text().strip()
    admin = {"authorization": f"Bearer {token}"}
    console.open()
    console.run("sessionStorage.setItem('polybus.token', arguments[0])", token)
    grant = {"to": "office", "topics": "orders.*", "rights": ["subscribe"]}
    for path, body in (
        ("/v1/accounts", {"name": "shop"}),
        ("/v1/accounts", {"name": "office"}),
        ("/v1/accounts/shop/tokens", {}),
        ("/v1/accounts/shop/grants", grant),
    ):
        assert bus.client.post(path, json=body, headers=admin).status_code < 300, path
    try:
        with console.answering(REFUSING):
            console.open("settings", show="accounts")
            for act, does in (("Revoke", "Revoke"), ("End", "End it")):
                console.click(act, within="td")
                console.click(does, within="dialog")
                console.sees("You may not do this.", within="dialog .failure")
                console.click("Cancel", within="dialog")
            console.run("window.mayAsk = 'DELETE'")
            for act, does in (("Revoke", "Revoke"), ("End", "End it")):
                console.click(act, within="td")
                console.click(does, within="dialog")
                console.until(lambda act=act: act not in console.texts("td button"), "it is gone")  # type: ignore[misc]
        [shop] = [
            one
            for one in bus.client.get("/v1/accounts", headers=admin).json()["accounts"]
            if one["name"] == "shop"
        ]
        assert (shop["tokens"], shop["grants"]) == ([], [])
    finally:
        console.run("sessionStorage.clear()")
        for name in ("shop", "office"):
            bus.client.delete(f"/v1/accounts/{name}", headers=admin)


def test_a_redrive_under_way_is_in_the_address_with_its_stop(
    console: Console, bus: ConsoleBus
) -> None:
    quarantine(bus.data, "news", [b"{%d" % number for number in range(30)], "not JSON")
    console.open("dead-letters")
    console.click("Redrive all 30")
    console.fill("dialog input", "0.5")
    console.click("Redrive 30", within="dialog")
    console.sees("of 30 messages published again")
    assert "redrive=" in console.browser.current_url
    with console.answering(REFUSING):
        console.browser.refresh()
        console.sees("of 30 messages published again")
        console.click("Stop")
        console.sees("You may not do this.", within=".failure")
        console.run("window.mayAsk = 'DELETE'")
        console.click("Stop")
        console.sees("stopped", within=".card .note")
    console.click("Close the redrive")
    console.until(lambda: "redrive=" not in console.browser.current_url, "it to be closed")
    console.open("dead-letters", redrive="unknown")
    console.sees("replay.unknown", within=".failure")


def test_a_live_topic_counts_what_it_skipped_and_says_what_a_filter_saw(
    console: Console, bus: ConsoleBus
) -> None:
    stop = threading.Event()
    console.open("topic", name="news", tab="live")
    console.until(lambda: console.texts(".connection") == ["Live"], "the live connection")

    def flood() -> None:
        while not stop.wait(0.05):
            bus.publish("news", *({"value": f"needle {n}"} for n in range(100)))

    sender = threading.Thread(target=flood)
    sender.start()
    try:
        console.sees("needle", within="td.wide")
        console.sees("skipped", within=".badge")
        assert "in what is shown alone" not in str(console.texts("main"))
        console.fill("[data-search]", "needle 7")
        console.keys(Keys.ENTER)
        console.sees("The text is looked for in what is shown alone", within=".notice")
    finally:
        stop.set()
        sender.join()
    [seen, skipped] = [
        int("".join(filter(str.isdigit, one)))
        for one in (*console.texts("[role=status] .dim"), *console.texts(".badge"))
        if "seen" in one or "skipped" in one
    ]
    assert 0 < skipped < seen
