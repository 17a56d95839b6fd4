"""The Spark programs of the pages run as they are written, in one session.

First docs/howto/spark.md in its order, then the others, with the shell commands between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs_kit import run_by
from spark_kit import environment, running_bus
from warm_kit import WARM_SPARK

PAGE = "docs/howto/spark.md"
# The last one sends code to the workers of the session.
OTHERS = (
    "README.md",
    *(f"docs/howto/{name}.md" for name in ("tables", "standard-pipeline", "sql")),
    *(f"docs/howto/{name}.md" for name in ("large-payloads", "monitor", "up")),
)
TOPICS = (
    *("orders", "payments", "totals", "shouted", "counts", "per-minute"),
    *("large", "films", "demo.orders"),
)
DEAR = b'{"customer": "acme", "at": "2026-01-31T12:30:00Z", "total": 1500}'
JOB = "run: whole job"
# Runs each block of the page in one program, then the whole job once more after new orders, then
# the blocks of other pages. What a block left running has done its work before the next.
FOLLOW = """
import json, subprocess, sys
blocks, job, more, others = json.loads(sys.argv[1])
names = {}
for block in blocks:
    exec(compile(block, "spark.md", "exec"), names)
exec(compile(job, "spark.md", "exec"), names)
subprocess.run(more, check=True)
exec(compile(job, "spark.md", "exec"), names)
for place, kind, text in others:
    print(place, flush=True)
    if kind == "sh":
        subprocess.run(["bash", "-e", "-c", text], check=True)
    else:
        exec(compile(text, place, "exec"), names)
    for query in names["spark"].streams.active:
        query.processAllAvailable()
        query.stop()

def values(topic):
    rows = names["spark"].read.format("polybus").option("subscribe", topic).load()
    return [bytes(row.value).decode() for row in rows.orderBy("offset").collect()]

print(json.dumps([values("per-minute"), values("large"), names["silver"].read().num_rows]))
"""


def orders(*times: str) -> list[bytes]:
    return [json.dumps({"customer": "acme", "at": f"2026-01-31T{at}Z"}).encode() for at in times]


@pytest.mark.slow
def test_whoever_follows_the_page_gets_results_and_a_job_that_goes_on(tmp_path: Path) -> None:
    with running_bus(tmp_path, TOPICS) as bus:
        (tmp_path / "polybus-data").symlink_to(bus.data)
        bus.publish("orders", [*orders("12:00:05", "12:00:30", "12:01:10"), DEAR])
        bus.publish("films", [bytes(2 << 20)])
        blocks = run_by("spark/test_docs_spark.py", PAGE)
        job = next(block.text for block in blocks if block.mark == JOB)
        before = [block.text for block in blocks if block.mark != JOB]
        others = [
            (f"{page}:{block.line}", block.kind, block.text)
            for page in OTHERS
            for block in run_by("spark/test_docs_spark.py", page)
        ]
        late, next_one = orders("12:00:59", "13:00:00")
        send = [sys.executable, "-m", "polybus.cli", "publish", "orders", "--lines", "--receipt"]
        (tmp_path / "more.jsonl").write_bytes(late + b"\n" + next_one + b"\n")
        send += ["--file", str(tmp_path / "more.jsonl"), "--url", f"boson://127.0.0.1:{bus.port}"]
        done = subprocess.run(
            [sys.executable, "-c", WARM_SPARK + FOLLOW, json.dumps([before, job, send, others])],
            cwd=tmp_path,
            env=environment(
                PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", POLYBUS_URL=bus.url
            ),
            capture_output=True,
            text=True,
            timeout=220,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        minutes, large, silver_count = json.loads(done.stdout.splitlines()[-1])
        assert large == [DEAR.decode()] and silver_count == 6
        results = [json.loads(text) for text in minutes]
        # The late order of 12:00 is left out, each minute comes once, the last one is not over.
        assert sorted((row["start"][11:16], row["orders"]) for row in results) == [
            ("12:00", 2),
            ("12:01", 1),
            ("12:30", 1),
        ]
