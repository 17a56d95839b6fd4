"""What the pages of docs say about the code, to compare with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*) -->\n)?^```(?P<kind>\S*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
DATA_FOLDER = ROOT / "docs" / "data-folder.md"


# What a reader runs. Blocks of other kinds are output, settings or pictures.
CODE = ("sh", "console", "python", "py", "sql", "html")
SQL_LINES = r"polybus sql .*"
HOWTO = "docs/howto/"


class Block(NamedTuple):
    """A block of code on a page; `mark` is the comment before it, `section` the heading above."""

    kind: str
    text: str
    mark: str
    line: int
    section: str

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run: ")


class Runner(NamedTuple):
    """A test that runs the blocks of some kinds on a page, or in one section of it.

    `lines`: only blocks all lines of which match.
    """

    test: str
    page: str
    kinds: tuple[str, ...]
    section: str = ""
    lines: str = ".*"

    def runs(self, block: Block) -> bool:
        is_there = not self.section or block.section == self.section
        is_fit = all(re.fullmatch(self.lines, line) for line in block.text.splitlines())
        return block.kind in self.kinds and block.is_run and is_there and is_fit


# Which test runs what; a test takes its blocks from `run_by`. Whatever is in none of these has a
# comment before it, `<!-- not run: why -->`: tests/cli/test_howtos.py finds the others.
FOLLOWED = ("accounts", "backup", "client", "http", "operate", "replay")
RUNNERS = (
    Runner("test_readme.py", "README.md", ("console", "python")),
    Runner("test_readme.py", "docs/start.md", ("console", "python")),
    *(Runner("cli/test_howtos.py", f"{HOWTO}{name}.md", ("sh", "python")) for name in FOLLOWED),
    Runner("cli/test_howtos.py", f"{HOWTO}monitor.md", ("sh",)),
    Runner("cli/test_cli_get.py", f"{HOWTO}large-payloads.md", ("console", "sh")),
    Runner("cli/test_cli_up.py", f"{HOWTO}up.md", ("sh",)),
    Runner("kafka/test_moving.py", f"{HOWTO}cluster.md", ("sh",)),
    Runner("spark/test_kafka_source.py", f"{HOWTO}cluster.md", ("python",)),
    Runner("cli/test_secure_page.py", f"{HOWTO}secure.md", ("console",)),
    Runner("cli/test_cli_self_signed.py", f"{HOWTO}secure.md", ("sh", "python")),
    Runner("edges/test_browser_howto.py", f"{HOWTO}browser.md", ("html",)),
    Runner("queues/test_queue_docs.py", "docs/protocols/queues.md", ("python",)),
    Runner("spark/test_docs_spark.py", f"{HOWTO}spark.md", ("python",)),
    Runner("spark/test_docs_spark.py", "README.md", ("py",)),
    Runner("spark/test_docs_spark.py", f"{HOWTO}large-payloads.md", ("python",)),
    Runner("spark/test_docs_spark.py", f"{HOWTO}tables.md", ("python", "sh")),
    Runner("spark/test_docs_spark.py", f"{HOWTO}sql.md", ("python",)),
    Runner("spark/test_docs_spark.py", f"{HOWTO}standard-pipeline.md", ("sh",), "Declared topics"),
    Runner("spark/test_docs_spark.py", f"{HOWTO}up.md", ("python",)),
    Runner("spark/test_docs_spark.py", f"{HOWTO}monitor.md", ("python",)),
    Runner("spark/test_docs_queries.py", f"{HOWTO}sql.md", ("sh",), lines=SQL_LINES),
    Runner("spark/test_docs_queries.py", f"{HOWTO}standard-pipeline.md", ("sh",), lines=SQL_LINES),
    Runner("spark/test_cli_pipeline.py", f"{HOWTO}pipelines.md", ("sh",)),
    Runner("spark/test_recipes.py", f"{HOWTO}pipelines.md", ("python", "sql", "console")),
)


def pages() -> list[Path]:
    """The pages that people read; the reference is generated, decisions are history."""
    docs = ROOT / "docs"
    found = [docs / "start.md", *docs.glob("howto/*.md"), *docs.glob("protocols/*.md")]
    return [ROOT / "README.md", *sorted(found)]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for one in BLOCK.finditer(text):
        line = text.count("\n", 0, one.start()) + 1
        headings = re.findall(r"^## (.*)", BLOCK.sub("", text[: one.start()]), re.MULTILINE)
        section = headings[-1] if headings else ""
        found.append(Block(one["kind"], one["text"], one["mark"] or "", line, section))
    return found


def run_by(test: str, page: str) -> list[Block]:
    """The blocks of a page that a test runs, in their order; at least one."""
    runners = [one for one in RUNNERS if (one.test, one.page) == (test, page)]
    blocks = [one for one in blocks_of(ROOT / page) if any(who.runs(one) for who in runners)]
    assert blocks, f"{page} has nothing that {test} runs"
    return blocks


def documented_files(mark: str) -> list[str]:
    """The patterns of the table after `<!-- mark -->` in docs/data-folder.md."""
    table = DATA_FOLDER.read_text().split(f"<!-- {mark} -->")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [pattern for cell in cells for pattern in re.findall(r"`(.*?)`", cell)]


def undocumented_files(data: Path) -> list[str]:
    """The files of a data folder that docs/data-folder.md does not have."""
    patterns = documented_files("files")
    patterns += [f"accounts/default/topics/*/{one}" for one in documented_files("topic files")]
    patterns += [f"tables/*/{one}" for one in documented_files("table files")]
    exact = [re.compile(_regex(one)) for one in patterns if not _is_described_below(one)]
    found = (path.relative_to(data).as_posix() for path in data.rglob("*") if not path.is_dir())
    return sorted(path for path in found if not any(one.fullmatch(path) for one in exact))


def _is_described_below(pattern: str) -> bool:
    return pattern in ("accounts/default/topics/**", "tables/**")


def _regex(pattern: str) -> str:
    """`*` is any part of one name, `**` any path."""
    return re.escape(pattern).replace(r"\*\*", ".+").replace(r"\*", "[^/]*")
