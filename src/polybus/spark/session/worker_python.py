"""Whether another Python, which Spark would start, can import Polybus."""

import subprocess
import sys

from polybus.errors import PolybusError
from polybus.version import __version__

PROBE = "import pyspark_polybus, polybus; print(polybus.__version__)"
PROBE_TIMEOUT_S = 60.0


def problem_of(python: str) -> str:
    """Why the source cannot run in a Python; empty if it can."""
    if python == sys.executable:
        return ""
    try:
        done = subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be run: {getattr(error, 'strerror', None) or error}"
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2]
        return f"{python} cannot import Polybus: {said or f'exit code {done.returncode}'}"
    version = done.stdout.strip()
    return "" if version == __version__ else f"{python} has Polybus {version}, not {__version__}"


def check_python(python: str) -> None:
    """Refuse a Python for Spark's processes that has no Polybus, or another version.

    Raises:
        PolybusError: `spark.python`.
    """
    if problem := problem_of(python):
        text = f"Spark starts its Python processes with PYSPARK_PYTHON={python}, but {problem}"
        raise PolybusError("spark.python", f"{text}; set it to {sys.executable} before it starts")
