"""`polybus bench --blobs`: a payload through the bus, beside cp and nginx."""

from __future__ import annotations

from pathlib import Path

import pytest

from polybus.bench import blobs


@pytest.mark.slow
def test_a_payload_is_measured_in_both_directions_and_the_growth_of_the_bus(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    figures = blobs.run_blob_bench(tmp_path, size=2 << 20, rounds=1, tell=told.append)
    assert len(told) == blobs.run_count(1)
    found = {(figure.work.split()[0], figure.who): figure for figure in figures}
    for work in ("PUT", "GET"):
        assert (found[work, "polybus"].value or 0) > 0
        assert (work, "nginx") in found
    assert (found["PUT", "cp"].ratio or 0) > 0
    growth = found["growth,", "polybus"]
    assert growth.unit == "MiB" and growth.met
    assert list(tmp_path.iterdir()) == []
