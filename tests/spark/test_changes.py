"""What a start of a pipeline notices of its checkpoints, without Spark."""

from __future__ import annotations

import shutil
from pathlib import Path

import changes_kit
import pytest

from polybus.errors import StorageError
from polybus.spark.pipelines.declared.registry import PipelineError
from polybus.spark.pipelines.declared.reset import FILE
from polybus.spark.pipelines.flows import checkpoints_of


def test_a_flow_is_refused_if_its_checkpoint_is_lost_and_the_table_has_its_rows(
    tmp_path: Path,
) -> None:
    changes_kit.start(tmp_path, flows=["a"])
    changes_kit.run_batch(tmp_path, "a")
    changes_kit.start(tmp_path)  # b is new: it may join
    changes_kit.run_batch(tmp_path, "b")
    shutil.rmtree(checkpoints_of(tmp_path, "shop") / "a")
    with pytest.raises(PipelineError, match="the checkpoint of flow a is missing"):
        changes_kit.start(tmp_path)
    changes_kit.start(tmp_path, reset=["a"])
    assert changes_kit.shown(tmp_path) == [[], []]
    changes_kit.run_batch(tmp_path, "b")
    changes_kit.start(tmp_path)  # a has no row since the reset


def test_a_reset_whose_note_is_damaged_is_not_forgotten(tmp_path: Path) -> None:
    changes_kit.start(tmp_path)
    (checkpoints_of(tmp_path, "shop") / FILE).write_bytes(b"{")
    with pytest.raises(StorageError, match="pipeline.storage"):
        changes_kit.start(tmp_path)
