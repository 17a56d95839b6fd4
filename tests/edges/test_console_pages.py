"""Every page, tab and window of the console, with data of strangers in all of them.

Each is opened once, and then: the Tab key leads to every control, nothing of the strangers runs,
axe-core finds nothing serious in light and dark and on a phone, and every field that the page reads
is one that the API has.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from console_fields_kit import ApiFields, missing_fields, record_fields
from console_kit import PAGES, Console, ConsoleBus, axe_source, console_bus, open_console
from quarantine_kit import quarantine
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.slow
HOSTILE = "<img src=x onerror=document.title='owned'>"
SCRIPT = "</td><script>document.title='owned'</script>" + HOSTILE
QUERY = f"SELECT '{SCRIPT.replace(chr(39), chr(39) * 2)}' AS x, 1 AS n"
HERE = {"name": HOSTILE, "message": 0, "before": 1}
# Page, parameters, and what it must show of the strangers.
VIEWS: dict[str, tuple[str, dict[str, object], str]] = {
    "overview": ("overview", {}, HOSTILE),
    "topics": ("topics", {}, HOSTILE),
    "browse": ("topic", HERE, SCRIPT),
    "search": ("topic", {"name": HOSTILE, "header": "by", "path": "$.x"}, HOSTILE[:20]),
    "text": ("topic", HERE | {"view": "text"}, SCRIPT),
    "headers": ("topic", HERE | {"view": "headers"}, SCRIPT),
    "hex": ("topic", HERE | {"view": "hex"}, "3c 2f 74 64"),
    "wire": ("topic", HERE | {"view": "wire"}, HOSTILE),
    "live": ("topic", {"name": HOSTILE, "tab": "live"}, SCRIPT),
    "publish": ("topic", {"name": HOSTILE, "tab": "publish"}, HOSTILE),
    "resend": ("topic", {"name": HOSTILE, "tab": "publish", "resend": 0}, HOSTILE),
    "settings of a topic": ("topic", {"name": HOSTILE, "tab": "about"}, HOSTILE),
    "graph": ("graph", {"idle": 1}, HOSTILE[:12]),
    "consumers": ("consumers", {}, HOSTILE),
    "groups": ("consumers", {"show": "groups"}, HOSTILE),
    "sessions": ("consumers", {"show": "sessions"}, HOSTILE),
    "connections": ("consumers", {"show": "connections"}, "127.0.0.1"),
    "dead letters": ("dead-letters", {"open": f"{HOSTILE}:1:0"}, SCRIPT),
    "pipelines": ("pipelines", {}, SCRIPT),
    "sql": ("sql", {"query": QUERY}, HOSTILE),
    "settings": ("settings", {"q": "workers"}, "queries.workers-max"),
    "accounts": ("settings", {"show": "accounts"}, "shop"),
    "audit": ("settings", {"show": "audit"}, HOSTILE),
}
# What opens a window, by view.
WINDOWS: dict[str, tuple[str, ...]] = {
    "topics": ("Create a topic", "?"),
    "search": ("Save this filter",),
    "settings of a topic": ("Delete the topic",),
    "groups": ("Forget",),
    "sessions": ("End",),
    "connections": ("End",),
    "dead letters": ("Redrive all 1",),
    "pipelines": ("Stop",),
    "accounts": ("Create an account", "New token", "Share"),
}


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    # The browser complains of every 429, though the page asks again.
    settings = {"queries": {"workers-max": 16}}
    with console_bus(tmp_path_factory.mktemp("bus"), HOSTILE, queue=HOSTILE, **settings) as bus:
        fill(bus)
        yield bus


def fill(bus: ConsoleBus) -> None:
    """Let every page have something to show."""
    token = (bus.data / "admin.token").read_text().strip()
    bus.client.headers["authorization"] = f"Bearer {token}"
    encoded = quote(HOSTILE, safe="")
    bus.publish(encoded, {"value": {"x": SCRIPT}, "key": HOSTILE, "headers": {"by": SCRIPT}})
    quarantine(bus.data, HOSTILE.lower(), [SCRIPT.encode()], SCRIPT)
    position = {HOSTILE: {"epoch": 1, "offset": 0}}
    report = {"kind": HOSTILE, "positions": position, "last-error": SCRIPT}
    flow = {"pipeline": HOSTILE, "flow": SCRIPT, "state": "running", "rows": 1, "lag": 3}
    failed = {"topic": HOSTILE, "name": SCRIPT, "passed": 5, "failed": 2}
    status = {"pid": os.getpid(), "state": "running", "problems": [SCRIPT], "master": HOSTILE}
    flow |= {"inputs": [f"topic:{HOSTILE.lower()}"], "outputs": [f"topic:{SCRIPT.lower()}"]}
    status["flows"] = [flow | {"batch_ms": 4, "expectations": [failed]}]
    (bus.data / "pipeline").mkdir(exist_ok=True)
    (bus.data / "pipeline" / "status.json").write_text(json.dumps(status))
    alert = {"kind": "spike", "topic": HOSTILE, "text": SCRIPT}
    for method, path, body in (
        ("PUT", f"/v1/consumers/{encoded}", report),
        ("POST", "/v1/sessions", {"topics": [HOSTILE]}),
        ("POST", "/v1/accounts", {"name": "shop"}),
        ("POST", "/v1/topics/$alerts/messages", alert),
        ("PATCH", f"/v1/topics/{encoded}", {"retention-age-s": 86400}),
    ):
        answer = bus.client.request(method, path, json=body)
        assert answer.status_code < 300, (path, answer.text)


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(tmp_path_factory.mktemp("chromium"), bus) as console:
        console.open()
        token = bus.client.headers["authorization"].removeprefix("Bearer ")
        console.run("sessionStorage.setItem('polybus.token', arguments[0])", token)
        record_fields(console)
        yield console


@pytest.fixture(scope="module")
def fields(bus: ConsoleBus) -> ApiFields:
    series = bus.client.get("/v1/figures").json()["series"]
    return ApiFields(bus.client.get("/openapi.json").json(), set(series))


@pytest.fixture(scope="module")
def axe() -> str:
    return axe_source()


def show(console: Console, bus: ConsoleBus, view: str) -> None:
    page, params, stranger = VIEWS[view]
    console.resize(1280, 900)
    console.open(page, **params)
    if page in PAGES:
        console.sees(PAGES[page], within="h1")
    if view == "sql":
        console.click("Run")
    if view == "live":
        # The tail begins some time after the page is connected: send until it shows one.
        def is_shown() -> bool:
            bus.publish(quote(HOSTILE, safe=""), {"value": {"x": SCRIPT}})
            return any(stranger in one for one in console.texts("main"))

        console.until(is_shown, "a message in the tail")
    console.sees(stranger, within="main")
    console.until(lambda: not console.texts(".waiting"), "the page to be loaded")


def check_everybody_can_use_it(console: Console, axe: str) -> None:
    console.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    console.theme("light")
    assert console.barriers(axe) == []
    console.theme("dark")
    console.resize(360, 780)
    wide = "return document.scrollingElement.scrollWidth - innerWidth"
    console.until(lambda: console.run(wide) <= 0, "nothing to be wider than the phone")
    assert console.barriers(axe) == []


def check_keys_lead_everywhere(console: Console) -> None:
    """By the Tab key alone. Rows that come meanwhile are reached in another round."""
    console.run("document.querySelectorAll('details').forEach((one) => (one.open = false))")
    console.until(lambda: console.out_of_reach() == [], "the Tab key to lead everywhere")


def check_nothing_ran(console: Console) -> None:
    assert console.run("return document.querySelectorAll('img, main script').length") == 0
    assert "owned" not in console.browser.title.replace(HOSTILE, "")
    assert console.complaints() == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_and_its_windows_are_for_everybody_and_strangers_stay_text(
    console: Console, bus: ConsoleBus, axe: str, fields: ApiFields, view: str
) -> None:
    show(console, bus, view)
    check_keys_lead_everywhere(console)
    check_everybody_can_use_it(console, axe)
    for window in WINDOWS.get(view, ()):
        console.resize(1280, 900)
        if window == "?":
            console.keys(window)
        else:
            console.click(window)
        console.until(lambda: console.texts("dialog"), "the window to be open")
        console.until(lambda: not console.texts("dialog .waiting"), "its content to be loaded")
        check_everybody_can_use_it(console, axe)
        console.keys(Keys.ESCAPE)
        console.until(lambda: not console.texts("dialog"), "the window to be closed")
    check_nothing_ran(console)
    unknown = [one for one in missing_fields(console) if not fields.has(one[0], one[1:])]
    assert unknown == []
