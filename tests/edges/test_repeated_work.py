"""Background tasks of services continue after a failing disk, and do not fill the log."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
from commit_kit import Producer
from http_kit import http_bus

from polybus.errors import PolybusError, StorageError, UsageError
from polybus.log.blobs import blobs_folder
from polybus.log.reading import reader
from polybus.services.repeating import RepeatedWork


def warnings_of(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """Also those of asyncio about tasks that ended with an exception."""
    gc.collect()
    return [one.getMessage() for one in caplog.records if one.name in (name, "asyncio")]


async def test_failures_in_a_row_are_one_line_and_their_end_is_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    work = RepeatedWork(logging.getLogger("polybus.test"), "it is late")

    async def done(error: Exception | None = None) -> None:
        if error is not None:
            raise error

    assert await work.attempt(done())
    failures = [OSError("a"), StorageError("log.failed", "b"), UsageError("topic.unknown", "c")]
    for error in failures:
        assert not await work.attempt(done(error))
    assert await work.attempt(done()) and await work.attempt(done())
    assert warnings_of(caplog, "polybus.test") == [
        "it is late; the bus tries again: a",
        "succeeded again after: it is late",
    ]
    with pytest.raises(ValueError, match="a bug"):
        await work.attempt(done(ValueError("a bug")))


async def test_a_sweep_of_blobs_that_cannot_read_the_folder_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"data": str(tmp_path), "journal": {"handover-interval-s": 0.02}}
    async with http_bus("news", **settings) as http:
        assert (await http.client.put("/v1/topics/news/blob", content=b"x")).status_code == 200
    failures = 0

    def fail(data: Path) -> None:
        nonlocal failures
        failures += 1
        raise OSError(5, "Input/output error")

    async with http_bus("news", **settings) as http:
        await http.node.services.blobs.swept()
        with monkeypatch.context() as patch:
            patch.setattr(reader, "read_data_metadata", fail)
            http.node.bus.delete_topic("news")
            await http.until(lambda: failures >= 3)
            await http.node.services.blobs.swept()
            [said] = warnings_of(caplog, "polybus.blobs")
            assert "polybus.json: Input/output error" in said
        await http.until(lambda: list(blobs_folder(tmp_path, "default").iterdir()) == [])


@pytest.mark.parametrize(
    "error", [StorageError("log.damaged", "news"), UsageError("topic.unknown", "news")]
)
async def test_producers_are_saved_when_their_topic_can_be_read_again(
    error: PolybusError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polybus.services.transactions.transactions.TICK_S", 0.01)
    async with http_bus("red") as http:
        log, transactions = http.node.bus.log, http.node.services.transactions
        real, failures = log.bounds, 0

        def bounds(topic: str) -> Any:
            nonlocal failures
            if topic == "$commits":
                failures += 1
                raise error.copy()
            return real(topic)

        with monkeypatch.context() as patch:
            patch.setattr(log, "bounds", bounds)
            await http.until(lambda: failures >= 3)
            assert len(warnings_of(caplog, "polybus.commits")) == 1
        await Producer(http, "up").done(0, {"red": [b"1"]})
        end = real("$commits")
        await http.until(lambda: transactions._saved == (end.epoch, end.stop))
