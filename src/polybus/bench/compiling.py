"""C programs of this package: compiled once per version of their source, then kept in a cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from polybus.bench import BenchError

COMPILE_TIMEOUT_S = 120.0


def cached(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    environ: Mapping[str, str] | None = None,
) -> Path:
    """The program, compiled if this version of it is not in the cache. Raises BenchError."""
    if not sys.platform.startswith("linux"):
        raise BenchError(f"{name} needs Linux: it uses epoll and /proc")
    environ = os.environ if environ is None else environ
    program = _cache_folder(environ) / f"{name}-{_fingerprint(sources, flags)}"
    if program.exists():
        return program
    compiler = shutil.which(environ.get("CC", "cc"), path=environ.get("PATH"))
    if compiler is None:
        raise BenchError(f"{name} needs a C compiler: apt-get install gcc libc6-dev")
    try:
        program.parent.mkdir(parents=True, exist_ok=True)
        # Compiled under a temporary name: a second process must not run an unfinished program.
        handle, unfinished = tempfile.mkstemp(dir=program.parent)
        os.close(handle)
    except OSError as error:
        text = f"cannot write to the cache {program.parent}: {error.strerror}; set XDG_CACHE_HOME"
        raise BenchError(text) from error
    try:
        compile_to(
            Path(unfinished), compiler, [one for one in sources if one.suffix == ".c"], flags
        )
        Path(unfinished).replace(program)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return program


def compile_to(program: Path, compiler: str, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """Compile the sources to a program. Raises BenchError."""
    command = [compiler, *flags, *map(str, sources), "-o", str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"{sources[0].parent.name} does not compile:\n{done.stderr.strip()}")


def _fingerprint(sources: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (*flags, platform.machine(), platform.libc_ver()[1]):
        digest.update(part.encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _cache_folder(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return Path(home) / "polybus"
