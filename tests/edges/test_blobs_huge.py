"""A payload of more than 2 GiB over HTTP: no length and no position is a C int."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from http_kit import http_bus

from polybus.log.blobs import CONTENT, blobs_folder
from polybus.services.blobs.unfinished import UploadId
from polybus.services.blobs.uploads import Uploader

BEGUN = (2 << 30) + 5
MEBI = 1 << 20
REST = os.urandom(3 * MEBI)


def begin(data: Path, sha256: str) -> None:
    """Leave what an upload that was interrupted has left."""
    folder = blobs_folder(data, "default") / UploadId(Uploader(), "news", sha256).folder
    folder.mkdir(parents=True)
    with open(folder / CONTENT, "wb") as file:
        file.truncate(BEGUN)


@pytest.mark.slow
async def test_a_payload_of_more_than_two_gib_is_published_and_read_in_ranges(
    tmp_path: Path,
) -> None:
    """Its first 2 GiB have arrived before, as zeros: a sparse file, which takes no disk."""
    digest = hashlib.sha256()
    for _ in range(BEGUN // MEBI):
        digest.update(bytes(MEBI))
    digest.update(bytes(BEGUN % MEBI) + REST)
    sha256 = digest.hexdigest()
    begin(tmp_path, sha256)
    connectors = [{"protocol": "tcp", "port": 0, "speaks": "http"}]
    limits = {"message-bytes-max": 3 << 30}
    async with http_bus("news", data=str(tmp_path), connectors=connectors, limits=limits) as http:
        client, path = http.client, "/v1/topics/news/blob"
        arrived = await client.get(path, params={"sha256": sha256})
        assert arrived.json() == {"bytes": BEGUN}
        params: dict[str, str | int] = {"sha256": sha256, "from": BEGUN}
        stored = await client.put(path, params=params, content=REST, timeout=120)
        assert stored.status_code == 200, stored.text
        size = BEGUN + len(REST)
        [message] = (await client.get("/v1/topics/news/messages")).json()["messages"]
        assert (message["reference"]["id"], message["reference"]["size"]) == (sha256, size)
        url = f"/v1/blobs/{sha256}"
        assert (await client.head(url)).headers["content-length"] == str(size)
        ranges = {
            f"bytes={BEGUN}-{BEGUN + 99}": REST[:100],
            f"bytes={BEGUN - 4}-{BEGUN + 3}": bytes(4) + REST[:4],
            "bytes=-10": REST[-10:],
            f"bytes={size - 2 * MEBI}-": REST[-2 * MEBI :],
        }
        for wanted, content in ranges.items():
            answer = await client.get(url, headers={"range": wanted})
            assert (answer.status_code, answer.content) == (206, content)
