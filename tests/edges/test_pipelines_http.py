"""The pipeline over HTTP: its flows and last batches, and starting and stopping its driver."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from http_kit import Http, http_bus

from polybus.log.layout import admin_token_path
from polybus.services import pipeline_watch

FLOW = {"pipeline": "standard", "flow": "silver", "state": "running", "rows": 7, "lag": 3}
DRIVER = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[-1]) / "pipeline"
folder.mkdir(exist_ok=True)
status = {"state": "running", "time": "now", "pid": os.getpid(), "socket": ""}
(folder / "status.json").write_text(json.dumps(status))
print('{"event":"ready","seconds":1.5,"flows":2}', flush=True)
print('{"event":"progress"}', flush=True)
sys.stdin.read()
"""


def write_status(http: Http, **about: Any) -> None:
    folder = http.node.data / "pipeline"
    folder.mkdir(exist_ok=True)
    status = {"state": "running", "time": "2026-01-01T00:00:00+00:00", "pid": os.getpid(), **about}
    (folder / "status.json").write_text(json.dumps(status))


def admin(http: Http) -> dict[str, str]:
    return {"authorization": f"Bearer {admin_token_path(http.node.data).read_text().strip()}"}


async def shown(http: Http) -> Any:
    return (await http.client.get("/v1/pipelines")).json()


async def test_flows_and_their_last_batches_are_shown() -> None:
    async with http_bus() as http:
        assert (await shown(http))["state"] == "never"
        run = {"pipeline": "standard", "flow": "silver", "time": "2026-01-01T00:00:00+00:00"}
        runs = [run | {"batch": batch, "rows": 2, "ms": 20} for batch in (3, 5)]
        flow = {**FLOW, "batch_id": 5, "batch_ms": 20, "batch_rows": 2}
        running = {"running_batch": 6, "running_s": 1.5}
        about = {"master": "local", "log": ["starting Spark"]}
        write_status(http, flows=[flow | running], runs=runs, **about)
        view = await shown(http)

        assert (view["state"], view["master"], view["actions"]) == ("running", "local", ["stop"])
        last = {"batch-id": 5, "batch-ms": 20, "batch-rows": 2}
        assert view["flows"] == [{**FLOW, **last, "running-batch": 6, "running-s": 1.5}]
        assert view["runs"] == runs[::-1]
        assert view["log"] == ["starting Spark"]
        write_status(http, pid=999_999_999)
        assert (await shown(http))["state"] == "failed"
        for damaged in ("{", "[]", '{"flows": 1}'):
            (http.node.data / "pipeline" / "status.json").write_text(damaged)
            assert (await shown(http))["state"] == "never"
        path = http.node.data / "pipeline" / "status.json"
        path.unlink()
        path.symlink_to(path)  # Opening it fails with ELOOP.
        view = await shown(http)
        assert view["state"] == "unknown" and "cannot read the status" in view["problems"][0]


async def test_the_driver_is_asked_to_stop_on_its_socket(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"POST /stop ")
        asked.set()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        writer.close()

    path = tmp_path / "driver.sock"
    async with http_bus() as http, await asyncio.start_unix_server(answer, path):
        nothing = await http.client.post("/v1/pipelines/stop", headers=admin(http))
        write_status(http, state="starting", socket=str(path))
        denied = await http.client.post("/v1/pipelines/stop")
        stopped = await http.client.post("/v1/pipelines/stop", headers=admin(http))
        write_status(http, socket=str(tmp_path / "nobody"))
        gone = await http.client.post("/v1/pipelines/stop", headers=admin(http))

        assert (nothing.status_code, nothing.json()["code"]) == (409, "pipeline.not-running")
        assert denied.status_code == 403 and stopped.status_code == 202 and asked.is_set()
        assert (gone.status_code, gone.json()["code"]) == (503, "pipeline.unreachable")
        audit = (await http.client.get("/v1/topics/$audit/messages")).json()["messages"]
        assert [one["value"]["action"] for one in audit] == ["pipeline-stop"]


