"""The dialogs of the Pipelines page, confirmed: a driver is started, stopped, and refreshes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from console_kit import Console, ConsoleBus, console_bus, open_console

from polybus.lake.table import open_table
from polybus.services.pipeline_watch import DRIVER_VARIABLE

pytestmark = pytest.mark.slow
# Says what it was asked for, answers on its socket, and ends when somebody asks it to stop.
DRIVER = """
import json, os, pathlib, socket, sys
data = pathlib.Path(sys.argv[sys.argv.index("--data") + 1])
file = data / "pipeline" / "status.json"
known = json.loads(file.read_text()) if file.exists() else {}
def write(state):
    about = {"state": state, "pid": os.getpid(), "socket": path, "asked": sys.argv[3:]}
    file.with_suffix(".new").write_text(json.dumps(known | about))
    file.with_suffix(".new").replace(file)
path = str(data / "fake.sock")
pathlib.Path(path).unlink(missing_ok=True)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen()
write("starting" if (data / "slow").exists() else "running")
print("the fake driver runs", flush=True)
if "--once" not in sys.argv:
    peer, _ = server.accept()
    request = peer.recv(1000)
    peer.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
    peer.close()
    assert request.startswith(b"POST /stop ")
write("stopped")
"""


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleBus]:
    folder = tmp_path_factory.mktemp("bus")
    script = folder / "driver.py"
    script.write_text(DRIVER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DRIVER_VARIABLE, str(script))
        with console_bus(folder, "orders") as bus:
            yield bus


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory, bus: ConsoleBus) -> Iterator[Console]:
    with open_console(tmp_path_factory.mktemp("chromium"), bus) as console:
        console.open()
        token = (bus.data / "admin.token").read_text().strip()
        console.run("sessionStorage.setItem('polybus.token', arguments[0])", token)
        yield console


def status(bus: ConsoleBus) -> dict[str, Any]:
    return dict(json.loads((bus.data / "pipeline" / "status.json").read_text()))


def test_a_driver_is_started_stopped_and_refreshes_a_table_after_confirmations(
    console: Console, bus: ConsoleBus, tmp_path: Path
) -> None:
    rows = pa.table({"n": [1]})
    open_table(bus.data, "shop.totals").append(rows, writer="test", batch_id=None)
    (bus.data / "pipeline").mkdir(exist_ok=True)
    stopped = {"state": "stopped", "pipelines": str(tmp_path), "master": "local[2]"}
    (bus.data / "pipeline" / "status.json").write_text(json.dumps(stopped))
    console.open("pipelines")

    console.click("Start")
    console.sees("The driver starts Spark", within="dialog")
    console.click("Start", within="dialog")
    console.sees("Asked the pipeline to start", "the fake driver runs", "running")
    assert status(bus)["asked"] == ["--master", "local[2]", "--pipelines", str(tmp_path)]

    console.click("Stop")
    console.sees("All flows end after their running batch", within="dialog")
    console.click("Cancel", within="dialog")
    assert status(bus)["state"] == "running"
    console.click("Stop")
    console.click("Stop", within="dialog")
    console.sees("Asked the pipeline to stop")
    console.until(lambda: status(bus)["state"] == "stopped", "the driver to end")

    console.click("Refresh", within="td")
    console.sees("The flows into shop.totals run once", within="dialog")
    console.run("document.querySelector('dialog input[type=checkbox]').click()")
    console.click("Refresh", within="dialog")
    console.sees("The driver starts, for one pass into the table")
    wanted = ["--refresh=shop.totals", "--reset=shop.totals"]
    console.until(lambda: status(bus)["asked"][-2:] == wanted, "the table to be refreshed")


def test_a_driver_that_starts_spark_can_be_stopped(console: Console, bus: ConsoleBus) -> None:
    (bus.data / "pipeline").mkdir(exist_ok=True)
    (bus.data / "pipeline" / "status.json").write_text(json.dumps({"state": "stopped"}))
    (bus.data / "slow").touch()
    console.open("pipelines")
    console.click("Start")
    console.click("Start", within="dialog")
    console.sees("the fake driver runs", "starting")
    console.click("Stop")
    console.sees("Spark's start is cancelled", within="dialog")
    console.click("Stop", within="dialog")
    console.until(lambda: status(bus)["state"] == "stopped", "the driver to end")
    (bus.data / "slow").unlink()


def test_a_start_that_is_refused_is_shown_in_its_dialog(console: Console, bus: ConsoleBus) -> None:
    refused = {"code": "pipeline.running", "detail": "a pipeline is already running"}
    answer = f"""
        window.fetch = (url, options) => options.method === "GET" ? real(url, options)
            : Promise.resolve(Response.json({json.dumps(refused)}, {{ status: 409 }}));
    """
    (bus.data / "pipeline").mkdir(exist_ok=True)
    (bus.data / "pipeline" / "status.json").write_text(json.dumps({"state": "stopped"}))
    with console.answering(answer):
        console.open("pipelines")
        console.click("Start")
        console.click("Start", within="dialog")
        console.sees("A pipeline is already running.", "pipeline.running", within="dialog .failure")
