"""What the pages of docs say about the code, to compare with it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA_FOLDER = ROOT / "docs" / "data-folder.md"


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
