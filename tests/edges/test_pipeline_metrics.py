"""The metrics of the bus have the expectations of the pipeline, which is another process."""

from __future__ import annotations

from pathlib import Path

from http_kit import http_bus

STATUS = """{"state": "running", "time": "now", "flows": [{"pipeline": "standard", "flow": "decode",
"state": "running", "expectations": [{"topic": "orders", "name": "has a \\"price\\"",
"consequence": "expect", "passed": 7, "failed": 2}]}]}"""


async def test_expectations_of_the_pipeline_are_metrics(tmp_path: Path) -> None:
    async with http_bus("orders", data=str(tmp_path)) as http:
        name = "polybus_pipeline_expectation_rows_total"
        assert f"{name}{{" not in (await http.client.get("/metrics")).text
        (tmp_path / "pipeline" / "status.json").write_text(STATUS)
        text = (await http.client.get("/metrics")).text
        about = r'flow="standard.decode",topic="orders",expectation="has a \"price\""'
        assert f'{name}{{{about},result="passed"}} 7\n' in text
        assert f'{name}{{{about},result="failed"}} 2\n' in text
        (tmp_path / "pipeline" / "status.json").write_text('{"flows": 5}')
        assert f"{name}{{" not in (await http.client.get("/metrics")).text
