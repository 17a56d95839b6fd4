"""Damage in the small files of pipelines is found, whichever bit it is, and costs what is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from polybus.cli.replay.once import OncePublisher, PublishedPart
from polybus.config import Config, Pipeline
from polybus.errors import StorageError
from polybus.lake import settings, stopped
from polybus.lake.settings import PipelineSettings
from polybus.lake.stopped import StoppedTopic
from polybus.lake.table import open_table
from polybus.log import checked_json
from polybus.log.verify.metadata import metadata_damages
from polybus.spark.pipelines.declared import changes, reset, view_flow
from polybus.spark.pipelines.declared.changes import Fingerprint
from polybus.spark.pipelines.declared.reset import Reset
from polybus.spark.pipelines.declared.view_flow import ViewMetadata
from polybus.spark.pipelines.standard import batches, poison
from polybus.spark.pipelines.standard.poison import PoisonMessages, PoisonRange

STOPPED = {"s": StoppedTopic(1, 27, "pipeline.expectation: 1 of 2", {"none": "false"}, "w", 3)}
ASIDE = PoisonMessages("w", 3, (PoisonRange(("t", 1, 27), ("t", 1, 29), "cannot be processed"),))
PART = PublishedPart("query", 3, "3-file.arrows", [("t", 1, 27)])
RESET = Reset(frozenset(["flow"]), frozenset(["orders", "news"]))
FLOW = Fingerprint(flow="a", target="clean", sources=("t",), state=(), columns={"n": "int"})
VIEW = ViewMetadata(0, "digest", "identity", 27)
SETTINGS = PipelineSettings(pipeline=Pipeline(ids_max=27))


class Note:
    """A file: how it is written and read, and what earlier versions wrote."""

    def __init__(
        self,
        path: str,
        content: Any,
        write: Callable[[Path], object],
        read: Callable[[Path], object],
        advice: str | None,
    ) -> None:
        self.path, self.content, self.write, self.read = path, content, write, read
        self.advice = advice
        """What the error says that can be done; None: the file is given up without one."""


def part_in(data: Path) -> object:
    """The part that the next run would finish."""
    found: list[PublishedPart] = []
    publisher = OncePublisher(data, data / "pipeline/part.json", lambda part: None)
    publisher._finish = found.append  # type: ignore[method-assign, assignment]
    publisher.finish_begun()
    return found[0]


def view_of(data: Path) -> object:
    table = open_table(data, "view")
    if not table.exists:
        table.append(pa.table({"n": [1]}), writer="view", batch_id=None)
    return view_flow.read_note(data / "pipeline", table)


def flow_of(data: Path) -> object:
    (data / "pipeline" / "offsets").mkdir(exist_ok=True)
    (data / "pipeline" / "offsets" / "0").touch()
    return changes.read_fingerprint(data / "pipeline")


def written(path: str, note: msgspec.Struct) -> Callable[[Path], object]:
    return lambda data: (data / path).write_bytes(checked_json.encode(note))


NOTES = [
    Note(
        stopped.PATH,
        STOPPED,
        lambda data: stopped.write(data, STOPPED),
        stopped.read,
        "restore it, or remove it and give up messages of stopped topics",
    ),
    Note(
        f"pipeline/{poison.FILE}",
        ASIDE,
        ASIDE.save,
        lambda data: poison.stored(data, "w", 3),
        "restore it, or remove it and give up messages that the last batch set aside",
    ),
    Note(
        f"pipeline/{batches.SETTINGS_FILE}",
        SETTINGS,
        written(f"pipeline/{batches.SETTINGS_FILE}", SETTINGS),
        batches._stored_settings,
        None,
    ),
    Note(
        settings.PATH,
        SETTINGS,
        lambda data: settings.write(data, Config(pipeline=SETTINGS.pipeline)),
        settings.read,
        "reload the bus (SIGHUP) to replace the file",
    ),
    Note(
        "pipeline/part.json",
        PART,
        written("pipeline/part.json", PART),
        part_in,
        "restore it, or remove it: dead letters of one part may then go out twice",
    ),
    Note(
        f"pipeline/{reset.FILE}",
        RESET,
        written(f"pipeline/{reset.FILE}", RESET),
        lambda data: reset.begun_reset(data / "pipeline"),
        "remove it and start over with --reset",
    ),
    Note(f"pipeline/{view_flow.FILE}", VIEW, written("pipeline/view.json", VIEW), view_of, None),
    Note(f"pipeline/{changes.FILE}", FLOW, written("pipeline/flow.json", FLOW), flow_of, None),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.path)
def test_a_flip_of_any_bit_is_found(note: Note, tmp_path: Path) -> None:
    path = tmp_path / note.path
    path.parent.mkdir()
    note.write(tmp_path)
    assert note.read(tmp_path) == note.content
    whole = path.read_bytes()
    corrupted = [whole[:cut] for cut in range(len(whole))]
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        corrupted.append(bytes(flipped))
    assert checked_json.problem(whole) is None
    for content in corrupted:
        assert checked_json.problem(content) is not None, content
        path.write_bytes(content)
        if note.advice is None:
            assert note.read(tmp_path) is None, content
        else:
            with pytest.raises(StorageError) as caught:
                note.read(tmp_path)
            assert str(path) in caught.value.text and note.advice in caught.value.text


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.path)
def test_a_file_of_an_earlier_version_is_read(note: Note, tmp_path: Path) -> None:
    path = tmp_path / note.path
    path.parent.mkdir()
    path.write_bytes(msgspec.json.encode(note.content))
    assert note.read(tmp_path) == note.content
    assert list(metadata_damages(tmp_path)) == []
