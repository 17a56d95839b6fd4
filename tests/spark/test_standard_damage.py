"""Which topics the standard pipeline must do without, found in the log itself; no Spark needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from source_kit import WrittenLog, written_log

from polybus.lake.table import open_table
from polybus.spark.pipelines.standard import damage

WRITER = "standard.decode:test"


@pytest.fixture
def written(tmp_path: Path) -> Iterator[WrittenLog]:
    with written_log(tmp_path / "data") as log:
        log.create("red", "blue", "green")
        for topic in ("red", "blue"):
            log.append(topic, 5)
        yield log


def plan(written: WrittenLog, checkpoint: Path, batch_id: int) -> None:
    """Write down what Spark does before a batch that reads all there is."""
    found = {topic: written.log.bounds(topic) for topic in ("red", "blue", "green")}
    places = {topic: {"epoch": one.epoch, "offset": one.stop} for topic, one in found.items()}
    path = checkpoint / "offsets" / str(batch_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"v1\n{{}}\n{json.dumps({'group': '', 'topics': places})}")


def source(written: WrittenLog) -> dict[str, str]:
    return {"data": str(written.data), "subscribePattern": ".*", "failOnDataLoss": "false"}


def test_a_damaged_history_file_is_found_with_its_topic_where_the_batch_reads_it(
    written: WrittenLog, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    plan(written, checkpoint, 0)
    written.hand_over()
    (file,) = written.data.rglob("red/history/**/*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    found = damage.damaged_topics(source(written), checkpoint)
    assert list(found) == ["red"]
    assert str(file) in found["red"] and "topic 'red'" in damage.warning(found)
    assert damage.has_any(checkpoint, found)
    # The next batch does not read that file.
    (checkpoint / "commits").mkdir()
    (checkpoint / "commits" / "0").touch()
    written.append("blue", 1)
    plan(written, checkpoint, 1)
    assert damage.damaged_topics(source(written), checkpoint) == {}
    assert not damage.has_any(checkpoint, ["red", "green"])
    assert damage.has_any(checkpoint, ["blue"])


def test_a_batch_of_which_a_table_has_something_is_not_planned_again(
    written: WrittenLog, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    plan(written, checkpoint, 0)
    rows = pa.table({"offset": [1]})
    open_table(written.data, "silver").append(rows, writer=WRITER, batch_id=0)
    tables = ("traffic", "silver")
    assert not damage.forget_batch(written.data, checkpoint, tables, WRITER)
    assert damage.planned(checkpoint, 0)
    # Where the file system keeps checksums, a plan cannot be written beside the one of an old plan.
    (checkpoint / "offsets" / ".0.crc").write_bytes(b"crc")
    assert damage.forget_batch(written.data, checkpoint, ("traffic",), WRITER)
    assert damage.planned(checkpoint, 0) == {}
    assert not list((checkpoint / "offsets").iterdir())
