"""Every kind of file in a data folder, corrupted in every way: `verify` names it, or need not.

The folder is that of a real bus, with what pipelines leave there: their code writes it, without
Spark. A kind of file that is not in KINDS fails the test: whoever adds one decides here what
becomes of its damage.
"""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from spark_kit import RunningBus, eventually, running_bus
from standard_kit import NOON

from polybus.cli.replay.once import PublishedPart
from polybus.config import Pipeline
from polybus.lake import stopped
from polybus.lake.compact import checkpoint
from polybus.lake.settings import PipelineSettings
from polybus.lake.stopped import StoppedTopic
from polybus.lake.table import open_table
from polybus.log import checked_json
from polybus.log.history import exposed
from polybus.log.layout import admin_token_path
from polybus.log.verify.verify import VerifyReport
from polybus.services.checking import verify
from polybus.services.pipeline_watch import write_errors
from polybus.spark.checkpoint import Checkpoint
from polybus.spark.pipelines.declared import changes, reset, view_flow
from polybus.spark.pipelines.declared.changes import Fingerprint
from polybus.spark.pipelines.declared.reset import Reset
from polybus.spark.pipelines.declared.view_flow import ViewMetadata
from polybus.spark.pipelines.flows import checkpoints_of
from polybus.spark.pipelines.running import service
from polybus.spark.pipelines.standard import batches, gold, watch
from polybus.spark.pipelines.standard.poison import PoisonMessages, PoisonRange

CORRUPTIONS = ("flip", "cut", "zero", "remove")
JOURNAL = {"segment-age-s": 0.2, "handover-interval-s": 0.3}
PLACES = (0.03, 0.5, 0.97)
ZEROS = 64


@dataclass(frozen=True)
class Kind:
    """Files of one kind, and the corruptions that `verify` need not name, with the reason."""

    pattern: str
    unnamed: tuple[str, ...] = ()
    reason: str = ""


ACCOUNT = "accounts/[^/]+"
TOPIC = f"{ACCOUNT}/topics/[^/]+"
TOPIC_TABLE = f"({TOPIC}/table|{ACCOUNT}/tables/[^/]+)"
DELTA = f"(tables/[^/]+|{TOPIC_TABLE})"
FLOW = "pipeline/checkpoints/[^/]+/[^/]+"
KINDS = (
    Kind("polybus.json"),
    Kind("journal/floor.json", ("remove",), "the next start writes it again"),
    Kind(r"journal/\d+\.arrows"),
    Kind(r"journal/\d+\.index", ("remove",), "the next start makes it again from the segment"),
    Kind(f"{ACCOUNT}/account.json"),
    Kind(f"{ACCOUNT}/config.toml"),
    Kind(f"{ACCOUNT}/config-seen.json", ("remove",), "the next start writes it again"),
    Kind(f"{TOPIC}/(topic|manifest).json"),
    Kind(f"{TOPIC}/history/.*[.]parquet"),
    Kind(f"{TOPIC_TABLE}/date=.*[.]parquet"),
    Kind(f"{ACCOUNT}/blobs/[^/]+/(content|sums|[0-9-]+)"),
    Kind(r"trash/\d+/topic.json"),
    Kind(rf"{DELTA}/_delta_log/\d+\.(json|checkpoint\.parquet)"),
    Kind(r"tables/[^/]+/([^_][^/]*/)*[^_/][^/]*\.parquet"),
    Kind(r"tables/[^/]+/_change_data/.*\.parquet", ("remove",), "upkeep removes it, too"),
    Kind("pipeline/replay/part.json", ("remove",), "nothing else tells that it was there"),
    Kind("pipeline/checkpoints/[^/]+/.reset.json", ("remove",), "likewise"),
    Kind("pipeline/standard-(aside|stopped).json", ("remove",), "likewise"),
    Kind("pipeline/standard-(settings|watch).json", ("remove",), "it is written again"),
    Kind("pipeline/settings.json", ("remove",), "the next start of the bus writes it again"),
    Kind(f"{FLOW}/(flow|view).json", ("remove",), "the next start or batch writes it again"),
    Kind(f"{DELTA}/_newest", ("remove",), "the next version writes it again"),
    Kind(rf"{FLOW}/offsets/\d+", ("flip",), "Spark writes it without a checksum"),
    Kind(rf"{FLOW}/commits/\d+", ("flip", "remove"), "likewise; without one a batch is repeated"),
    Kind(f"{FLOW}/metadata", ("flip",), "likewise"),
    # What `verify` does not name, or not always.
    Kind("state.db", ("flip",), "SQLite has bytes without a use; the rows have checksums"),
    Kind("state.db-wal", ("flip", "remove"), "likewise; it may be without a save"),
    Kind("state.db-shm", CORRUPTIONS, "SQLite makes it again"),
    Kind(f"{DELTA}/_delta_log/_last_checkpoint", CORRUPTIONS, "without it all versions are read"),
    Kind(f"{ACCOUNT}/account.exists", CORRUPTIONS, "account.json beside it is there"),
    Kind(
        "admin.token",
        CORRUPTIONS,
        "one that is damaged is another token, and the start replaces it",
    ),
    Kind("run.json", CORRUPTIONS, "the next start writes it"),
    Kind("pipeline/status.json", CORRUPTIONS, "the pipeline writes it every second"),
    Kind(
        "pipeline/errors.json", CORRUPTIONS, "polybus up writes it, and only the console shows it"
    ),
    Kind("pipeline/spark.log.*", CORRUPTIONS, "a text for people"),
    Kind("(pipeline/|pipeline/replay/|history[.])?(lock|queue)", CORRUPTIONS, "it has no content"),
    Kind("staging/.*", CORRUPTIONS, "nothing is promised of it; a commit that needs it is refused"),
    Kind(
        f"{TOPIC}/scratch/.*|{DELTA}/_staging/.*",
        CORRUPTIONS,
        "it is on its way out, or not in yet",
    ),
)


