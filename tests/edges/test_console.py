"""The console in a real browser: every page, by keyboard, and what people do with it."""

from __future__ import annotations

import csv
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from console_kit import (
    EDITOR_IS_READY,
    OFFERED,
    PAGES,
    WAIT_S,
    Console,
    ConsoleBus,
    console_bus,
    open_console,
)
from edge_kit import frame, line, properties
from quarantine_kit import quarantine
from selenium.webdriver.common.keys import Keys

from polybus.lake.table import open_table

pytestmark = pytest.mark.slow
ORDERS = 300
TITLE_IS_FOCUSED = "return document.activeElement.matches('h1')"


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    topics = ("orders", "news", "payments", "traffic", "empty")
    with console_bus(tmp_path_factory.mktemp("bus"), *topics, queue="traffic") as bus:
        bus.publish(
            "orders", *({"value": {"order": n, "customer": f"c-{n % 7}"}} for n in range(ORDERS))
        )
        bus.publish("news", {"value": "first", "key": "k", "headers": {"source": "test"}})
        yield bus


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chromium")


@pytest.fixture(scope="module")
def opened(profile: Path, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(profile, bus) as console:
        yield console


@pytest.fixture
def console(opened: Console) -> Iterator[Console]:
    opened.resize(1280, 900)
    yield opened
    opened.resize(1280, 900)


def test_charts_of_groups_have_times_of_their_own_and_ranges_are_in_the_address(
    console: Console,
) -> None:
    console.open()
    console.until(lambda: console.texts(".connection") == ["Live"], "the live connection")
    history = """
        const source = document.querySelector("script[type=module]").src;
        const { withSample } = await import(new URL("history.js", source).href);
        let past = { "step-s": 1, times: [100], series: { "in.messages": [5] },
            "slow-step-s": 10, "slow-times": [100], groups: { etl: [7] }, "group-lag-s": {} };
        for (let time = 101; time < 125; time += 1) {
            const groups = { etl: time };
            past = withSample(past, { time, series: {}, groups, "group-lag-s": { etl: 2 } });
        }
        return [past.times.length, past.series["in.messages"].length, past["slow-times"],
            past.groups.etl, past["group-lag-s"].etl];
    """
    times, series, slow, lags, seconds = console.run_async(history)
    assert (times, series, slow) == (25, 25, [100, 110, 120])
    # The mean of each step: the bus had one sample of the first.
    assert (lags, seconds) == ([pytest.approx(95.2), 114.5, 122], [2, 2, 2])
    console.click("24 h")
    console.sees("last 24 hours", within=".card")
    assert "range=1d" in console.browser.current_url


def test_a_disk_that_is_nearly_full_is_marked(console: Console) -> None:
    console.open()
    console.until(lambda: console.texts(".connection") == ["Live"], "the live connection")
    full = """
        const source = document.querySelector("script[type=module]").src;
        const { figures } = await import(new URL("live.js", source).href);
        const disk = { "disk-free-bytes": 9e9, "disk-total-bytes": 1e11 };
        figures.value = { ...figures.value, series: { ...figures.value.series, ...disk } };
        await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
        return document.querySelector(".tile[data-tone=bad] .tile-label")?.innerText;
    """
    console.until(lambda: console.run_async(full) == "Disk free", "the disk to be marked")


def test_everything_can_be_reached_by_keyboard(console: Console) -> None:
    console.open()
    for key, page in zip("tfcdpseot", [*list(PAGES)[1:], "overview", "topics"], strict=True):
        console.keys("g", key)
        console.sees(PAGES[page], within="h1")
        if page == "sql":
            # Keys are text there: only outside of the editor they lead elsewhere.
            console.until(lambda: console.run(EDITOR_IS_READY), "the editor to have the focus")
            console.keys(Keys.TAB)
        else:
            console.until(lambda: console.run(TITLE_IS_FOCUSED), "the title to have the focus")
    console.sees("orders", within="td")
    console.keys("/", "ord")
    console.until(lambda: console.texts("tbody tr a") == ["orders"], "one topic to be left")
    console.keys(Keys.TAB)
    for _ in range(20):
        if console.run("return document.activeElement.matches('tbody tr')"):
            break
        console.keys(Keys.TAB)
    console.keys(Keys.ENTER)
    console.sees("orders", within="h1")
    console.until(lambda: len(console.texts("tbody tr")) > 50, "the messages to be listed")
    console.keys("j")
    console.sees(f"Message {ORDERS - 1}", within=".message h2")
    console.keys("j", "k", "j")
    console.sees(f"Message {ORDERS - 2}", within=".message h2")
    console.keys(Keys.ESCAPE)
    console.until(lambda: not console.texts(".message"), "the message to be closed")
    console.keys("?")
    console.sees("g t", within="dialog")
    console.keys(Keys.ESCAPE)
    console.until(lambda: not console.texts("dialog"), "the help to be closed")


def test_people_publish_confirm_redrive_and_query_by_keyboard_alone(
    console: Console, bus: ConsoleBus
) -> None:
    console.open("topic", name="news", tab="publish")
    console.until(lambda: console.run("return document.activeElement.matches('textarea')"), "focus")
    console.keys("by keyboard")
    console.press(Keys.CONTROL, Keys.ENTER)
    console.sees("Show message")
    assert bus.client.post("/v1/topics", json={"name": "spare"}).status_code == 201
    console.open("topic", name="spare", tab="about")
    console.sees("Delete the topic")
    console.tab_to("button.danger")
    console.keys(Keys.ENTER)
    console.sees("Type spare to confirm")
    console.keys("spare", Keys.ENTER)
    console.sees("Topics", within="h1")
    assert bus.client.get("/v1/topics/spare").status_code == 404
    quarantine(bus.data, "empty", [b"{again"], "not JSON")
    console.open("dead-letters", topic="empty", q="again")
    console.sees("Redrive all 1 that match")
    console.tab_to("button.primary")
    console.keys(Keys.ENTER)
    console.sees("Dry run: 1 message would be published again", within="dialog")
    console.tab_to("dialog button.primary")
    console.keys(Keys.ENTER)
    console.sees("1 of 1 message published again")
    console.open("sql")
    focused = "return document.activeElement.matches('.editor')"
    console.until(lambda: console.run(focused), "the editor to have the focus")
    console.keys("SELECT 6 * 7 AS answer")
    console.press(Keys.CONTROL, Keys.ENTER)
    console.sees("42", within="td")


def test_a_message_is_published_followed_live_and_sent_again_edited(
    console: Console, bus: ConsoleBus
) -> None:
    console.open("topic", name="news", tab="live")
    console.sees("Waiting for messages")
    console.until(lambda: console.texts(".connection") == ["Live"], "the live connection")
    [offset] = bus.publish("news", {"value": {"title": "seen"}, "headers": {"source": "live"}})
    console.sees('{"title":"seen"}', within="td.wide")
    console.click("Pause")
    bus.publish("news", {"value": "while paused"})
    console.sees("1 since the pause")
    assert "while paused" not in str(console.texts("td.wide"))
    console.open("topic", name="news", message=offset, before=offset + 1)
    console.click("Headers")
    console.sees("live", within=".message")
    console.click("Resend")
    console.sees("Resend message")
    console.until(
        lambda: console.run("return document.querySelector('textarea')?.value"), "its value"
    )
    console.fill("textarea", '{"title": "edited"}')
    console.click("Publish", within="form")
    console.sees("Show message")
    console.click(f"Show message {offset + 2}")
    console.sees('"edited"', within=".message pre")
    console.click("Headers")
    console.sees("source", "live", within=".message")


def test_a_message_is_shown_as_its_bytes_on_every_protocol(console: Console) -> None:
    console.open("topic", name="orders", message=3, before=4, view="wire")
    console.sees("customer", within=".parts")
    protocols = "[aria-label=Protocol]"
    pressed = f"{protocols} [aria-pressed=true]"
    assert len(console.texts(f"{protocols} button")) >= 5
    for title in console.texts(f"{protocols} button"):
        console.click(title, within=protocols)
        console.until(lambda title=title: console.texts(pressed) == [title], title)  # type: ignore[misc]
        console.sees("customer", within=".parts")
        assert len(console.texts(".bytes span")) == len(console.texts(".parts tbody tr"))
    console.click("Hex")
    console.sees("7b 22", within=".message pre")


def test_what_is_found_is_in_the_address_and_can_be_exported(
    console: Console, profile: Path
) -> None:
    console.open("topic", name="orders")
    console.fill("[data-search]", f'"order": {ORDERS - 5}')
    console.keys(Keys.ENTER)
    console.sees("Searched all", "1 found")
    assert "text=" in console.browser.current_url
    console.open("topic", name="orders", path="$.customer", equals="c-3")
    found = len([n for n in range(ORDERS) if n % 7 == 3])
    console.sees(f"{found} found")
    rows = console.texts("td.wide")
    assert len(rows) == found and all('"c-3"' in row for row in rows)
    downloads = profile / "downloads"
    for kind in ("csv", "jsonl", "parquet"):
        console.choose("select[aria-label='Export what is shown']", kind)
        file = downloads / f"orders.{kind}"
        console.until(lambda file=file: file.exists() and file.stat().st_size, f"a {kind} file")  # type: ignore[misc]
    assert len((downloads / "orders.jsonl").read_text().splitlines()) == found
    table = (downloads / "orders.csv").read_text().splitlines()
    assert len(list(csv.reader(table))) == found + 1
    (downloads / "orders.jsonl").unlink()
    console.open("topic", name="orders", text="customer")
    console.sees("100 found", "Search on")
    console.choose("select[aria-label='Export what is shown']", "jsonl")
    console.until(lambda: (downloads / "orders.jsonl").exists(), "what is shown, as a file")
    lines = (downloads / "orders.jsonl").read_text().splitlines()
    offsets = [json.loads(one)["offset"] for one in lines]
    assert sorted(offsets) == list(range(ORDERS - 100, ORDERS))
    console.open("topic", name="orders", text="customer", rows=10_000)
    console.sees(f"{ORDERS} found", "Searched all")


def test_the_histogram_chooses_a_time(console: Console) -> None:
    console.open("topic", name="orders")
    console.until(lambda: console.run("return document.querySelector('.histogram')"), "it is drawn")
    script = """
        const box = document.querySelector(".histogram");
        const { left, width, top } = box.getBoundingClientRect();
        const event = (type, part) => box.dispatchEvent(new PointerEvent(type, {
            bubbles: true, pointerId: 1, clientX: left + width * part, clientY: top + 5 }));
        box.setPointerCapture = () => {};
        event("pointerdown", 0.9); event("pointermove", 0.95);
        setTimeout(() => event("pointerup", 1), 100);
    """
    console.run(script)
    console.sees("All times")
    assert "since=" in console.browser.current_url
    console.click("All times")
    console.until(lambda: "since=" not in console.browser.current_url, "all times")
    fields = """
        const [from, to] = document.querySelectorAll("input[type=datetime-local]");
        [from.value, to.value] = ["2020-01-01T00:00:00", "2020-01-01T00:01:00"];
        from.focus();
    """
    console.until(lambda: console.texts("input[type=datetime-local]"), "the fields of the time")
    console.run(fields)
    console.keys(Keys.ENTER)
    console.sees("There are no messages at this place")
    assert "since=2020-01-01" in console.browser.current_url


def test_a_topic_is_created_changed_and_deleted_with_a_confirmation(
    console: Console, bus: ConsoleBus
) -> None:
    console.open("topics")
    console.click("Create a topic")
    console.fill("dialog input", "made.here")
    console.keys(Keys.ENTER)
    console.sees("made.here", within="h1")
    console.click("Consumers and settings")
    console.fill("input[name=hours]", "2")
    console.click("Save the retention")
    console.sees("Saved the retention")
    settings = bus.client.get("/v1/topics/made.here").json()["settings"]
    assert settings["retention-age-s"] == 7200
    console.click("Delete the topic")
    console.sees("Type made.here to confirm")
    console.fill("dialog input", "made.here")
    console.click("Delete", within="dialog")
    console.sees("Topics", within="h1")
    assert bus.client.get("/v1/topics/made.here").status_code == 404
    console.open("settings", show="audit")
    console.sees("topic-create", "topic-change", "topic-delete", within="td")


def test_an_administrator_shares_topics_and_makes_narrow_tokens(
    console: Console, bus: ConsoleBus
) -> None:
    token = (bus.data / "admin.token").read_text().strip()
    console.open("settings", show="accounts")
    console.fill("input[name=token]", "wrong")
    console.keys(Keys.ENTER)
    console.sees("auth.", within=".failure")
    console.fill("input[name=token]", token)
    console.keys(Keys.ENTER)
    console.sees("Create an account")
    try:
        for name in ("shop", "office"):
            answer = bus.client.post(
                "/v1/accounts", json={"name": name}, headers={"authorization": f"Bearer {token}"}
            )
            assert answer.status_code == 201, answer.text
        console.open("settings", show="accounts", q="")
        console.sees("shop", "office", within="td")
        console.run(
            "[...document.querySelectorAll('tr')].find((one) => one.innerText.startsWith('shop'))"
            ".querySelectorAll('button')[1].click()"
        )
        console.fill("dialog input[name=topics]", "orders.*")
        console.fill("dialog input[name=to]", "office")
        console.click("Share", within="dialog")
        console.sees("orders.*", within="td code")
        console.click("End", within="td")
        console.click("End it", within="dialog")
        console.until(lambda: "orders.*" not in console.texts("td code"), "it is not shared")
        console.click("New token")
        console.fill("dialog input[name=topics]", "news.*")
        console.run("document.querySelector('dialog input[value=publish]').click()")
        console.click("Make it", within="dialog")
        console.sees("This is the only time", within="dialog")
        console.click("Done", within="dialog")
        console.sees("subscribe, administer on news.*", within="td")
    finally:
        console.run("sessionStorage.clear()")
        for name in ("shop", "office"):
            bus.client.delete(f"/v1/accounts/{name}", headers={"authorization": f"Bearer {token}"})


def test_a_pipeline_shows_its_flows_and_what_failed(
    console: Console, bus: ConsoleBus, tmp_path: Path
) -> None:
    failed = {"topic": "orders", "name": "amount is positive", "passed": 5, "failed": 2}
    flow = {"pipeline": "shop", "flow": "totals", "state": "running", "rows": 1234, "lag": 3}
    flow |= {"inputs": ["topic:orders"], "outputs": ["table:shop.totals"]}
    status = {
        "pid": os.getpid(),
        "state": "running",
        "flows": [flow | {"rows_per_s": 12.5, "batch_ms": 420, "expectations": [failed]}],
        "log": ["08:00:00Z ready: 2 s, flows: 1"],
        "pipelines": str(tmp_path),
    }
    open_table(bus.data, "shop.totals").append(pa.table({"n": [1]}), writer="test", batch_id=None)
    (bus.data / "pipeline").mkdir(exist_ok=True)
    file = bus.data / "pipeline" / "status.json"
    file.write_text(json.dumps(status))
    try:
        console.open("pipelines")
        console.sees("totals", "1,234", "420 ms", "amount is positive: 2 rows failed", within="td")
        console.sees("orders", "totals", "shop.totals", within=".graph text")
        console.sees("ready", within=".log")
        [hover] = console.run(
            "return [...document.querySelectorAll('.log time')].map((one) => one.title)"
        )
        assert hover.endswith(" 08:00:00.000 UTC")
        assert "Refresh" not in console.texts("button")
        file.write_text(json.dumps(status | {"state": "stopped"}))
        console.click("Refresh")
        console.sees("The flows into shop.totals run once", within="dialog")
        assert console.complaints() == []
    finally:
        file.unlink()


def test_the_graph_shows_traffic_of_all_five_protocols(console: Console, bus: ConsoleBus) -> None:
    stop = threading.Event()
    sender = threading.Thread(target=send_on_all, args=(bus, stop))
    sender.start()
    key = bus.client.post("/v1/sessions", json={"topics": ["traffic"]}).json()["sessionKey"]
    try:
        console.open("graph")
        console.sees("session", within=".graph .kind")
        for name in ("Boson frames", "Boson properties", "goMS", "queue", "HTTP"):
            console.sees(f"sends on {name}"[:23], within=".graph .kind")
        console.until(lambda: len(console.texts(".graph .rate")) >= 5, "a rate on each edge")
        console.open()
        console.sees("Boson frames", "goMS", "queue", within=".legend")
    finally:
        bus.client.delete(f"/v1/sessions/{key}")
        stop.set()
        sender.join()


def send_on_all(bus: ConsoleBus, stop: threading.Event) -> None:
    address = ("127.0.0.1", bus.port)
    with (
        socket.create_connection(address) as frames,
        socket.create_connection(address) as props,
        socket.create_connection(address) as goms,
        socket.create_connection(("127.0.0.1", bus.queue_port)) as queue,
    ):
        goms.sendall(line("register", topics=["traffic"]))
        while not stop.wait(0.2):
            frames.sendall(frame("traffic", b'{"by": "frames"}'))
            props.sendall(properties(("topic", b"traffic"), ("content", b'{"by": "properties"}')))
            goms.sendall(line("send", topics=["traffic"], data="by goms"))
            queue.sendall(len(b"by queue").to_bytes(4, "big") + b"by queue")
            bus.publish("traffic", {"value": "by http"})


def test_a_query_shows_its_rows_and_one_that_never_ends_is_stopped(
    console: Console, bus: ConsoleBus
) -> None:
    console.open("sql", query="SELECT 40 + 2 AS answer, '<b>x</b>' AS mark")
    console.until(
        lambda: console.run("return document.querySelector('.editor')?.shadowRoot"), "editor"
    )
    console.click("Run")
    console.sees("42", "<b>x</b>", within="td")
    endless = (
        "SELECT count(*) FROM range(100000000000) a, range(1000000) b WHERE a.range % 7 = b.range"
    )
    console.open("sql", query=endless)
    console.until(
        lambda: console.run("return document.querySelector('.editor')?.shadowRoot"), "editor"
    )
    console.click("Run")
    console.sees("The query runs")
    assert bus.publish("news", {"value": "meanwhile"})
    console.click("Stop")
    console.sees("sql.stopped", within=".failure")


def test_names_are_completed_and_results_and_queries_are_kept(
    console: Console, profile: Path
) -> None:
    console.open("sql")
    console.until(lambda: console.run(EDITOR_IS_READY), "the editor to have the focus")
    console.sees("payments", within=".tree")
    console.keys("SELECT count(*) AS n FROM pay")
    console.until(lambda: console.run(OFFERED) == "payments", "the topic to be offered")
    text = "return document.querySelector('.editor').shadowRoot.textContent.includes('payments')"
    # A click: the editor ignores Enter for a moment, so that nobody takes an offer by mistake.
    console.run(
        "document.querySelector('.editor').shadowRoot.querySelector('li')"
        ".dispatchEvent(new MouseEvent('mousedown', { bubbles: true }))"
    )
    console.until(lambda: console.run(text), "it to be taken")
    console.press(Keys.CONTROL, Keys.ENTER)
    console.sees("1 row in", within=".card-head")
    console.choose("select[aria-label='Download the results']", "csv")
    file = profile / "downloads" / "query.csv"
    console.until(lambda: file.exists() and file.read_text().startswith("n"), "the file")
    console.click("Save the query")
    console.sees("Saved the query")
    console.open("sql")
    console.until(lambda: console.run(EDITOR_IS_READY), "the editor to have the focus")
    console.choose("select[aria-label='Saved queries and history']", "saved 0")
    console.until(lambda: console.run(text), "the query to be in the editor")
    assert console.run("return localStorage['polybus.history']").count("payments") == 1


def test_names_are_completed_when_they_are_here_before_the_editor(console: Console) -> None:
    early = """
        const names = { topics: [{ name: "earliest", columns: [] }], tables: [] };
        window.fetch = (url, ...rest) => String(url).includes("/v1/sql/names")
            ? Promise.resolve(Response.json(names)) : real(url, ...rest);
    """
    with console.answering(early):
        console.open("sql")
        console.until(lambda: console.run(EDITOR_IS_READY), "the editor to have the focus")
        console.keys("SELECT * FROM earl")
        console.until(lambda: console.run(OFFERED) == "earliest", "the topic to be offered")


def test_a_filter_is_saved_used_and_forgotten(console: Console) -> None:
    console.open("topic", name="orders", path="$.customer", equals="c-5")
    console.click("Save this filter")
    console.sees("Name", within="dialog")
    offered = console.run("return document.querySelector('dialog input').value")
    assert offered == "path $.customer, equals c-5"
    console.fill("dialog input", "the fifth customer")
    console.keys(Keys.ENTER)
    console.sees("Saved the filter")
    console.open("topic", name="orders", text="c-6")
    console.click("Save this filter")
    console.click("Save", within="dialog")
    console.choose("select[aria-label='Saved filters']", "the fifth customer")
    console.sees("Searched all", f"{len(range(5, ORDERS, 7))} found")
    console.click("Rename this filter")
    console.fill("dialog input", "number five")
    console.click("Save", within="dialog")
    names = "select[aria-label='Saved filters'] option"
    known = ["number five", "text c-6"]
    console.until(lambda: sorted(console.texts(names))[2:] == known, "its new name")
    console.click("Forget this filter")
    console.until(lambda: "number five" not in console.texts(names), "it to be forgotten")
    console.choose("select[aria-label='Saved filters']", "forget")
    console.until(lambda: console.texts(names) == [], "all to be forgotten")


def test_consumers_are_in_one_list_and_each_kind_can_be_ended(
    console: Console, bus: ConsoleBus
) -> None:
    key = bus.client.post("/v1/sessions", json={"topics": ["orders"]}).json()["sessionKey"]
    epoch = bus.client.get("/v1/topics/orders").json()["epoch"]
    report = {"positions": {"orders": {"epoch": epoch, "offset": 0}}}
    assert bus.client.put("/v1/consumers/etl", json=report).status_code == 204
    with socket.create_connection(("127.0.0.1", bus.port)) as peer:
        peer.sendall(line("register", topics=["orders"]))
        name = f"127.0.0.1:{peer.getsockname()[1]}"
        console.open("consumers")
        console.sees("etl", "session", name, within="td")
        shown = console.texts("td:nth-child(4)")
        assert shown.index("nothing") >= 3, "who reads is before who does not"
        console.open("consumers", q="orders")
        console.sees("etl", "session", name, within="td")
        console.open("consumers", q="etl")
        console.click("Forget")
        console.click("Forget", within="dialog")
        console.sees("Forgot the group", "Nobody matches")
        console.open("consumers", show="connections", q=name)
        console.sees(name, within="td")
        console.click("End")
        console.click("End it", within="dialog")
        console.sees("Ended the connection")
        peer.settimeout(WAIT_S)
        while peer.recv(4096):
            pass
    console.open("consumers", show="sessions")
    console.click("Redeliver")
    console.sees("Everything unconfirmed comes again")
    console.click("End")
    console.click("End it", within="dialog")
    console.sees("Ended the session", "No sessions")
    assert bus.client.delete(f"/v1/sessions/{key}").status_code == 404


def test_the_console_continues_when_the_bus_comes_back(console: Console, bus: ConsoleBus) -> None:
    console.open("topic", name="news", tab="live")
    console.until(lambda: console.texts(".connection") == ["Live"], "the live connection")
    bus.stop()
    console.until(lambda: "Bus away" in console.texts(".connection")[0], "to say that it is away")
    bus.start()
    console.until(lambda: console.texts(".connection") == ["Live"], "to be live again")

    # The tail begins some time after the page is connected: send until it shows one.
    def is_shown() -> bool:
        bus.publish("news", {"value": "after the restart"})
        return any("after the restart" in one for one in console.texts("td.wide"))

    console.until(is_shown, "a message after the restart")
    console.open("topics")
    console.sees("earlier", within="td")


def test_favourites_filters_and_the_theme_are_remembered(console: Console) -> None:
    console.open("topics")
    console.click("Favourite payments")
    console.open("topics")
    console.until(lambda: console.texts("tbody tr a")[:1] == ["payments"], "it to be the first")
    console.open("topics", starred=1)
    console.until(lambda: console.texts("tbody tr a") == ["payments"], "favourites only")
    console.choose(".theme select", "dark")
    console.open("topics")
    assert console.run("return document.documentElement.dataset.theme") == "dark"
    console.choose(".theme select", "auto")
    assert json.loads(console.run("return localStorage['polybus.favourites']")) == ["payments"]
