"""The example pipelines, end to end on a real bus: the same files that users copy."""

from __future__ import annotations

import asyncio
import datetime
import importlib.util
import json
import shutil
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pipeline_kit import PipelineFolder, as_json
from spark_kit import eventually, running_bus

from polybus.client import connect
from polybus.lake.table import open_table
from polybus.spark.pipelines.flows import FlowRunner

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "pipelines"
TOPICS = ("shop.customers", "shop.orders", "telemetry", "device.alerts", "sales")


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def examples(spark: Any, tmp_path: Path) -> Iterator[PipelineFolder]:
    with running_bus(tmp_path, TOPICS) as bus:
        folder = PipelineFolder(spark, bus, tmp_path)
        shutil.copytree(EXAMPLES, folder.folder)
        yield folder


def utc(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(f"2026-03-01T{text}:00+00:00")


def test_orders_are_enriched_and_late_ones_counted_until_the_watermark(
    examples: PipelineFolder,
) -> None:
    sample = module_of(EXAMPLES / "orders" / "sample.py")
    examples.bus.publish("shop.customers", as_json(sample.customers()))
    examples.bus.publish("shop.orders", as_json(list(sample.orders(120))))
    examples.run("orders")
    country = {row["customer"]: row["country"] for row in sample.customers()}
    assert country["c5"] == "FI", "the sample has a customer who moved"
    expected = sorted(
        ((row["id"], country.get(row["customer"])) for row in sample.orders(120)), key=repr
    )
    assert examples.rows("orders.enriched", "id", "country") == expected

    # The newest order is of 9:59, so the watermark is at 9:49: the hour from 8 is given out.
    late = [sample.late_order(900, "2026-03-01T09:50:00Z")]
    too_late = [sample.late_order(901, "2026-03-01T08:10:00Z")]
    next_hour = list(sample.orders(20, first=200, hour=10))
    examples.bus.publish("shop.orders", as_json([*late, *too_late, *next_hour]))
    examples.run("orders")
    ids = {row[0] for row in examples.rows("orders.enriched", "id")}
    assert {900, 901, 219} <= ids, "what is late is kept"
    hours: dict[tuple[datetime.datetime, str | None], tuple[int, Decimal]] = {}
    for row in [*sample.orders(120), *late]:
        key = (utc(row["time"][11:13] + ":00"), country.get(row["customer"]))
        count, total = hours.get(key, (0, Decimal(0)))
        hours[key] = (count + 1, total + row["amount"])
    found = examples.rows("orders.revenue", "hour", "country", "orders", "revenue")
    assert found == sorted(((*key, *value) for key, value in hours.items()), key=repr)


def rows_of(runner: FlowRunner, flow: str) -> int | None:
    """How many rows a flow has taken; fails as soon as any flow does."""
    assert runner.failures == [], runner.failures
    return next(one.rows for one in runner.progress() if one.flow == flow)


def test_a_hot_device_gets_its_alert_on_boson(examples: PipelineFolder) -> None:
    sample = module_of(EXAMPLES / "telemetry" / "sample.py")
    hot = sample.readings("pump-2", [70.0, 85.0, 86.0])
    hotter = sample.readings("pump-2", [87.0, 88.0], minute=1)
    cool = sample.readings("pump-1", [40.0, 90.0, 41.0, 90.0])
    later = sample.readings("pump-1", [41.0], minute=9)

    async def alerts() -> list[dict[str, Any]]:
        async with connect(f"boson://127.0.0.1:{examples.bus.port}") as device:
            async for message in device.subscribe("device.alerts", start="earliest"):
                return [json.loads(message.value)]
        return []

    examples.bus.publish("telemetry", as_json([*hot, *cool]))
    runner = examples.start(examples.prepare("telemetry"), continuous=True)
    try:
        eventually(lambda: rows_of(runner, "hot_devices") == 7, timeout_s=120)
        # The third hot reading in a row comes in another batch: the count is in the state.
        examples.bus.publish("telemetry", as_json([*hotter, *later]))
        (alert,) = asyncio.run(asyncio.wait_for(alerts(), 60))
        assert (alert["device"], alert["celsius"], alert["alert"]) == ("pump-2", 87.0, "too hot")
        table = open_table(examples.bus.data, "telemetry.sessions")
        eventually(lambda: table.exists and table.rows == 3, timeout_s=60)
        assert runner.failures == [], runner.failures
    finally:
        assert runner.stop(30)
    assert examples.rows("telemetry.sessions", "device", "readings", "celsius_max") == [
        ("pump-1", 4, 90.0),
        ("pump-2", 2, 88.0),
        ("pump-2", 3, 86.0),
    ]
    topic = examples.spark.read.format("polybus").option("data", str(examples.bus.data))
    assert topic.option("subscribe", "device.alerts").load().count() == 1


def test_the_daily_report_has_a_chart_and_a_page(examples: PipelineFolder, tmp_path: Path) -> None:
    sample = module_of(EXAMPLES / "report" / "sample.py")
    examples.bus.publish("sales", as_json(sample.sales()))
    examples.run("report")
    expected: dict[tuple[datetime.date, str], tuple[int, Decimal]] = {}
    for row in sample.sales():
        key = (datetime.date.fromisoformat(row["time"][:10]), row["product"])
        pieces, revenue = expected.get(key, (0, Decimal(0)))
        expected[key] = (pieces + row["pieces"], revenue + row["pieces"] * row["price"])
    found = examples.rows("report.daily", "day", "product", "pieces", "revenue")
    assert found == sorted(((*key, *value) for key, value in expected.items()), key=repr)
    assert [row[1] for row in examples.rows("report.best", "day", "product")] == ["desk"] * 4
    report = module_of(EXAMPLES / "report" / "report.py")
    chart, page = report.write_report(examples.bus.data, tmp_path / "out")
    assert chart.read_text().count("<rect ") == len(expected)
    text = page.read_text()
    assert chart.read_text() in text
    assert text.count("<tr><td>") == len(expected)