def kind_of(name: str) -> Kind | None:
    return next((one for one in KINDS if re.fullmatch(one.pattern, name)), None)


class Client:
    """Requests of the administrator."""

    def __init__(self, bus: RunningBus) -> None:
        self._bus = bus

    def ask(self, method: str, path: str, body: bytes | Any = b"") -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        token = admin_token_path(self._bus.data).read_text().strip()
        kind = "application/octet-stream" if body is content else "application/json"
        headers = {"authorization": f"Bearer {token}", "content-type": kind}
        request = urllib.request.Request(
            f"{self._bus.url}{path}", data=content or None, headers=headers, method=method
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read() or b"null")


def fill(bus: RunningBus) -> None:
    client = Client(bus)
    client.ask("POST", "/v1/accounts", {"name": "shop", "password": "a long password"})
    client.ask("PUT", "/v1/accounts/default/password", {"password": "another password"})
    client.ask("PUT", "/v1/topics/news/blob", b"large" * 100_000)
    client.ask("POST", "/v1/sessions", {"topics": ["news"], "from": "earliest"})
    epoch = client.ask("GET", "/v1/topics/news")["epoch"]
    positions = {"news": {"epoch": epoch, "offset": 1}}
    client.ask("PUT", "/v1/consumers/reader", {"positions": positions})
    (bus.data / "accounts" / "shop" / "config.toml").write_text("[limits]\ntopics-max = 50\n")
    (bus.data / "staging" / "loader").mkdir(parents=True)
    (bus.data / "staging" / "loader" / "0-00000000.arrows").write_bytes(b"staged")
    eventually(lambda: (bus.data / "accounts" / "shop" / "config-seen.json").exists())


def note(path: Path, content: msgspec.Struct) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checked_json.encode(content))


