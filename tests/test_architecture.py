"""docs/architecture.md and its neighbours say what the code and pyproject.toml say."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec

from polybus import config
from polybus.cli.common import allocator
from polybus.config import Limits
from polybus.edges.tcp.pump import (
    BESIDE_SINGLE_BYTES,
    GATHER_S,
    READ_S_MAX,
    SHARED_READ_BYTES,
    SMALL_MESSAGES_MAX,
)
from polybus.error_codes import CODES
from polybus.log.columns import SCHEMA
from polybus.services.memory import CATCH_UPS_AT_ONCE_MAX
from polybus.services.sessions.contents import CACHE_BYTES_MAX

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROTOCOL_PAGES = sorted((DOCS / "protocols").glob("*.md"))
PROTOCOL_HEADINGS = [
    "Words of this protocol",
    "How each maps to topics, log and sessions",
    "Lifecycles",
    "Limits",
    "Deviations",
]
DECISION_HEADINGS = ["Context", "Decision", "Consequences"]
MIB = 1 << 20


def contract(kind: str) -> dict[str, Any]:
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    found: dict[str, Any] = next(one for one in contracts if one["type"] == kind)
    return found


def quoted(name: str) -> str:
    """The block after `<!-- name -->` on the architecture page."""
    found = re.search(rf"<!-- {name} -->\n```text\n(.*?)```", ARCHITECTURE, re.DOTALL)
    assert found is not None
    return found[1].strip()


def test_pyarrow_is_required_in_a_version_that_works_without_numpy() -> None:
    """The bus blocks numpy in its process; only pyarrow 17 and earlier cannot do without it."""
    [wanted] = [one for one in PYPROJECT["project"]["dependencies"] if one.startswith("pyarrow")]
    assert int(wanted.removeprefix("pyarrow>=").split(".")[0]) >= 18


def headings(text: str) -> list[str]:
    return re.findall(r"^## (.*)", text, re.MULTILINE)


def test_the_layers_are_those_of_the_import_contract() -> None:
    assert quoted("layers").splitlines() == contract("layers")["layers"]


def test_the_forbidden_modules_are_those_of_the_import_contract() -> None:
    rule = contract("forbidden")
    assert quoted("forbidden").split(", ") == rule["forbidden_modules"]
    for module in rule["source_modules"]:
        assert f"`{module}`" in ARCHITECTURE


def shown(value: float) -> str:
    """A default as the table writes it: 64 MiB, 100,000, 300."""
    if isinstance(value, int) and value % MIB == 0:
        units = {"TiB": MIB << 20, "GiB": MIB << 10} if value >= 100 * MIB << 10 else {}
        unit, size = next(((u, s) for u, s in units.items() if value % s == 0), ("MiB", MIB))
        return f"{value // size} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def test_the_limit_table_has_every_limit_with_its_default() -> None:
    table = ARCHITECTURE.split("<!-- limits -->")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.+) \|$", table, re.MULTILINE)
    expected = [
        (field.encode_name, shown(getattr(Limits(), field.name)))
        for field in msgspec.structs.fields(Limits)
    ]
    assert [(name, default) for name, default, _ in rows] == expected


def test_the_columns_are_those_of_the_log() -> None:
    page = (DOCS / "data-folder.md").read_text()
    table = page.split("| column | type |")[1].split("\n\n")[0]
    names = [
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(.*?)`", row)
    ]
    assert names == SCHEMA.names


def thread_names() -> set[str]:
    """The names of all threads that the package starts; benchmarks' aside."""
    names = set()
    for path in sorted((ROOT / "src" / "polybus").rglob("*.py")):
        text = path.read_text()
        if "Thread" not in text or {"bench", "torture"} & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                given = {one.arg: one.value for one in node.keywords}
                if called in ("Thread", "ThreadPoolExecutor"):
                    name = given.get("name") or given.get("thread_name_prefix") or node.args[1]
                    assert isinstance(name, ast.Constant), f"{path}:{node.lineno} has no name"
                    names.add(str(name.value))
    return names


def test_every_thread_is_documented() -> None:
    section = ARCHITECTURE.split("\n## Threads and processes\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(polybus-[a-z-]+)`", section, re.MULTILINE)) == thread_names()


