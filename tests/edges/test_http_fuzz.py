"""The API, fuzzed from its own description: no 5xx, and every answer is one it describes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from pathlib import Path

import httpx
import pytest
from commit_kit import Producer
from http_kit import Http, http_bus

from polybus.batch import Batch
from polybus.edges.http.api.publish import RequestPublisher
from polybus.services.transactions.commits import TOPIC as RECORDS_TOPIC

EXAMPLES = 5
# Longer than a fetch may wait.
REQUEST_TIMEOUT_S = 70
# OpenAPI has no words for what else must hold of a request: a topic's name is printable, `from` is
# a position, and only one of `offset`, `time` and `from` is given.
UNDESCRIBED = "positive_data_acceptance"

REFUSALS = [400, 401, 403, 404, 405, 406, 409, 413, 414, 415, 422, 428, 429]


async def fuzz(port: int, folder: Path, parameters: dict[str, str], *options: str) -> None:
    # Under CI the same each time, as with hypothesis: a run there judges a change, while whoever
    # works on the API has new requests with each run.
    unless_told = "1" if os.environ.get("CI") else str(random.randrange(1 << 32))
    seed = os.environ.get("HTTP_FUZZ_SEED", unless_told)
    lines = [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in parameters.items()]
    config = folder / "schemathesis.toml"
    # Each wrong login is answered late.
    generation = ["[generation]", "with-security-parameters = false"]
    # 414 is as good a refusal as the others.
    refusals = ["[checks.negative_data_rejection]", f"expected-statuses = {REFUSALS}"]
    config.write_text("\n".join([*generation, *refusals, "[parameters]", *lines]))
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).parent / "st"), "--no-color", "--config-file", str(config)),
        *("run", f"http://127.0.0.1:{port}/openapi.json", "--seed", seed),
        *("--max-examples", str(EXAMPLES), "--exclude-checks", UNDESCRIBED, "--warnings", "off"),
        *("--request-timeout", str(REQUEST_TIMEOUT_S), *options),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    replay = f"play it again with HTTP_FUZZ_SEED={seed} pytest {Path(__file__).name}"
    assert process.returncode == 0, f"{output}\n{replay}"


async def publish_everywhere(http: Http) -> None:
    """Wake whoever waits for a message with `wait-s`."""
    producer = Producer(http, "ticks")
    batch = 0
    while True:
        for topic in http.node.bus.topics(system=True):
            if topic.name != RECORDS_TOPIC:
                publisher = RequestPublisher(http.node.http, "", http.node.accounts.admin)
                publisher.offer(Batch.of(topic.name, [b"tick"]), wait=False)
        # Nobody but a transaction writes there. A fuzzed request may end this connection, too.
        with contextlib.suppress(httpx.TransportError):
            await producer.done(batch)
            batch += 1
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("acquainted", [False, True])
async def test_no_request_is_answered_with_5xx_or_what_is_not_described(
    acquainted: bool, tmp_path: Path
) -> None:
    async with http_bus("news") as http:
        parameters: dict[str, str] = {}
        options = []
        key = await http.open_session("news")
        if acquainted:
            # A stranger's guesses end at 404; this one has a session and knows a topic.
            parameters |= {"path.key": key, "path.topic": "news"}
            # Requests without these names are the same for a stranger.
            options = ["--exclude-method", "DELETE", "--include-path-regex", r"\{(key|topic)\}"]
        publishing = asyncio.create_task(publish_everywhere(http))
        await fuzz(http.node.tcp_port, tmp_path, parameters, *options)
        assert not publishing.done()
        publishing.cancel()
        await asyncio.wait([publishing])

        assert (await http.client.get("/healthz")).status_code == 200
        if acquainted:
            assert any(pack[0][0] != "news" for pack in (await http.packs(key)).values())
