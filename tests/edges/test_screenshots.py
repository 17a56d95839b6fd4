"""The pictures of the console in README and docs are taken here, so that they show what is there.

`make screenshots` puts them into docs/img/console; otherwise they go to a temporary folder. Beside
them, words.json has the words of each: headings, columns, buttons and labels, without the figures.
A page that has other words now needs a new picture.
"""

from __future__ import annotations

import base64
import json
import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from console_kit import Console, ConsoleBus, console_bus, open_console
from edge_kit import frame, line, properties
from quarantine_kit import quarantine

from polybus.lake.table import open_table

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "docs" / "img" / "console"
TOPICS = ("orders", "payments", "telemetry", "alerts", "news", "inventory")
SENT_EVERY_S = 0.05
POINTS_WANTED = 45
QUERY = """SELECT json(value)->>'customer' AS customer, count(*) AS orders
FROM orders WHERE protocol = 'boson-properties' GROUP BY 1 ORDER BY 2 DESC LIMIT 12"""
# Name, page, parameters, theme, what to wait for, and its size.
SHOTS: dict[str, tuple[str, dict[str, object], str, str, tuple[int, int]]] = {
    "overview": ("overview", {}, "light", ".chart canvas", (1280, 860)),
    "topics": ("topics", {}, "light", "tbody tr", (1280, 620)),
    "topic": (
        "topic",
        {"name": "orders", "message": 40, "before": 52},
        "dark",
        ".histogram",
        (1280, 900),
    ),
    "wire": (
        "topic",
        {"name": "orders", "message": 40, "before": 52, "view": "wire", "wire": "boson-properties"},
        "light",
        ".bytes",
        (1280, 1000),
    ),
    "graph": ("graph", {}, "light", ".graph .rate", (1280, 640)),
    "consumers": ("consumers", {}, "light", "tbody tr", (1280, 620)),
    "dead-letters": ("dead-letters", {}, "light", "tbody tr", (1280, 640)),
    "pipelines": ("pipelines", {}, "light", ".graph", (1280, 1000)),
    "sql": ("sql", {"query": QUERY, "as": "chart"}, "light", ".editor", (1280, 800)),
    "settings": ("settings", {"show": "audit"}, "light", "tbody tr", (1280, 620)),
    "phone": ("overview", {}, "dark", ".chart canvas", (390, 844)),
}

WORDS = """return [...document.querySelectorAll(
    "h1, h2, h3, thead th, button, main label, .tile-label, nav a, aside dt")]
    .map((one) => one.innerText.trim().split("\\n")[0]).filter(Boolean)"""


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    with console_bus(tmp_path_factory.mktemp("bus"), *TOPICS) as bus:
        letters = [b'{"order": 17, "amount": ', b"order 18, 12.50", b"\xff\xfe18"]
        quarantine(bus.data, "orders", letters, "the value is not JSON")
        quarantine(bus.data, "telemetry", [b'{"sensor": "x"}'], "sensor is not a number")
        run_pipeline(bus.data)
        stop = threading.Event()
        sender = threading.Thread(target=send, args=(bus, stop))
        sender.start()
        try:
            yield bus
        finally:
            stop.set()
            sender.join()


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(tmp_path_factory.mktemp("chromium"), bus) as console:
        yield console


def run_pipeline(data: Path) -> None:
    """What a driver has written: the standard pipeline, and one of a user."""
    for number, name in enumerate(("silver", "traffic", "shop.daily")):
        rows = pa.table({"n": range(1000 * (3 - number))})
        open_table(data, name).append(rows, writer="shot", batch_id=0)
    shared = {"state": "running", "lag": 0, "expectations": [], "batch_id": 41, "batch_rows": 320}
    decode: dict[str, Any] = {
        "pipeline": "standard",
        "flow": "decode",
        "rows": 48_210,
        "rows_per_s": 212.0,
    }
    decode |= {"batch_ms": 640, "running_batch": 42, "running_s": 0.4}
    decode |= {"outputs": ["table:silver", "table:quarantine"]}
    watch: dict[str, Any] = {
        "pipeline": "standard",
        "flow": "watch",
        "rows": None,
        "batch_id": None,
    }
    watch |= {"inputs": ["table:silver"], "outputs": ["table:traffic", "topic:$alerts"]}
    daily: dict[str, Any] = {"pipeline": "shop", "flow": "daily", "rows": 9_120, "rows_per_s": 20.0}
    daily |= {"batch_ms": 910, "inputs": ["topic:orders"], "outputs": ["table:shop.daily"]}
    failed = {"name": "positive_amount", "topic": "shop.daily", "passed": 9117, "failed": 3}
    flows = [shared | decode, shared | watch, shared | daily | {"expectations": [failed]}]
    now = datetime.now(UTC)
    runs = [
        {
            "pipeline": flow["pipeline"],
            "flow": flow["flow"],
            "batch": number,
            "rows": 320,
            "ms": 640,
        }
        | {"time": (now - timedelta(seconds=42 - number)).isoformat(timespec="seconds")}
        for number in range(34, 42)
        for flow in (decode, daily)
    ]
    about = {"pid": os.getpid(), "time": now.isoformat(timespec="seconds"), "master": "local[2]"}
    log = ["08:00:00Z starting: starting Spark on local[2]", "08:00:09Z ready: 9.1 s, flows: 3"]
    status = {"state": "running", "uptime-s": 842.0, "flows": flows, "runs": runs, "log": log}
    (data / "pipeline").mkdir(exist_ok=True)
    (data / "pipeline" / "status.json").write_text(json.dumps(status | about))


