"""An archive of the classes Spark loads, with which its JVM starts in about half the time.

It is made once for each pair of Java and PySpark, by a small training run (`python -m
polybus.spark.session.archive`) that `polybus up` starts in the background with low priority, and is
kept in the user's cache folder. Java checks by itself that the archive fits its jars; one that does
not, or that is damaged, is ignored and costs nothing but the time it would have saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from polybus.spark.session.java import Java, find_java

VARIABLE = "POLYBUS_SPARK_ARCHIVE"
"""Set to `off` to start without an archive and to make none."""
RECORD_VARIABLE = "POLYBUS_SPARK_RECORD"
"""Set in a training run: where Java is to write the archive when it ends."""
AOT_SINCE = 25
ASSEMBLE_TIMEOUT_S = 300.0
ARCHIVES_MAX = 4


def options(java: Java) -> list[str]:
    """What to start Java with: the archive if there is one, or what records one."""
    recorded = os.environ.get(RECORD_VARIABLE)
    if recorded:
        if java.major >= AOT_SINCE:
            return ["-XX:AOTMode=record", f"-XX:AOTConfiguration={recorded}"]
        return [f"-XX:ArchiveClassesAtExit={recorded}"]
    path = archive_path(java)
    if path is None or not path.exists():
        return []
    use = "AOTCache" if java.major >= AOT_SINCE else "SharedArchiveFile"
    return [f"-XX:{use}={path}"]


def archive_path(java: Java) -> Path | None:
    """Where the archive of this Java and this PySpark is, or would be; None if switched off."""
    if os.environ.get(VARIABLE) == "off":
        return None
    jars = jars_folder()
    # The folder's time changes with every installation, also of the same version.
    identity = f"{java.path} {java.version} {jars} {jars.stat().st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    version = importlib.metadata.version("pyspark")
    return cache_folder() / f"spark-{version}-java-{java.version}-{key}.archive"


def jars_folder() -> Path:
    """PySpark's jars; found without importing PySpark, which takes as long as a JVM's start."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "jars"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "polybus"


def start_making() -> subprocess.Popen[bytes] | None:
    """Start a training run in the background if there is no archive yet; None if none is needed."""
    path = archive_path(find_java())
    if path is None or path.exists():
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "polybus.spark.session.archive"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_step_back,
    )


def _step_back() -> None:
    os.nice(15)


def make(java: Java) -> Path | None:
    """Run the training and put the archive in its place, whole or not at all."""
    path = archive_path(java)
    if path is None or path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(path) as alone:
        if not alone or path.exists():
            return None
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        train(part)
        if java.major >= AOT_SINCE and part.exists():
            part = _assembled(java, part)
        if not part.exists():
            return None
        part.rename(path)
    # Another checkout, or another Java, has one of its own; those of the past go.
    archives = sorted(path.parent.glob("spark-*.archive"), key=lambda one: one.stat().st_mtime)
    for old in archives[:-ARCHIVES_MAX]:
        old.unlink(missing_ok=True)
    return path


def _assembled(java: Java, record: Path) -> Path:
    """From Java 25 on the training leaves a record, and another Java makes the archive of it."""
    from polybus.spark.session.gateway import java_command

    made = record.with_suffix(".assembled")
    with tempfile.TemporaryDirectory(prefix="polybus-train-") as folder:
        scratch = Path(folder)
        program, *rest = java_command(java, memory="1g", scratch=scratch, log=scratch / "log")
        options = ("-XX:AOTMode=create", f"-XX:AOTConfiguration={record}", f"-XX:AOTCache={made}")
        subprocess.run(
            [program, *options, *rest],
            stdout=subprocess.DEVNULL,
            timeout=ASSEMBLE_TIMEOUT_S,
            check=True,
        )
    record.unlink()
    return made


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    """Whether no other process makes this archive now."""
    import fcntl

    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def train(part: Path) -> None:
    """Run the pipeline for a moment, with a Java that writes down what it loaded.

    Raises:
        OSError, subprocess.SubprocessError: it did not start, or took too long.
    """
    from polybus.spark.session import training

    with tempfile.TemporaryDirectory(prefix="polybus-train-") as folder:
        training.run(Path(folder), dict(os.environ) | {RECORD_VARIABLE: str(part)})


if __name__ == "__main__":
    made = make(find_java())
    sys.exit(0 if made is not None else 1)
