"""Finds the pipelines in a folder, and loads the files of each.

    pipelines/orders/…          a pipeline named `orders`: its .py and .sql files at any depth, or
                                those that its spark-pipeline.yml names (Spark's own spec)
    pipelines/clicks.py         a pipeline of one file, named `clicks`

A Python file runs as in Spark's own runner: with `spark` as a global, in the pipeline's folder, and
not as an importable module, so that functions are sent to workers by value.
"""

import importlib.util
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

from polybus.errors import UsageError
from polybus.spark.location import BusLocation
from polybus.spark.pipelines.declared import readers
from polybus.spark.pipelines.declared.registry import (
    DeclarationRegistry,
    DeclaredPipeline,
    PipelineError,
    check_targets,
    located,
)
from polybus.spark.pipelines.declared.sql_files import SqlFile

SPEC_NAMES = ("spark-pipeline.yml", "spark-pipeline.yaml")
SUFFIXES = (".py", ".sql")
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}", re.ASCII)


def find_pipelines(folder: Path) -> dict[str, Path]:
    """Name → folder or file of each pipeline in `folder`, sorted by name.

    Raises:
        UsageError: `pipeline.folder`, the folder does not exist; `pipeline.duplicate`.
    """
    if not folder.is_dir():
        raise UsageError("pipeline.folder", f"folder {folder} does not exist")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if not _is_pipeline(path):
            continue
        name = path.stem.lower() if path.is_file() else path.name.lower()
        if name in found:
            text = f"{path} and {found[name]} are both named {name}; rename one"
            raise UsageError("pipeline.duplicate", text)
        found[name] = path
    return found


def choose(found: dict[str, Path], names: tuple[str, ...]) -> dict[str, Path]:
    """The pipelines with these names, or all without names. UsageError `pipeline.unknown`."""
    unknown = [name for name in names if name.lower() not in found]
    if unknown:
        text = f"no pipeline {', '.join(unknown)}; there are: {', '.join(found) or 'none'}"
        raise UsageError("pipeline.unknown", text)
    chosen = {name.lower() for name in names}
    return {name: path for name, path in found.items() if not names or name in chosen}


def _is_pipeline(path: Path) -> bool:
    if path.name.startswith((".", "_")) or not _NAME.fullmatch(path.stem):
        return False
    if path.is_file():
        return path.suffix in SUFFIXES
    return path.is_dir() and next(source_files(path), None) is not None


def source_files(folder: Path) -> Iterator[Path]:
    """The Python and SQL files of a pipeline, sorted by name."""
    if folder.is_file():
        yield folder
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
        if path.suffix in SUFFIXES and path.is_file() and not hidden:
            yield path


def load_pipeline(spark: Any, name: str, path: Path, bus: BusLocation) -> DeclaredPipeline:
    """Run the files of a pipeline and return what they declare.

    Raises:
        PipelineError: the first error, with file and line.
    """
    from polybus.spark.internals import graph_element_registration_context

    path = path.resolve()
    folder = path.parent if path.is_file() else path
    pipeline = DeclaredPipeline(name, folder)
    files = [path] if path.is_file() else _listed_files(pipeline)
    if not files:
        raise PipelineError("pipeline.file", "it has no .py or .sql file", file=str(path))

    registry = DeclarationRegistry(pipeline)
    readers.install(type(spark))
    with readers.active(spark), readers.using(readers.Resolver(bus)), chdir(folder):
        with graph_element_registration_context(registry):
            for file in files:
                _load_file(spark, registry, file)
    check_targets(pipeline)
    if not pipeline.outputs:
        raise PipelineError("pipeline.file", "it declares no table, view or sink", file=str(path))
    return pipeline


def _load_file(spark: Any, registry: DeclarationRegistry, file: Path) -> None:
    try:
        if file.suffix == ".sql":
            SqlFile(spark, file, registry).read(file.read_text(encoding="utf-8"))
            return
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        module.__dict__["spark"] = spark
        # Not by its loader: a compiled file hides a change of the same second and the same size.
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise located("pipeline.file", error, file=str(file), line=None) from error


def _listed_files(pipeline: DeclaredPipeline) -> list[Path]:
    """The files that the spec names, or all; adds the spec's configuration to the pipeline."""
    specs = [path for name in SPEC_NAMES if (path := pipeline.folder / name).is_file()]
    if not specs:
        return list(source_files(pipeline.folder))
    from polybus.spark.internals import load_pipeline_spec

    try:
        spec = load_pipeline_spec(specs[0])
    except Exception as error:
        raise located("pipeline.file", error, file=str(specs[0]), line=None) from error
    pipeline.conf.update(spec.configuration)
    files = [
        path
        for library in spec.libraries
        for path in sorted(pipeline.folder.glob(library.include))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    other = [path for path in files if path.suffix not in SUFFIXES]
    if other:
        text = f"{other[0].name} is neither .py nor .sql; leave it out of the libraries"
        raise PipelineError("pipeline.file", text, file=str(specs[0]))
    return list(dict.fromkeys(files))