async def test_a_driver_is_started_once_and_ends_with_the_bus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline_watch, "COMMAND", (sys.executable, "-c", DRIVER))
    async with http_bus() as http:
        asked = [http.client.post("/v1/pipelines/start", headers=admin(http)) for _ in range(2)]
        started, again = sorted(await asyncio.gather(*asked), key=lambda one: one.status_code)
        view = await shown(http)
        while view["state"] != "running" or not view["log"]:
            view = await shown(http)

        assert started.status_code == 202
        assert (again.status_code, again.json()["code"]) == (409, "pipeline.running")
        (line,) = view["log"]
        assert line.partition(" ")[2] == "ready: 1.5 s, flows: 2"
    with pytest.raises(ProcessLookupError):
        os.kill(view["pid"], 0)


async def test_a_driver_that_ends_before_its_status_has_failed_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies = """
print('{"event":"starting","text":"starting Spark"}')
print("Java is missing", flush=True)
raise SystemExit(1)
"""
    monkeypatch.setattr(pipeline_watch, "COMMAND", (sys.executable, "-c", dies))
    async with http_bus() as http:
        write_status(http, state="stopped", pid=0, problems=["of the last run"], flows=[FLOW])
        for _ in range(2):
            started = await http.client.post("/v1/pipelines/start", headers=admin(http))
            assert started.status_code == 202
            view = await shown(http)
            while view["state"] == "starting" or len(view["log"]) < 2:
                view = await shown(http)

            assert (view["state"], view["actions"]) == ("failed", ["start"])
            text = "the driver ended before it was ready: Java is missing"
            assert view["problems"] == [text, "the driver ended with exit code 1"]
            assert view["flows"] == []
            assert view["log"][0].endswith("Z starting: starting Spark")
            assert view["log"][1:] == ["Java is missing"]
        # Somebody else has started one since.
        write_status(http, state="done", time="2026-01-02T00:00:00+00:00")
        assert (await shown(http))["state"] == "done"


async def test_a_start_without_java_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBUS_JAVA", "/nowhere/java")
    async with http_bus() as http:
        await http.client.post("/v1/pipelines/start", headers=admin(http))
        view = await shown(http)
        while len(view["problems"]) < 2 or "/nowhere/java" not in "".join(view["log"]):
            assert view["state"] in ("starting", "failed")
            view = await shown(http)

        assert view["problems"][0].startswith("spark.no-java: Spark needs Java 17 or newer; found")
        assert view["problems"][1] == "the driver ended with exit code 1"
        assert view["actions"] == ["start"]


async def test_a_driver_is_starting_until_it_has_written_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    slow = f"print('loading', flush=True); open({str(gate)!r}).read()\n{DRIVER}"
    monkeypatch.setattr(pipeline_watch, "COMMAND", (sys.executable, "-c", slow))
    async with http_bus() as http:
        started = await http.client.post("/v1/pipelines/start", headers=admin(http))
        view = await shown(http)
        assert (started.status_code, view["state"], view["actions"]) == (202, "starting", ["stop"])
        while not view["log"]:
            view = await shown(http)
        again = await http.client.post("/v1/pipelines/start", headers=admin(http))

        assert (view["state"], view["log"], view["problems"]) == ("starting", ["loading"], [])
        assert (again.status_code, again.json()["code"]) == (409, "pipeline.running")
        await asyncio.to_thread(gate.write_text, "")
        while view["state"] != "running":
            view = await shown(http)
        assert view["actions"] == ["stop"]


