"""The data folder of a node over Kafka is not taken for that of a bus in files; no broker runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from polybus.cli import main
from polybus.errors import ConfigError, StorageError
from polybus.log.cluster_location import NAME, ClusterLocation, read_location, write_location
from polybus.testing import run_bus

PLACE = ClusterLocation(log="kafka://127.0.0.1:2", prefix="shop.")


def content(data: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in data.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "command",
    [
        ["topics", "list", "--data", "{data}"],
        ["topics", "create", "t", "--data", "{data}"],
        ["topics", "consumers", "--data", "{data}"],
        ["serve", "--port", "0", "--data", "{data}"],
        ["migrate", "--from", "{data}", "--to", "kafka://127.0.0.1:1"],
        ["migrate", "--from", "kafka://127.0.0.1:1", "--to", "{data}"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_a_command_without_the_settings_of_the_node_refuses_its_folder_and_changes_nothing(
    command: list[str], tmp_path: Path
) -> None:
    write_location(tmp_path, PLACE)
    before = content(tmp_path)
    ended = CliRunner().invoke(main, [word.format(data=tmp_path) for word in command])
    assert ended.exit_code == 2, ended.output
    assert "config.log" in ended.output
    for advice in (str(PLACE), "--config", "--data", NAME):
        assert advice in ended.output
    assert content(tmp_path) == before


async def test_a_bus_in_files_begins_in_the_folder_of_a_node_once_its_note_is_removed(
    tmp_path: Path,
) -> None:
    write_location(tmp_path, PLACE)
    with pytest.raises(ConfigError):
        async with run_bus("t", data=str(tmp_path)):
            pass
    (tmp_path / NAME).unlink()
    async with run_bus("t", data=str(tmp_path)) as node:
        assert "t" in node.bus.log.topics()


def test_a_note_that_cannot_be_read_is_an_error_and_not_a_folder_without_one(
    tmp_path: Path,
) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(StorageError):
        read_location(tmp_path)
    (tmp_path / NAME).rmdir()
    assert read_location(tmp_path) is None
    (tmp_path / NAME).write_text("{}")
    with pytest.raises(StorageError) as damaged:
        read_location(tmp_path)
    assert damaged.value.code == "log.damaged"
