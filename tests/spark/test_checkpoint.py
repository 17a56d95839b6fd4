"""What a checkpoint says, from files such as Spark writes; no Spark needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from log_kit import opened_log
from topics_kit import hand_over, publish

from polybus.batch import Batch
from polybus.log.reading.reader import LogReader
from polybus.spark.checkpoint import Checkpoint, local_checkpoint
from polybus.spark.pipelines.flows import FlowProgress
from polybus.spark.pipelines.lag import LogEnds
from polybus.spark.pipelines.standard.planned import BatchPlans, PlannedRows


def write_plan(folder: Path, batch: int, **topics: tuple[int, int]) -> None:
    """Write what Spark does before a batch; `S` stands for `$` in a topic's name."""
    (folder / "offsets").mkdir(parents=True, exist_ok=True)
    ends = {
        name.replace("S", "$"): {"epoch": epoch, "offset": offset}
        for name, (epoch, offset) in topics.items()
    }
    text = json.dumps({"group": "standard", "topics": ends})
    (folder / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{text}")


def test_the_messages_of_a_batch_are_counted_from_two_plans(tmp_path: Path) -> None:
    write_plan(tmp_path, 0, a=(1, 10))
    write_plan(tmp_path, 1, a=(1, 12), b=(1, 5))
    write_plan(tmp_path, 2, a=(1, 12), b=(1, 8), Sevents=(1, 0))
    write_plan(tmp_path, 3, a=(1, 13), b=(1, 8), Sevents=(1, 4))
    write_plan(tmp_path, 4, a=(2, 15), b=(1, 8), Sevents=(1, 4))
    plans = BatchPlans(tmp_path / "no log", Checkpoint(tmp_path))
    assert plans.of(0) == PlannedRows(10, 0)
    assert plans.of(1) == PlannedRows(7, 0), "a new topic may begin anywhere, at the latest at 0"
    assert plans.of(3) == PlannedRows(messages=1, events=4)
    assert plans.of(4) == PlannedRows(15, 0), "a topic was recreated"
    assert plans.of(5) == PlannedRows()


def test_a_batch_is_small_only_if_its_messages_are(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "checkpoint"
    publish(data, "a", [b"x" * 1000] * 20)
    publish(data, "b", [b"y" * (5 << 20)])
    epochs = {topic: LogReader(data).bounds(topic).epoch for topic in "ab"}
    write_plan(folder, 0, a=(epochs["a"], 10), b=(epochs["b"], 0))
    write_plan(folder, 1, a=(epochs["a"], 20), b=(epochs["b"], 0))
    write_plan(folder, 2, a=(epochs["a"], 20), b=(epochs["b"], 1))
    plans = BatchPlans(data, Checkpoint(folder))
    first, second, third = (plans.of(number) for number in range(3))
    assert first.is_small and second.is_small and third.is_one_task and not third.is_small
    assert second.bytes_max is not None and second.bytes_max >= 10 * 1000
    assert third.bytes_max is not None and third.bytes_max >= 5 << 20
    hand_over(data)
    later = BatchPlans(data, Checkpoint(folder)).of(1)
    assert later.bytes_max is None and not later.is_small, "history is compressed"


def test_a_batch_is_unfinished_until_it_has_a_commit(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.unfinished_batch() is None and not checkpoint.has_batches()
    write_plan(tmp_path, 0, a=(1, 10))
    assert checkpoint.unfinished_batch() == 0 and checkpoint.has_batches()
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").touch()
    assert checkpoint.unfinished_batch() is None


def test_a_flow_that_fails_in_its_first_batch_lags_by_all_messages(tmp_path: Path) -> None:
    log = opened_log(tmp_path / "data", lambda: 1)
    for topic in ("a", "b"):
        log.create_topic(topic)
        log.append(Batch.of(topic, [b"x"] * 5))
    log.close()
    (tmp_path / "commits").mkdir()
    write_plan(tmp_path, 0, a=(1, 2), b=(1, 5))
    failed, later = FlowProgress(), FlowProgress()
    ends = LogEnds(tmp_path / "data")
    ends.look(("a", "b"))
    failed.take_begun(Checkpoint(tmp_path))
    failed.update_lag(ends)
    assert failed.lag == 10, "the batch has not been processed"
    (tmp_path / "commits" / "0").touch()
    write_plan(tmp_path, 1, a=(1, 4), b=(1, 5))
    later.take_begun(Checkpoint(tmp_path))
    later.update_lag(ends)
    assert later.lag == 3


def test_the_query_id_is_created_once(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "new")
    with pytest.raises(FileNotFoundError):
        checkpoint.query_id()
    created = checkpoint.create_query_id()
    assert checkpoint.create_query_id() == checkpoint.query_id() == created
    (tmp_path / "new" / "metadata").write_text("{")
    with pytest.raises(ValueError, match="metadata is damaged"):
        checkpoint.create_query_id()


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/a/b", Path("/a/b")),
        ("file:/a/b%20c", Path("/a/b c")),
        ("file:///a/b", Path("/a/b")),
        ("hdfs://host/a", None),
        ("s3a://bucket/a", None),
        (None, None),
    ],
)
def test_only_checkpoints_on_this_disk_are_synced(location: str | None, path: Path | None) -> None:
    found = local_checkpoint(location)
    assert (found and found.path) == path
