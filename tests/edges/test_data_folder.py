"""docs/data-folder.md names every file that a bus leaves, and nothing else."""

from __future__ import annotations

from pathlib import Path

from commit_kit import stage
from docs_kit import ROOT, documented_files, undocumented_files
from http_kit import http_bus
from log_kit import opened_log

from polybus.batch import Batch
from polybus.log.history.handover import compact


async def test_every_file_of_a_running_bus_is_documented(tmp_path: Path) -> None:
    async with http_bus("red", "gone", data=str(tmp_path)) as http:
        await http.open_session("red")
        await http.publish("red", b"1", b"2")
        stage(tmp_path, "spark", 0, {"red": [b"3"]})
        http.node.bus.delete_topic("gone")
        assert undocumented_files(tmp_path) == []
    assert undocumented_files(tmp_path) == []


def test_every_file_of_the_history_is_documented(tmp_path: Path) -> None:
    log = opened_log(tmp_path, lambda: 0)
    log.create_topic("red")
    log.append(Batch.of("red", [b"1", b"2"]))
    log.close()
    compact(tmp_path)
    assert list(tmp_path.rglob("*.parquet"))
    assert undocumented_files(tmp_path) == []


def test_an_undocumented_file_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "left.tmp").touch()
    assert undocumented_files(tmp_path) == ["journal/left.tmp"]


def test_every_documented_file_is_in_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    tables = ("files", "topic files", "table files")
    names = [pattern.rpartition("/")[2] for mark in tables for pattern in documented_files(mark)]
    literal = [one for one in names if "*" not in one]
    assert [one for one in literal if f'"{one}"' not in code and f'/{one}"' not in code] == []
