"""The load generator, for the tests of `polybus bench`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from polybus.bench import generator


@pytest.fixture(scope="session")
def loadgen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generator, compiled with every warning an error."""
    program = tmp_path_factory.mktemp("loadgen") / "loadgen"
    compiler = shutil.which("cc")
    assert compiler is not None
    generator.compile_to(program, compiler, "-Werror", "-O1")
    return program
