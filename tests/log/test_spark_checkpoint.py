"""The files of a Spark checkpoint: what may be missing, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from polybus.log.spark_checkpoint import CheckpointFiles


def checkpoint_with(path: Path, plans: set[int], commits: set[int]) -> CheckpointFiles:
    for folder, numbers in (("offsets", plans), ("commits", commits)):
        (path / folder).mkdir()
        for number in numbers:
            (path / folder / str(number)).write_text("v1\n{}\n")
    (path / "metadata").write_text('{"id":"1"}')
    return CheckpointFiles(path)


@pytest.mark.parametrize(
    ("plans", "commits", "missing"),
    [
        (set(), set(), []),
        ({0}, set(), []),
        ({3, 4, 5}, {3, 4}, []),
        ({3, 4, 5}, {4, 5}, []),
        # Spark removes old plans before old commits, and may be killed in between.
        (set(range(101, 201)), set(range(100, 201)), []),
        (set(range(103, 201)), set(range(100, 200)), []),
        ({3, 5}, {3, 4, 5}, ["offsets/4"]),
        ({3, 4, 5}, {3, 5}, ["commits/4"]),
        ({3, 4}, {3, 5}, ["commits/4", "offsets/5"]),
        ({5, 7}, set(), ["offsets/6"]),
        (set(), {1, 3}, ["commits/2", "offsets/1", "offsets/2", "offsets/3"]),
    ],
)
def test_a_gap_between_batches_is_damage(
    plans: set[int], commits: set[int], missing: list[str], tmp_path: Path
) -> None:
    damages = checkpoint_with(tmp_path, plans, commits).damages()
    assert sorted(str(path.relative_to(tmp_path)) for path, _ in damages) == missing


@pytest.mark.parametrize("content", [b"", b"v1\n", b"v1\n{", b"\0\0\0"])
def test_a_plan_that_is_cut_or_zeroed_is_damaged(content: bytes, tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, {0}, set())
    checkpoint.plan(0).write_bytes(content)
    assert [path for path, _ in checkpoint.damages()] == [checkpoint.plan(0)]


def test_a_checkpoint_without_its_metadata_is_damaged(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(tmp_path, {0}, {0})
    checkpoint.metadata.unlink()
    assert [path for path, _ in checkpoint.damages()] == [checkpoint.metadata]