async def test_a_driver_is_stopped_before_it_has_written_a_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads = "import time; print('loading', flush=True); time.sleep(60)"
    monkeypatch.setattr(pipeline_watch, "COMMAND", (sys.executable, "-c", loads))
    async with http_bus() as http:
        write_status(http, state="failed", pid=0, problems=["of the last run"])
        for _ in range(2):
            started = await http.client.post("/v1/pipelines/start", headers=admin(http))
            pid = (await shown(http))["pid"]
            stopped = await http.client.post("/v1/pipelines/stop", headers=admin(http))
            assert (started.status_code, stopped.status_code) == (202, 202)
            view = await shown(http)
            while view["state"] == "starting":
                view = await shown(http)
            assert (view["state"], view["problems"]) == ("stopped", [])
            assert view["actions"] == ["start"]
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_a_driver_of_others_is_starting_while_its_status_says_so() -> None:
    async with http_bus() as http:
        write_status(http, state="starting")
        view = await shown(http)
        started = await http.client.post("/v1/pipelines/start", headers=admin(http))
        write_status(http, state="starting", pid=999_999_999)
        killed = await shown(http)

        assert (view["state"], view["actions"]) == ("starting", ["stop"])
        assert (started.status_code, started.json()["code"]) == (409, "pipeline.running")
        assert killed["state"] == "failed" and "999999999 has ended" in killed["problems"][0]


@pytest.mark.slow
async def test_a_table_of_ones_own_is_refreshed_by_a_driver_that_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = "import sys; print(' '.join(sys.argv[3:]), flush=True); sys.stdin.read()"
    monkeypatch.setattr(pipeline_watch, "COMMAND", (sys.executable, "-c", told))
    path = "/v1/pipelines/refresh"
    async with http_bus() as http:
        client, given = http.client, {"table": "shop.sums", "reset": True}
        no_folder = await client.post(path, headers=admin(http), json=given)
        (http.node.data / "tables" / "shop.sums").mkdir(parents=True)
        write_status(http, pipelines=str(tmp_path))
        running = await client.post(path, headers=admin(http), json={"table": "shop.sums"})
        write_status(http, state="stopped", pipelines=str(tmp_path))
        view = await shown(http)
        unknown = await client.post(path, headers=admin(http), json={"table": "nix"})
        denied = await client.post(path, json=given)
        started = await client.post(path, headers=admin(http), json=given)
        lines = http.node.http.pipelines._lines
        await http.until(lambda: bool(lines))
        audit = (await client.get("/v1/topics/$audit/messages")).json()["messages"]

        assert no_folder.json()["code"] == "pipeline.folder"
        assert (running.status_code, running.json()["code"]) == (409, "pipeline.running")
        assert view["actions"] == ["start", "refresh"]
        assert unknown.json()["code"] == "pipeline.unknown" and denied.status_code == 403
        assert started.status_code == 202, started.text
        once = f"--once --no-standard --pipelines {tmp_path}"
        assert lines[0].endswith(f"{once} --refresh=shop.sums --reset=shop.sums")
        assert audit[-1]["value"]["detail"] == given


async def test_the_graph_leads_from_flows_to_what_they_write_and_from_what_they_read() -> None:
    async with http_bus("news", "big") as http:
        for table in ("silver", "silver_news", "traffic", "shop.sums"):
            (http.node.data / "tables" / table).mkdir(parents=True)
        decode = {"pipeline": "standard", "flow": "decode", "rows_per_s": 5.0}
        decode |= {"outputs": ["table:silver", "table:quarantine", "table:silver_*"]}
        watch = {"pipeline": "standard", "flow": "watch", "inputs": ["table:silver"]}
        sums = {"pipeline": "shop", "flow": "sums", "inputs": ["topic:news", "table:silver"]}
        out = {"pipeline": "shop", "flow": "out", "inputs": ["table:shop.sums"]}
        flows = [decode, watch, sums | {"outputs": ["table:shop.sums"]}]
        write_status(http, flows=[*flows, out | {"outputs": ["topic:big"]}])
        graph = (await http.client.get("/v1/graph")).json()
        edges = {(one["from"], one["to"]): one["messages-per-s"] for one in graph["edges"]}

        assert edges == {
            ("flow:standard", "table:silver"): 5.0,
            ("flow:standard", "table:silver_news"): 5.0,
            ("topic:news", "flow:shop.sums"): 0.0,
            ("table:silver", "flow:shop.sums"): 0.0,
            ("flow:shop.sums", "table:shop.sums"): 0.0,
            ("table:shop.sums", "flow:shop.out"): 0.0,
            ("flow:shop.out", "topic:big"): 0.0,
        }
        assert "table:quarantine" not in [one["id"] for one in graph["nodes"]]
