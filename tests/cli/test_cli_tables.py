"""`polybus tables`: old tables are converted, topics become tables, tables are listed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow as pa
from cli_kit import polybus, serve
from deltalake import DeltaTable
from old_tables_kit import lay_out_old_tables
from topics_kit import publish

from polybus import config_file
from polybus.cli import sql, tables, topics  # noqa: F401
from polybus.config import Config, DeclaredTopic
from polybus.lake import settings as pipeline_settings
from polybus.lake.table import open_table, table_names
from polybus.log import delta
from polybus.log.disk import FileLock


def test_a_verb_that_needs_the_library_of_tables_says_so(tmp_path: Path) -> None:
    missing = tmp_path / "deltalake.py"
    missing.write_text("raise ModuleNotFoundError('No module named deltalake', name='deltalake')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with serve(tmp_path / "data"):
        pass
    data = str(tmp_path / "data")
    for verb in (("tables", "migrate"), ("sql", "SELECT 1"), ("replay", "--dead-letters")):
        done = polybus(*verb, "--data", data, PYTHONPATH=path)
        assert done.returncode == 1 and b"polybus[sql]" in done.stderr, done.stderr


def test_the_command_in_the_error_converts_the_tables(tmp_path: Path) -> None:
    with serve(tmp_path, "orders"):
        pass
    lay_out_old_tables(tmp_path)
    query = ("sql", "SELECT count(*) AS n FROM silver", "--json", "--data", str(tmp_path))
    refused = polybus(*query)
    text = refused.stderr.decode()
    command = re.search(r"run: polybus (.*)", text)
    assert refused.returncode == 1 and "lake.old-format" in text and command is not None, text
    assert b"2 tables were converted" in polybus(*command[1].split()).stdout
    assert json.loads(polybus(*query).stdout) == [{"n": 6}]
    again = polybus("tables", "migrate", "--json", "--data", str(tmp_path))
    assert json.loads(again.stdout) == {"tables": []}


def test_a_topic_becomes_a_table_while_the_bus_runs(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path))
    with serve(tmp_path, "orders") as bus:
        sent = polybus("publish", "orders", "1", "--receipt", "--url", bus.url())
        assert sent.returncode == 0, sent.stderr
        made = json.loads(polybus("tables", "expose", "orders", "--json", *data).stdout)
    assert polybus("compact", *data).returncode == 0
    [row] = DeltaTable(made["folder"]).to_pyarrow_table().to_pylist()
    assert (row["topic"], row["value"]) == ("orders", b"1")
    [listed] = json.loads(polybus("tables", "list", "--json", *data).stdout)
    assert (listed["table"], listed["kind"], listed["rows"]) == ("orders", "topic", 1)
    shown = polybus("tables", "show", "orders", *data).stdout.decode()
    assert "version: 1" in shown and re.search(r"^offset +long$", shown, re.MULTILINE)
    unknown = polybus("tables", "show", "nothing", *data)
    assert unknown.returncode == 1 and b"lake.unknown" in unknown.stderr
    assert b"no longer a Delta table" in polybus("tables", "unexpose", "orders", *data).stdout
    assert json.loads(polybus("tables", "list", "--json", *data).stdout) == []


def test_a_schema_is_proposed_for_the_config(tmp_path: Path) -> None:
    publish(tmp_path, "orders", [b'{"id": 1, "at": "2026-01-31T12:00:00Z"}'] * 3 + [b"text"])
    infer = ("topics", "infer", "orders", "--data", str(tmp_path))
    shown = polybus(*infer).stdout.decode()
    config = tmp_path / "bus.toml"
    config.write_text(shown.partition("\n\n")[0])
    [topic] = config_file.load(config, {}).topic_list()
    assert topic.schema == "id BIGINT NOT NULL, at TIMESTAMP NOT NULL"
    assert "4 messages read: 3 fit, 1 would be quarantined" in shown and "not JSON" in shown
    newest = json.loads(polybus(*infer, "--messages", "2", "--json").stdout)
    assert (newest["messages"], newest["quarantined"]) == (2, {"not JSON": 1})


def test_a_table_is_removed_while_no_pipeline_runs(tmp_path: Path) -> None:
    publish(tmp_path, "orders", [b"{}"])
    table = open_table(tmp_path, "silver_orders")
    table.append(pa.table({"id": [1]}), writer="w", batch_id=0)
    drop = ("tables", "drop", "silver_orders", "--yes", "--data", str(tmp_path))
    (tmp_path / "pipeline").mkdir()
    with FileLock(tmp_path / "pipeline" / "lock"):
        refused = polybus(*drop)
    assert refused.returncode == 1 and b"pipeline.running" in refused.stderr
    assert b"removed silver_orders" in polybus(*drop).stdout and not table.path.exists()
    assert b"lake.unknown" in polybus(*drop).stderr


def test_a_rebuild_never_removes_a_table_that_may_be_the_users_own(tmp_path: Path) -> None:
    publish(tmp_path, "orders", [b"{}"])
    drop = ("tables", "drop", "silver", "--rebuild", "--yes", "--json", "--data", str(tmp_path))
    for name in ("silver", "silver_orders", "silver_mine"):
        for batch in range(2):
            table = open_table(tmp_path, name)
            table.append(pa.table({"id": [1]}), writer="w", batch_id=batch)
    broken = [open_table(tmp_path, name).folder for name in ("silver_orders", "silver_mine")]
    for folder in broken:
        delta.version_path(folder, 1).rename(folder / "aside")
    declared = Config(topics=[DeclaredTopic(name="orders", schema="id BIGINT")])
    pipeline_settings.write(tmp_path, declared)
    refused = polybus(*drop)
    assert refused.returncode == 1 and b"lake.damaged: table silver_mine" in refused.stderr
    assert table_names(tmp_path) == ["silver", "silver_mine", "silver_orders"]
    (broken[1] / "aside").rename(delta.version_path(broken[1], 1))
    # A topic with a schema has the name of the other one, so it is the pipeline's.
    assert json.loads(polybus(*drop).stdout)["tables"] == ["silver", "silver_orders"]
    assert table_names(tmp_path) == ["silver_mine"]


def test_a_table_keeps_its_versions_for_the_given_hours(tmp_path: Path) -> None:
    publish(tmp_path, "orders", [b"{}"])
    open_table(tmp_path, "gold").append(pa.table({"n": [1]}), writer="w", batch_id=0)
    data = ("--data", str(tmp_path), "--json")
    done = polybus("tables", "keep", "gold", "168", *data)
    assert json.loads(done.stdout) == {"table": "gold", "keeps-s": 604_800.0}, done.stderr
    assert json.loads(polybus("tables", "show", "gold", *data).stdout)["keeps-s"] == 604_800
    unknown = polybus("tables", "keep", "gould", "1", *data)
    assert unknown.returncode == 1 and b"lake.unknown" in unknown.stderr
    assert polybus("tables", "keep", "gold", "0", *data).returncode == 2