def write_pipeline(data: Path) -> None:
    """What a pipeline leaves: notes, also those of a moment, a checkpoint and tables."""
    folder = data / "pipeline"
    topic = StoppedTopic(1, 27, "pipeline.expectation: 1 of 2", {"none": "false"}, "w", 3)
    stopped.write(data, {"news": topic})
    PoisonMessages("w", 3, (PoisonRange(("t", 1, 27), ("t", 1, 29), "cannot be processed"),)).save(
        data
    )
    note(folder / batches.SETTINGS_FILE, PipelineSettings(pipeline=Pipeline(ids_max=27)))
    note(folder / watch.STATE_FILE, watch.WatchState("query", 3))
    write_errors(data, 1, ["a line of standard error"])
    note(folder / "replay/part.json", PublishedPart("query", 3, "3.arrows", [("t", 1, 27)]))
    (folder / "replay" / "lock").touch()
    (folder / "spark.log").write_text("a text of Spark")
    service.write_status(data, "stopped")
    shop = checkpoints_of(data, "shop")
    note(shop / reset.FILE, Reset(frozenset(["flow"]), frozenset(["orders"])))
    note(shop / "sums" / view_flow.FILE, ViewMetadata(0, "digest", "identity", 27))
    fingerprint = Fingerprint(flow="a", target="clean", sources=("t",), state=(), columns={})
    note(shop / "clean" / changes.FILE, fingerprint)
    clean = Checkpoint(shop / "clean")
    clean.create_query_id()
    offset = {"group": "", "topics": {"news": {"epoch": 1, "offset": 42}}}
    for number in range(3):
        plan = f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(offset)}'
        for name, content in (("offsets", plan), ("commits", 'v1\n{"nextBatchWatermarkMs":0}')):
            (clean.path / name).mkdir(exist_ok=True)
            (clean.path / name / str(number)).write_text(content)
    own = open_table(data, "own")
    for number in range(3):
        own.append(pa.table({"number": [number]}), writer="w", batch_id=number)
        if number == 1:
            checkpoint(own)
    traffic = gold.traffic_table(data)
    for number in range(2):
        rows = {"topic": ["t"], "protocol": ["goms"], "sender": ["s"], "bytes": [number]}
        times = pa.array([NOON], pa.timestamp("us", "UTC"))
        facts = gold.facts_of(pa.table({**rows, "timestamp": times}))
        traffic.add(gold.traffic_of(facts, number), writer="w", batch_id=number)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """What a bus and its pipelines leave when both are killed."""
    settings = {"limits": {"inline-bytes-max": 4096}, "journal": JOURNAL}
    with running_bus(tmp_path, ["news", "a b"], settings) as bus:
        fill(bus)
        for topic in ("news", "a b"):
            bus.publish(topic, [f"{number} {'x' * 200}" for number in range(100)])
        history = bus.data / "accounts" / "default" / "topics"
        eventually(lambda: list(history.glob("news/history/*/*.parquet")))
        eventually(lambda: list(history.glob("a%20b/history/*/*.parquet")))
        for topic in ("news", "a b"):
            exposed.expose(bus.data, topic)
        # The journal alone has what comes now, so the proof of a deletion stays, too.
        bus.reconfigure(journal={})
        bus.publish("news", ["the last"])
        Client(bus).ask("POST", "/v1/topics", {"name": "gone"})
        bus.publish("gone", ["1"])
        Client(bus).ask("DELETE", "/v1/topics/gone")
        bus.kill()
    write_pipeline(bus.data)
    yield bus.data


def corrupted(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """What is left of a file, None if nothing, with the name of the corruption."""
    for place in PLACES if content else ():
        flipped = bytearray(content)
        flipped[int(place * len(content))] ^= 4
        yield "flip", bytes(flipped)
    if content:
        yield "cut", content[: len(content) * 2 // 3]
        start = len(content) // 2
        zeros = content[:start] + bytes(ZEROS) + content[start + ZEROS :]
        if zeros != content:
            yield "zero", zeros[: len(content)]
    yield "remove", None


def names(report: VerifyReport, whole: VerifyReport, path: Path) -> bool:
    """Whether a report has the file, or its folder, and that of the whole does not."""
    told = {*map(str, report.damages), *report.notes} - {*map(str, whole.damages), *whole.notes}
    name = "state.db" if path.name.startswith("state.db") else path.name.replace(".index", "")
    return any(name in one or path.parent.name in one for one in told)


def sizes(data: Path) -> dict[str, list[Path]]:
    """The files of each kind, which is the name without numbers."""
    found: dict[str, list[Path]] = {}
    for path in sorted(data.rglob("*")):
        if path.is_file():
            name = path.relative_to(data).as_posix()
            found.setdefault(re.sub(r"[0-9a-f-]*\d[0-9a-f-]*", "N", name), []).append(path)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kind_of_file_is_checked_or_said_not_to_be(data: Path) -> None:
    whole = verify(data)
    assert whole.intact
    wrong, met = [], set()
    for paths in sizes(data).values():
        # The newest: older versions of a table may be alone in naming the others.
        path = max(paths, key=lambda one: (one.stat().st_size > 0, one.name))
        name = path.relative_to(data).as_posix()
        kind = kind_of(name)
        if kind is None:
            wrong.append(f"{name}: nobody has said what becomes of its damage")
            continue
        met.add(kind)
        content, status = path.read_bytes(), path.stat()
        for corruption, left in corrupted(content):
            # Not in place: a file may have another name.
            path.unlink()
            if left is not None:
                path.write_bytes(left)
            report = verify(data)
            if corruption not in kind.unnamed and not names(report, whole, path):
                wrong.append(f"{name}: {corruption} is not named: {report.damages} {report.notes}")
            path.unlink(missing_ok=True)
            path.write_bytes(content)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert wrong == []
    assert [one.pattern for one in KINDS if one not in met] == []
