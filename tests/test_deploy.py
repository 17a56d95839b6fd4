"""What runs the bus for real: the unit, the images, the dashboard, the alerts, the package."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_kit import ROOT

from polybus import config_file
from polybus.edges.http.metrics.gather import render
from polybus.edges.http.metrics.of_process import disk_families
from polybus.testing import run_bus

DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b((?:polybus|process)_[a-z_]+)\b")


async def names_of_metrics() -> set[str]:
    async with run_bus("news") as bus:
        text = (await render(bus.http, disk_families(bus.data))).decode()
    families = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    series = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[:1] != "#"}
    return families | series


def loaded(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


async def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist() -> None:
    known = await names_of_metrics()
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = [rule for group in loaded("alerts.yml")["groups"] for rule in group["rules"]]
    asked += [rule["expr"] for rule in rules]
    assert len(asked) > 25
    unknown = {name for expr in asked for name in METRIC.findall(expr)} - known
    assert unknown == set()
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_no_panels_of_the_dashboard_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_alerts_pass_promtool_where_it_is_installed() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        text = "promtool is missing; on Debian: apt-get install prometheus"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    for command in (
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts-test.yml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
    ):
        done = subprocess.run([promtool, *command], cwd=DEPLOY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_ci_builds_and_tries_everything_that_users_install() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    lines = re.findall(r"^make (.*)", ci, re.MULTILINE)
    tried = [word for line in lines for word in shlex.split(line)]
    assert {"lint", "test", "docs", "smoke", "smoke-pure"} <= set(tried)
    # A dry run: each is a target that make knows.
    planned = subprocess.run(
        ["make", "--dry-run", *tried], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, planned.stderr
    for command in ("mkdocs build --strict", "deploy/smoke.py compiled", 'smoke.py "pure Python"'):
        assert command in planned.stdout


def test_make_run_installs_what_a_user_needs_and_takes_a_port() -> None:
    """No tools of developers, and no archive of Spark: the bus runs before that is made."""
    # As if a source had changed, so that the set-up is planned, too.
    changed = ["make", "--no-print-directory", "--dry-run", "--what-if=pyproject.toml", "run"]
    for port, option in (("", ""), ("PORT=8080", " --port 8080")):
        asked = [*changed, port] if port else changed
        planned = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
        *set_up, last = planned.stdout.splitlines()
        installs = [line for line in set_up if "pip install" in line]
        assert last == f".venv/bin/polybus up --demo{option}"
        assert [shlex.split(line)[-1] for line in installs] == [".[spark]"]
        assert "--quiet" not in installs[0] and "archive" not in planned.stdout


def test_the_unit_is_hardened_and_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "polybus.service").read_text()
    for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=\n"):
        assert line in text
    # A wrong setting is exit 2; the start after anything else takes what is there.
    assert "RestartPreventExitStatus=2" in text and "ExecReload=/bin/kill -HUP" in text
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        shutil.copy(DEPLOY / "polybus.socket", tmp_path)
        unit = tmp_path / "polybus.service"
        unit.write_text(text.replace("/opt/polybus/bin/polybus", "/bin/true"))
        units = [str(unit), str(tmp_path / "polybus.socket")]
        done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True)
        assert done.returncode == 0 and "polybus." not in done.stderr, done.stderr


def test_a_unit_names_only_files_that_the_steps_install() -> None:
    steps = (ROOT / "docs" / "howto" / "operate.md").read_text()
    for unit in (*DEPLOY.glob("*.service"), *DEPLOY.glob("*.socket")):
        for path in re.findall(r"^Documentation=file://(\S+)", unit.read_text(), re.MULTILINE):
            assert path in steps, f"{unit.name}: nothing installs {path}"


def test_the_settings_of_the_service_and_the_image_are_settings() -> None:
    for name in ("service.toml", "container.toml"):
        config = config_file.load(DEPLOY / name, {})
        assert config.data == "/var/lib/polybus" and config.logging.format == "json"


def test_the_images_use_files_that_exist() -> None:
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
    compose = loaded("compose.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            # The token is the user's.
            if source.startswith("./") and source != "./metrics.token":
                assert (DEPLOY / source).exists(), source
    assert compose["services"]["polybus"]["stop_grace_period"] == "40s"
    assert loaded("prometheus.yml")["rule_files"] == ["alerts.yml"]


def test_grafana_reports_to_nobody() -> None:
    settings = loaded("compose.yaml")["services"]["grafana"]["environment"]
    asks = ("REPORTING_ENABLED", "CHECK_FOR_UPDATES", "CHECK_FOR_PLUGIN_UPDATES")
    assert [settings[f"GF_ANALYTICS_{one}"] for one in asks] == ["false"] * 3
    assert settings["GF_NEWS_NEWS_FEED_ENABLED"] == "false"


def test_the_package_has_every_file_of_the_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["polybus"]
    source = ROOT / "src" / "polybus"
    listed = subprocess.run(
        ["git", "ls-files", "src/polybus"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    left_out = []
    for name in listed.stdout.splitlines():
        path = (ROOT / name).relative_to(source).as_posix()
        # `**/` stands for any number of folders, also none.
        wide = [one.replace("**/", "") if "/" not in path else one for one in patterns]
        is_in = any(fnmatch.fnmatch(path, one.replace("**/", "*")) for one in wide)
        if not path.endswith((".py", ".pyi")) and not is_in:
            left_out.append(path)
    assert left_out == []
