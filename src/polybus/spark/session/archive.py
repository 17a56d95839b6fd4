"""An archive of the classes that Spark loads, which halves the start time of its JVM.

A training run records it once for each pair of Java and PySpark: one pass of the standard pipeline
over a few messages, after which the JVM writes the archive while it exits. `polybus up` starts
`python -m polybus.spark.session.archive` for that, in the background with low priority. Archives
are kept in the user's cache folder. Java itself checks that an archive fits its jars, and ignores
one that does not fit or is damaged.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from polybus import config
from polybus.batch import Batch
from polybus.log.files import FileLog
from polybus.processes import scratch_folder
from polybus.spark.session.java import Java, find_java

VARIABLE = "POLYBUS_SPARK_ARCHIVE"
"""Set it to `off` to neither use nor record an archive."""
RECORD_VARIABLE = "POLYBUS_SPARK_RECORD"
"""Set in a training run: the file to which Java writes the archive."""
UNVERIFIED = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
"""For a start without an archive: classes are loaded as they are in the jars, which takes a quarter
less time. Those in an archive were verified when it was recorded."""
AOT_SINCE = 25
ARCHIVES_MAX = 4
TRAINING_TIMEOUT_S = 480.0
MESSAGES = (b'{"n": 1, "at": "2026-01-01T00:00:00Z"}', b"text", b'{"broken": ', b"\xff\xfe")


def options(java: Java) -> list[str]:
    """The options for Java that use the archive if it exists, or record one."""
    is_aot = java.major >= AOT_SINCE
    recorded = os.environ.get(RECORD_VARIABLE)
    if recorded:
        return [f"-XX:{'AOTCacheOutput' if is_aot else 'ArchiveClassesAtExit'}={recorded}"]
    path = archive_path(java)
    if path is None or not path.exists():
        return list(UNVERIFIED)
    return [f"-XX:{'AOTCache' if is_aot else 'SharedArchiveFile'}={path}"]


def archive_path(java: Java) -> Path | None:
    """The path of the archive for this Java and this PySpark; None if archives are off."""
    if os.environ.get(VARIABLE) == "off":
        return None
    jars = jars_folder()
    # The time of the folder changes with every installation, also of the same version.
    identity = f"{java.path} {java.version} {jars} {jars.stat().st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    version = importlib.metadata.version("pyspark")
    return cache_folder() / f"spark-{version}-java-{java.version}-{key}.archive"


def jars_folder() -> Path:
    """PySpark's jars, without an import of PySpark, which takes as long as a JVM's start."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "jars"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "polybus"


def start_making() -> subprocess.Popen[bytes] | None:
    """Start a training run in the background; None if the archive exists or is switched off."""
    path = archive_path(find_java())
    if path is None or path.exists():
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "polybus.spark.session.archive"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: os.nice(15),
    )


def make(java: Java) -> Path | None:
    """Record the archive, atomically; None if it is off or another process records it."""
    path = archive_path(java)
    if path is None or path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if path.exists():
            return path  # another process has just recorded it
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        train(part)
        if not part.exists():
            return None
        part.rename(path)
    # Other installations have their own archives. The oldest are removed.
    archives = sorted(path.parent.glob("spark-*.archive"), key=lambda one: one.stat().st_mtime)
    for old in archives[:-ARCHIVES_MAX]:
        old.unlink(missing_ok=True)
    return path


def train(part: Path) -> None:
    """Run the standard pipeline once with a Java that records the loaded classes.

    Raises:
        OSError, subprocess.SubprocessError: it did not start, or took too long.
    """
    with scratch_folder("train") as folder:
        data = folder / "data"
        data.mkdir()
        log = FileLog(
            data,
            durability="fsync",
            journal=config.Journal(),
            retention=config.Retention(),
            clock=lambda: time.time_ns() // 1000,
            maintenance=False,
        )
        log.create_topic("training")
        log.append(Batch.of("training", list(MESSAGES)))
        log.sync()
        log.close()
        # By name: the pipeline is built on this package, which must not import it.
        driver = ("-m", "polybus.spark.pipelines.running.driver", "--once", "--data", str(data))
        with subprocess.Popen(
            [sys.executable, *driver],
            # The driver stops when this pipe closes, also if this process is killed.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {RECORD_VARIABLE: str(part)},
        ) as process:
            try:
                process.wait(TRAINING_TIMEOUT_S)
            except BaseException:
                process.kill()
                raise


if __name__ == "__main__":
    sys.exit(0 if make(find_java()) is not None else 1)
