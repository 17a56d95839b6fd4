"""What an address of the console shows: a query that runs, the health, dead letters, a search."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from console_kit import Console, ConsoleBus, console_bus, open_console
from quarantine_kit import quarantine

pytestmark = pytest.mark.slow
SHARES = """SELECT * FROM (VALUES ('gain', 0.35), ('loss', -0.7), ('many', 1234567), ('none', NULL))
AS shares(name, share)"""
LETTERS = 120


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    with console_bus(tmp_path_factory.mktemp("bus"), "news", queue="news") as bus:
        bus.publish("news", *({"value": f"number {n}"} for n in range(50)))
        yield bus


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(tmp_path_factory.mktemp("chromium"), bus) as console:
        yield console


def report(bus: ConsoleBus, group: str, offset: int) -> None:
    """A group says how far it has read."""
    epoch = bus.client.get("/v1/topics/news").json()["epoch"]
    position = {"positions": {"news": {"epoch": epoch, "offset": offset}}}
    assert bus.client.put(f"/v1/consumers/{group}", json=position).status_code == 204


def test_a_query_that_ran_runs_again_for_whoever_opens_its_address(console: Console) -> None:
    console.open("sql", query="SELECT 6 * 7 AS answer")
    console.sees("This query has not run yet")
    assert console.texts("td") == []
    console.click("Run")
    console.sees("42", within="td")
    address = console.browser.current_url
    console.browser.get("about:blank")
    console.browser.get(address)
    console.sees("42", within="td")
    assert "run=1" in address


def test_a_file_that_lacks_rows_is_said_to(console: Console) -> None:
    console.open("sql", query="SELECT * FROM range(150000)", run=1)
    console.sees("cut at", within=".card-head")
    console.choose("select[aria-label='Download the results']", "csv")
    console.sees("The file ends at the limit of 100,000 rows")


def test_bars_have_their_decimals_and_negative_ones_go_the_other_way(console: Console) -> None:
    console.open("sql", query=SHARES, run=1)
    console.sees("1234567", within="td")
    query = SHARES.replace("1234567", "1.4")
    console.open("sql", query=query, run=1, **{"as": "chart"})
    console.until(lambda: console.texts(".bars tr"), "the bars")
    assert console.texts(".bars .end") == ["0.35", "-0.7", "1.4", "–"]
    edges = """return [...document.querySelectorAll(".bar-fill")].map((one) => {
        const { left, right } = one.getBoundingClientRect();
        const box = one.parentElement.getBoundingClientRect();
        return [left, right].map((at) => Math.round(((at - box.left) / box.width) * 100) / 100);
    })"""
    [gain, loss, many, none] = console.run(edges)
    assert loss[0] < 0.1 and abs(loss[1] - gain[0]) < 0.02 and abs(many[0] - gain[0]) < 0.02
    assert gain[1] - gain[0] == pytest.approx((many[1] - many[0]) / 4, abs=0.03)
    assert none[1] - none[0] < 0.01
    assert console.run("return document.querySelectorAll('.bar-fill[data-below]').length") == 1


def test_charts_over_time_show_negative_and_small_values(console: Console) -> None:
    query = """SELECT TIMESTAMP '2026-01-31 08:00:00' + INTERVAL (n) MINUTE AS at, v
        FROM (VALUES (0, -0.004), (1, 0.002)) AS t(n, v)"""
    console.open("sql", query=query, run=1, **{"as": "chart"})
    console.sees("Table", within=".chart summary")
    console.click("Table", within=".chart")
    console.sees("-0.004", "0.002", within=".chart-table td")
    hover = "return [...document.querySelectorAll('.chart-table time')].map((one) => one.title)"
    assert console.run(hover) == ["2026-01-31 08:01:00.000 UTC", "2026-01-31 08:00:00.000 UTC"]


def test_the_health_of_the_bus_is_a_tile_that_leads_to_its_page(
    console: Console, bus: ConsoleBus
) -> None:
    console.open()
    tile = ".tile:first-child"
    console.sees("Health", "healthy", "nothing is wrong", within=tile)
    report(bus, "etl", 0)
    console.sees("50 messages", within=".tile")
    broken = """
        const source = document.querySelector("script[type=module]").src;
        const { figures } = await import(new URL("live.js", source).href);
        const alerts = [{ code: "consumer-stopped", text: "etl does not read news" },
            { code: "certificate", text: "it has expired" }];
        figures.value = { ...figures.value, alerts };
        await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
        const tile = document.querySelector(".tile");
        return [tile.innerText, tile.dataset.tone, tile.pathname];
    """
    console.until(lambda: console.run_async(broken)[1] == "bad", "the problem to be marked")
    text, _, leads_to = console.run_async(broken)
    assert re.search(r"2\s*problems", text) and "consumer-stopped: etl does not read" in text
    assert leads_to == "/console/consumers"


def test_lags_have_units_on_every_page(console: Console, bus: ConsoleBus) -> None:
    report(bus, "one", 49)
    console.open("consumers", show="groups", q="one")
    console.sees("1 message", within="td")
    console.open("topic", name="news", tab="about")
    console.sees("1 message", within="td")
    lag = re.compile(r"Lag\s+\d+\s*messages?")
    console.until(lambda: any(map(lag.search, console.texts(".tile"))), "the lag with its unit")
    console.open("topics")
    console.sees(" message", within="td")
    assert bus.client.delete("/v1/consumers/one").status_code == 204


def test_a_long_name_leaves_room_for_the_figures_of_its_topic(
    console: Console, bus: ConsoleBus
) -> None:
    name = "readings." * 25
    assert bus.client.post("/v1/topics", json={"name": f"{name}end"}).status_code == 201
    measured = """
        const box = document.querySelector(".table-box");
        const [number, heading] = [box.querySelector("td.end"), box.querySelector("th.end")];
        const range = document.createRange();
        range.selectNodeContents(number);
        const ends = [range, heading.querySelector("button")]
            .map((one) => Math.round(one.getBoundingClientRect().right));
        return [box.scrollWidth - box.clientWidth, ends[0] - ends[1]];
    """
    console.open("topics")
    console.until(lambda: any(name in one for one in console.texts("td")), "the long name")
    # All columns are in view, and a number ends below its heading.
    assert console.run(measured) == [0, 0]
    assert bus.client.delete(f"/v1/topics/{name}end").status_code == 204


def test_each_setting_has_a_row_with_its_whole_value(console: Console) -> None:
    console.open("settings", q="connectors[1].speaks")
    console.until(lambda: console.texts("td .mono") == ["queue"], "what a connector speaks")
    console.open("settings")
    console.sees("queries.workers-max", within="td code")
    cut = """return [...document.querySelectorAll("td")]
        .filter((one) => one.scrollWidth > one.clientWidth).length"""
    assert console.run(cut) == 0


def test_older_dead_letters_lead_back_to_the_newest(console: Console, bus: ConsoleBus) -> None:
    quarantine(bus.data, "news", [b"{%d." % n for n in range(LETTERS)], "not JSON")
    console.open("dead-letters", topic="news")
    console.sees("Older", within="button")
    newest = console.texts("td.wide")
    assert "Newest" not in console.texts("button")
    console.click("Older")
    console.until(lambda: 0 < len(set(console.texts("td.wide")) - set(newest)), "the older ones")
    console.click("Newest")
    console.until(lambda: console.texts("td.wide") == newest, "the newest again")
    assert "from=" not in console.browser.current_url


def test_a_search_ends_at_the_time_that_its_user_chose(console: Console) -> None:
    # Each step of the search takes long, and finds nothing.
    slow = """
        window.asked = [];
        window.fetch = async (url, options) => {
            if (!String(url).includes("/search")) return real(url, options);
            const { searchParams } = new URL(url);
            window.asked.push(Number(searchParams.get("time-s")));
            await new Promise((done) => setTimeout(done, 400));
            const stop = Number(searchParams.get("stop")) - 1;
            return Response.json({ messages: [], scanned: 1, next: stop, "elapsed-s": 0.4 });
        };
    """
    with console.answering(slow):
        console.open("topic", name="news", text="nowhere")
        console.sees("of at most 1 min", within="[role=status]")
        assert console.texts("main progress") != []
        console.open("topic", name="news", text="nowhere", within="10")
        console.run("""
            const now = performance.now.bind(performance);
            performance.now = () => now() * 10;
        """)
        console.sees("Stopped:", "of at most 10 s", "Search on", within="[role=status]")
        assert max(console.run("return window.asked")) <= 1
        console.choose("label:has(option[value=none]) select", "none")
        console.until(lambda: "within=none" in console.browser.current_url, "no limit")
        console.click("Search on")
        console.sees("Searching:", within="[role=status]")
        assert "at most" not in console.texts("[role=status] .dim")[0]


@pytest.fixture
def pipeline(bus: ConsoleBus) -> Iterator[Path]:
    folder = bus.data / "pipeline"
    folder.mkdir(exist_ok=True)
    yield folder / "status.json"
    (folder / "status.json").unlink()


def test_times_of_the_drivers_log_are_local_with_utc_beside_them(
    console: Console, pipeline: Path
) -> None:
    log = ["08:00:09Z ready: flows: 3", "a line without a time"]
    status = {"state": "running", "pid": os.getpid(), "log": log, "time": "2026-01-31T08:00:09Z"}
    pipeline.write_text(json.dumps(status))
    zone = {"timezoneId": "Asia/Kolkata"}
    console.browser.execute_cdp_cmd("Emulation.setTimezoneOverride", zone)
    try:
        console.open("pipelines")
        console.sees("13:30:09 ready: flows: 3\na line without a time", within=".log")
        hover = console.run("return document.querySelector('.log time').title")
        assert hover.endswith("08:00:09.000 UTC")
    finally:
        console.browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})