def lock_names() -> set[tuple[str, str]]:
    """File and name of every lock between threads; those of benchmarks and test kits aside."""
    found = set()
    source = ROOT / "src" / "polybus"
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        text = path.read_text()
        if "threading." not in text or place.parts[0] in ("bench", "torture", "testing"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                kind = r"threading\.(R?Lock|Condition|Semaphore)\b"
                if re.search(kind, ast.unparse(node.value)):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    found.add((str(place), ast.unparse(target).rpartition(".")[2]))
    return found


def test_every_lock_is_documented() -> None:
    table = ARCHITECTURE.split("<!-- locks -->")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(.*?)` `(.*?)` \|", table, re.MULTILINE)) == lock_names()


def test_the_numbers_of_the_pump_are_those_of_the_code() -> None:
    text = " ".join(ARCHITECTURE.split())
    assert f"busy for more than {READ_S_MAX * 1000:g} ms" in text
    assert f"at most {SHARED_READ_BYTES >> 10} KiB" in text
    assert f"at most {BESIDE_SINGLE_BYTES >> 10} KiB while one of them sends single" in text
    rate = f"{SMALL_MESSAGES_MAX / GATHER_S:,.0f} single writes per second"
    assert rate in text
    assert f"once every {GATHER_S * 1000:g} ms" in text


def test_the_numbers_of_memory_are_those_of_the_code() -> None:
    text = " ".join(ARCHITECTURE.split())
    assert CATCH_UPS_AT_ONCE_MAX == 4 and "catch-ups do: four at a time" in text
    assert f"recent packs is cached ({CACHE_BYTES_MAX >> 20} MiB)" in text
    assert f"| `M_MMAP_THRESHOLD` | {allocator.MAPPED_BYTES >> 20} MiB, fixed |" in text
    assert f"| `M_TRIM_THRESHOLD` | {allocator.HEAP_END_BYTES >> 20} MiB |" in text
    assert f"| `M_ARENA_MAX` | {allocator.HEAPS} |" in text
    grown = f"every {allocator.TRIM_S:g} s while the process has grown by"
    assert f"| `malloc_trim` | {grown} {allocator.GROWN_BYTES >> 20} MiB |" in text


def requirement_names(requirements: list[str]) -> list[str]:
    return [re.split(r"[^A-Za-z0-9_-]", one)[0] for one in requirements]


def test_every_dependency_has_a_reason_and_every_reason_a_dependency() -> None:
    project = PYPROJECT["project"]
    required = requirement_names(project["dependencies"])
    for packages in project["optional-dependencies"].values():
        required += requirement_names(packages)
    required += requirement_names(PYPROJECT["build-system"]["requires"])
    page = (DOCS / "decisions" / "dependencies.md").read_text()
    # A package may be in several extras, and has one reason.
    assert sorted(re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)) == sorted(set(required))


def test_every_package_of_the_console_has_a_reason() -> None:
    page = (DOCS / "decisions" / "dependencies.md").read_text()
    packages = json.loads((ROOT / "vendor" / "package.json").read_text())["devDependencies"]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.split(r"[|, ]+", row)}
    assert not [name for name in packages if not named & {name, f"{name.partition('/')[0]}/*"}]


def test_a_decision_has_its_parts_and_is_linked() -> None:
    for page in sorted(DOCS.glob("decisions/0*.md")):
        text = page.read_text()
        assert re.search(r"^Date: \d{4}-\d{2}-\d{2}\. Status: \w+\.$", text, re.MULTILINE), (
            page.name
        )
        assert headings(text) == DECISION_HEADINGS, page.name
        assert f"](decisions/{page.name})" in ARCHITECTURE, page.name


def test_a_protocol_page_has_the_five_headings() -> None:
    for page in PROTOCOL_PAGES:
        assert headings(page.read_text()) == PROTOCOL_HEADINGS, page.name


WRITTEN_BY_HAND = [
    *PROTOCOL_PAGES,
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("decisions/*.md")),
]


def test_error_codes_in_prose_exist() -> None:
    kinds = {code.partition(".")[0] for code in CODES}
    groups: dict[str, type[config.Settings]] = {
        "cluster": config.Cluster,
        "http": config.Http,
        "msgstream": config.Msgstream,
    }
    settings = {
        f"{group}.{field.encode_name}"
        for group, kind in groups.items()
        for field in msgspec.structs.fields(kind)
    }
    for page in WRITTEN_BY_HAND:
        for code in re.findall(r"`([a-z]+\.[a-z0-9]+(?:-[a-z0-9]+)*)`", page.read_text()):
            is_file = re.search(r"\.(json|toml|sock|lock|py|md|db)$", code)
            if not is_file and code not in settings:
                known = code.partition(".")[0] not in kinds or code in CODES
                assert known, f"{page.name} names {code}"


def test_files_that_prose_names_exist() -> None:
    for page in WRITTEN_BY_HAND:
        for path in re.findall(r"`((?:tests|src|examples)/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_a_file_says_what_it_decides() -> None:
    """The words in italics of docs/where.md are in the docstring of the file beside them."""
    rows = re.findall(r"^\| (.*\?) \| `(.*?)`", (DOCS / "where.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for question, path in rows:
        docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
        said = " ".join(docstring.lower().split())
        words = re.findall(r"\*(.+?)\*", question.lower())
        assert words and all(word in said for word in words), f"{path}: {question}"


def test_a_picture_is_whole_and_has_a_title() -> None:
    for picture in sorted(DOCS.glob("img/*.svg")):
        root = ElementTree.parse(picture).getroot()
        title = root.find("{http://www.w3.org/2000/svg}title")
        assert title is not None and title.text, picture.name


def test_one_module_knows_the_layout_of_a_spark_checkpoint() -> None:
    source = ROOT / "src" / "polybus"
    found = {
        path.relative_to(source).as_posix()
        for folder in ("lake", "log", "services", "spark")
        for path in (source / folder).rglob("*.py")
        if re.search(r'"(offsets|commits)"(?!:)', path.read_text())
    }
    assert found == {"log/spark_checkpoint.py"}