def order(chance: random.Random, number: int) -> bytes:
    amount = round(chance.random() * 200, 2)
    customer = f"c-{chance.randint(1, 30):03d}"
    return json.dumps(
        {"order": 1000 + number, "customer": customer, "amount": amount, "items": ["A-12"]}
    ).encode()


def send(bus: ConsoleBus, stop: threading.Event) -> None:
    """Traffic on all protocols, the same each time."""
    chance = random.Random(7)
    address = ("127.0.0.1", bus.port)
    with (
        socket.create_connection(address) as frames,
        socket.create_connection(address) as props,
        socket.create_connection(address) as goms,
        socket.create_connection(("127.0.0.1", bus.queue_port)) as queue,
    ):
        goms.sendall(line("register", topics=["payments", "alerts"]))
        frames.sendall(frame("$subscribe", b"orders\nalerts"))
        bus.client.post("/v1/sessions", json={"topics": ["orders", "news"]})
        bus.client.patch("/v1/topics/telemetry", json={"retention-age-s": 86400})
        bus.client.patch("/v1/topics/orders", json={"retention-age-s": 7 * 86400})
        number = 0
        while not stop.wait(SENT_EVERY_S):
            number += 1
            wave = 4 + 3 * math.sin(number / 90)
            for sensor in range(round(wave + chance.random())):
                reading = {"sensor": sensor, "temperature": round(chance.gauss(21, 3), 2)}
                frames.sendall(frame("telemetry", json.dumps(reading).encode()))
            headers = (("source", b"shop"), ("lang", b"en"))
            content = ("content", order(chance, number))
            props.sendall(properties(("topic", b"orders"), content, *headers))
            goms.sendall(line("send", topics=["payments"], data={"order": number, "state": "paid"}))
            stock = json.dumps({"order": number, "by": "warehouse"}).encode()
            queue.sendall(len(stock).to_bytes(4, "big") + stock)
            if number % 5 == 0:
                bus.publish("news", {"value": {"title": "restocked", "n": number}, "key": "A-12"})


@pytest.mark.parametrize("name", SHOTS)
def test_a_picture_is_taken(name: str, console: Console, bus: ConsoleBus, tmp_path: Path) -> None:
    page, params, theme, ready, size = SHOTS[name]
    console.resize(*size)
    console.until(lambda: bus.client.get("/v1/topics/orders").json()["stop"] > 100, "messages")
    console.open(page, **params)
    console.theme(theme)
    console.until(lambda: console.run("return document.querySelector(arguments[0])", ready), ready)
    if page == "topic":
        console.until(lambda: console.texts(".histogram-ends"), "the histogram")
    if page == "sql":
        console.click("Run")
        console.until(lambda: console.texts(".bars tr"), "the result")
    console.until(lambda: console.texts(".connection") == ["Live"], "live figures")
    console.until(lambda: not console.texts(".waiting"), "everything to be loaded")
    assert console.texts(".failure") == []
    if "SCREENSHOTS" in os.environ and page == "overview":
        # One point a second.
        time.sleep(POINTS_WANTED)
    taken = console.browser.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "webp", "quality": 82}
    )
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.webp").write_bytes(base64.b64decode(taken["data"]))
    words = sorted({re.sub(r"\d[\d,.]*", "0", one) for one in console.run(WORDS)})
    known = json.loads((PICTURES / "words.json").read_text())
    if "SCREENSHOTS" in os.environ:
        known[name] = words
        (folder / "words.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    assert known[name] == words, "the page has changed: make screenshots"


def test_every_picture_of_the_documents_is_one_that_is_taken() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = {
        name for page in pages for name in re.findall(r"console/(\S+)\.webp\)", page.read_text())
    }
    assert used == SHOTS.keys()
    assert {one.stem for one in PICTURES.glob("*.webp")} == SHOTS.keys()
