"""The load generator: compiled once per version of its source, called for each run."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from polybus.bench import BenchError

SOURCE_FOLDER = Path(__file__).with_name("loadgen")
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wshadow", "-pthread")
COMPILE_TIMEOUT_S = 120.0
# The generator ends by itself at its deadline; it is killed this much later.
OVERTIME_S = 15.0


def compiled(environ: Mapping[str, str] | None = None) -> Path:
    """The generator, compiled if this version of it is not in the cache. Raises BenchError."""
    if not sys.platform.startswith("linux"):
        raise BenchError("the benchmark needs Linux: it uses epoll and /proc")
    environ = os.environ if environ is None else environ
    program = _cache_folder(environ) / f"loadgen-{_fingerprint()}"
    if program.exists():
        return program
    compiler = shutil.which(environ.get("CC", "cc"), path=environ.get("PATH"))
    if compiler is None:
        raise BenchError("the benchmark needs a C compiler: apt-get install gcc libc6-dev")
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        # Compiled under a temporary name: a second benchmark must not run an unfinished program.
        handle, unfinished = tempfile.mkstemp(dir=program.parent)
        os.close(handle)
    except OSError as error:
        text = f"cannot write to the cache {program.parent}: {error.strerror}; set XDG_CACHE_HOME"
        raise BenchError(text) from error
    try:
        compile_to(Path(unfinished), compiler)
        Path(unfinished).replace(program)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return program


def compile_to(program: Path, compiler: str, *flags: str) -> None:
    """Compile the generator; `flags` are added to its own. Raises BenchError."""
    command = [compiler, *FLAGS, *flags, *map(str, _sources("*.c")), "-o", str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"the load generator does not compile:\n{done.stderr.strip()}")


def call(program: Path, mode: str, arguments: Sequence[str], *, deadline_s: float) -> Any:
    """Run it once; return what it printed. Raises BenchError, also if a delivery was wrong."""
    command = [str(program), mode, *arguments, "--deadline-s", str(deadline_s)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=deadline_s + OVERTIME_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the load generator hung for {error.timeout:.0f} s") from error
    try:
        result = msgspec.json.decode(done.stdout)
    except msgspec.DecodeError as error:
        text = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise BenchError(text or f"the load generator ended with {done.returncode}") from error
    if not result["verified"]:
        raise BenchError(cast(str, result["error"]))
    return result


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCE_FOLDER.glob(pattern))


def _fingerprint() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (*FLAGS, platform.machine(), platform.libc_ver()[1]):
        digest.update(part.encode())
    for path in _sources("*.[ch]"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache_folder(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return Path(home) / "polybus"
