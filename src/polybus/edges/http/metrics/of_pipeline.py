"""The pipeline's figures among the metrics of the bus: how often its expectations were met.

The pipeline is another process. It writes its status each second to DATA/pipeline/status.json; the
figures of one that has ended stay until the next one starts.
"""

from pathlib import Path

import msgspec

from polybus.edges.http.metrics.of_process import Family, Sample
from polybus.structs import decode

PATH = "pipeline/status.json"


class CountedExpectation(msgspec.Struct):
    """One expectation in the status of a flow."""

    topic: str = ""
    name: str = ""
    passed: int = 0
    failed: int = 0


class CountedFlow(msgspec.Struct):
    """The fields of a flow that are read."""

    pipeline: str = ""
    flow: str = ""
    expectations: list[CountedExpectation] = []


class _Status(msgspec.Struct):
    flows: list[CountedFlow] = []


def pipeline_families(data: Path) -> list[Family]:
    """The metrics of the pipeline. May block: call it on a thread."""
    samples: list[Sample] = [
        (
            {
                "flow": f"{flow.pipeline}.{flow.flow}",
                "topic": one.topic,
                "expectation": one.name,
                "result": result,
            },
            float(count),
        )
        for flow in _read_flows(data)
        for one in flow.expectations
        for result, count in (("passed", one.passed), ("failed", one.failed))
    ]
    text = "Rows that met an expectation of the pipeline, or did not, since it started."
    return [("polybus_pipeline_expectation_rows_total", "counter", text, samples)]


def _read_flows(data: Path) -> list[CountedFlow]:
    """The flows in the last status; none without one."""
    try:
        return decode((data / PATH).read_bytes(), _Status).flows
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []
