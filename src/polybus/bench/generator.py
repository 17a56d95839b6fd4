"""The load generator: compiled once per version of its source, called for each run."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from polybus.bench import BenchError, compiling

SOURCE_FOLDER = Path(__file__).with_name("loadgen")
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wshadow", "-pthread")
# The generator ends by itself at its deadline; it is killed this much later.
OVERTIME_S = 15.0


def compiled(environ: Mapping[str, str] | None = None) -> Path:
    """The generator, compiled if this version of it is not in the cache. Raises BenchError."""
    return compiling.cached("loadgen", _sources("*.[ch]"), FLAGS, environ)


def compile_to(program: Path, compiler: str, *flags: str) -> None:
    """Compile the generator; `flags` are added to its own. Raises BenchError."""
    compiling.compile_to(program, compiler, _sources("*.c"), (*FLAGS, *flags))


def call(
    program: Path, mode: str, arguments: Sequence[str], *, deadline_s: float, token: str = ""
) -> Any:
    """Run it once; return what it printed. Raises BenchError, also if a delivery was wrong.

    With a `token` its connections log in; Boson only.
    """
    command = [str(program), mode, *arguments, "--deadline-s", str(deadline_s)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=deadline_s + OVERTIME_S,
            env=os.environ | {"LOADGEN_LOGIN": token},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the load generator hung for {error.timeout:.0f} s") from error
    try:
        result = msgspec.json.decode(done.stdout)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise BenchError(text or f"the load generator ended with {done.returncode}") from error
    if not result["verified"]:
        raise BenchError(cast(str, result["error"]))
    return result


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCE_FOLDER.glob(pattern))
